"""Collectives and autograd functions of the user's own, which no function mode is told of.

While anything is checked, ``torch.autograd.Function.apply`` and the functions of
``torch.distributed`` that change a tensor are exchanged for ones that tell the checkers of their
thread, and do the same as before for everybody else. What was compiled runs uncompiled.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import CheckpointFunction

from .combine import fail
from .mode import Checker, tensors_of
from .regions import Region, argument, through
from .types import EQUAL, INVARIANT, PARTIAL, REPLICATED, VARYING, Record

_lock = threading.Lock()
_users = 0
_restore: list[Callable[[], None]] = []

_WRITES = {
    # function: place and name of what it writes, of its group, and the type of the result
    "all_reduce": ((0, "tensor"), (2, "group"), INVARIANT),
    "broadcast": ((0, "tensor"), (2, "group"), INVARIANT),
    "all_gather": ((0, "tensor_list"), (2, "group"), INVARIANT),
    "all_gather_into_tensor": ((0, "output_tensor"), (2, "group"), INVARIANT),
    "reduce_scatter": ((0, "output"), (3, "group"), VARYING),
    "reduce_scatter_tensor": ((0, "output"), (3, "group"), VARYING),
    "all_to_all_single": ((0, "output"), (4, "group"), VARYING),
}

_SUMS, _OWN = frozenset({PARTIAL, VARYING}), frozenset({VARYING})
_TWICE = {
    INVARIANT: "it is the same on all ranks already: leave the collective out",
    REPLICATED: "it is the same on all ranks already: leave the collective out",
}
# Autograd functions of torch.distributed.nn.functional, whose gradients are summed too.
_TORCHS = {
    "_AllReduce": Region(_SUMS, REPLICATED, (1, "group"), _TWICE),
    "_Reduce_Scatter": Region(_SUMS, VARYING, (1, "group"), _TWICE),
    "_AllGather": Region(_OWN, REPLICATED, (0, "group"), _TWICE),
    "_AllGatherBase": Region(_OWN, REPLICATED, (2, "group"), _TWICE),
    "_AlltoAllSingle": Region(_OWN, VARYING, (0, "group"), _TWICE),
}


_HANDING = frozenset({"BackwardHookFunction", "_DDPSink", "RegisterPostBackwardFunction"})
"""torch's own autograd functions that return what they are given."""


def active_checkers() -> list[Checker]:
    """Return the checkers of this thread, the innermost first; inside an operation none."""
    modes = reversed(_get_current_function_mode_stack())
    found = [mode for mode in modes if isinstance(mode, Checker)]
    return [one for one in found if one.axes and not one.paused]


@contextmanager
def exchanged() -> Iterator[None]:
    """Exchange the functions as long as anybody checks, in any thread."""
    global _users
    with _lock:
        _users += 1
    try:
        with _lock:
            if not _restore:
                _exchange()
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                while _restore:
                    _restore.pop()()


def _exchange() -> None:
    apply = torch.autograd.Function.__dict__["apply"]
    torch.autograd.Function.apply = classmethod(  # type: ignore[assignment]
        functools.partial(_apply, apply.__func__)
    )
    _restore.append(functools.partial(setattr, torch.autograd.Function, "apply", apply))
    if "torch._dynamo" in sys.modules:  # what was compiled runs as it is written
        stance = torch.compiler.set_stance("force_eager")
        _restore.append(functools.partial(stance.__exit__, None, None, None))
    for name in _WRITES:
        original = getattr(distributed_c10d, name)
        told = functools.wraps(original)(functools.partial(_collective, name, original))
        for module in (dist, distributed_c10d):
            setattr(module, name, told)
            _restore.append(functools.partial(setattr, module, name, original))


def _apply(original: Callable[..., Any], function: type, *args: Any, **kwargs: Any) -> Any:
    checkers = active_checkers()
    operands = tensors_of(args, kwargs)
    if not checkers or not operands:
        return original(function, *args, **kwargs)
    if function is CheckpointFunction:  # its first argument is looked into
        return original(function, Rerun(args[0], operands, checkers), *args[1:], **kwargs)
    records = [_result(checker, function, args, kwargs) for checker in checkers]
    for checker in checkers:  # what is inside is the function's affair
        checker.paused = True
    try:
        output = original(function, *args, **kwargs)
    finally:
        for checker in checkers:
            checker.paused = False
    outputs = tensors_of((output,), {})
    for checker, record in zip(checkers, records, strict=True):
        # torch's hooks, and wrappers of modules, hand tensors through that are of many types.
        known = map(checker.records.of, operands) if record is None else itertools.repeat(record)
        for one, kind in zip(outputs, known, strict=False):
            checker.records.set(one, kind)
    return output


def _result(checker: Checker, function: type, args: tuple[Any, ...], kwargs: Any) -> Record | None:
    """Return what is known of an autograd function's result; None if it hands tensors through."""
    if function.__name__ in _HANDING and function.__module__.startswith("torch."):
        return None
    operands = [checker.records.operand(one) for one in tensors_of(args, kwargs)]
    checker.operations += 1
    region = None
    if function.__module__ == "torch.distributed.nn.functional":
        region = _TORCHS.get(function.__name__)
    if region is None:
        return checker.result(function.__name__, operands)
    places = checker.places_of(argument(args, kwargs, *region.group) or dist.group.WORLD)
    return through(checker.records, function.__name__, region, operands[-1:], places)


class Rerun:
    """A function that torch's reentrant checkpointing runs, and in backward runs again.

    The first run has no gradients, by which much of what is wrong is known: the second is
    checked too, with the types that the arguments had.
    """

    def __init__(
        self, function: Callable[..., Any], tensors: list[Tensor], checkers: list[Checker]
    ) -> None:
        self._function = function
        self._known = [(one, [one.records.of(t) for t in tensors]) for one in checkers]

    def __call__(self, *args: Any) -> Any:
        with ExitStack() as stack:
            for checker, records in reversed(self._known):
                if checker.in_backward:
                    for tensor, record in zip(tensors_of(args, {}), records, strict=True):
                        checker.records.set(tensor, record)
                    stack.enter_context(checker)
            return self._function(*args)


def _collective(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    checkers = active_checkers()
    if not checkers:
        return original(*args, **kwargs)
    written, where, kind = _WRITES[name]
    targets = tensors_of((argument(args, kwargs, *written),), {})
    group = argument(args, kwargs, *where) or dist.group.WORLD
    for checker in checkers:
        for target in targets:
            _refuse_unseen(checker, name, target, checker.places_of(group))
    output = original(*args, **kwargs)
    for checker in checkers:
        for target in targets:
            types = list(checker.records.of(target).types)
            for place in checker.places_of(group):
                types[place] = kind
            checker.records.set(target, Record(tuple(types)))
    return output


def _refuse_unseen(checker: Checker, name: str, target: Tensor, places: list[int]) -> None:
    """Refuse to change in place what autograd believes unchanged."""
    operand = checker.records.operand(target)
    if not places or not operand.differentiable or checker.records.is_finished(target):
        return
    if target.is_leaf and name == "broadcast":  # of a parameter, before training
        return
    kind = operand.record.types[places[0]]
    region = "reduce_from_tensor_parallel_region" if kind not in EQUAL else "a region function"
    raise fail(
        checker.records,
        f"torch.distributed.{name}",
        checker.axes[places[0]],
        [(operand, kind)],
        "It changes the tensor in place, and autograd does not see it: the gradient is that of "
        "this rank's value.",
        f"use {region} (its group as tp_group=); for a log, reduce a detached copy",
    )
