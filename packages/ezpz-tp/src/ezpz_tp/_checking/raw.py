"""Collectives and autograd functions of the user's own, which no function mode is told of.

While anything is checked, ``torch.autograd.Function.apply`` and the functions of
``torch.distributed`` that change a tensor are exchanged for ones that tell the checker of their
thread, and do the same as before for everybody else.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.overrides import _get_current_function_mode_stack

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


def active_checker() -> Checker | None:
    """Return the checker of this thread, or None; inside an operation that it does, None."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, Checker):
            return mode
    return None


@contextmanager
def exchanged() -> Iterator[None]:
    """Exchange the functions as long as anybody checks, in any thread."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _exchange()
    try:
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
    for name in _WRITES:
        original = getattr(distributed_c10d, name)
        told = functools.wraps(original)(functools.partial(_collective, name, original))
        for module in (dist, distributed_c10d):
            setattr(module, name, told)
            _restore.append(functools.partial(setattr, module, name, original))


def _apply(original: Callable[..., Any], function: type, *args: Any, **kwargs: Any) -> Any:
    checker = active_checker()
    if checker is None or not checker.axes:
        return original(function, *args, **kwargs)
    operands = [checker.records.operand(one) for one in tensors_of(args, kwargs)]
    record = None
    if operands:
        checker.operations += 1
        name = function.__name__
        region = None
        if function.__module__ == "torch.distributed.nn.functional":
            region = _TORCHS.get(name)
        if region is None:
            record = checker.result(name, operands)
        else:
            places = checker.places_of(argument(args, kwargs, *region.group) or dist.group.WORLD)
            record = through(checker.records, name, region, operands[-1:], places)
    with torch._C.DisableTorchFunction():  # noqa: SLF001 - what is inside is the function's affair
        output = original(function, *args, **kwargs)
    if record is not None:
        for one in tensors_of((output,), {}):
            checker.records.set(one, record)
    return output


def _collective(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    checker = active_checker()
    if checker is None or not checker.axes:
        return original(*args, **kwargs)
    written, where, kind = _WRITES[name]
    targets = tensors_of((argument(args, kwargs, *written),), {})
    places = checker.places_of(argument(args, kwargs, *where) or dist.group.WORLD)
    for target in targets:
        _refuse_unseen(checker, name, target, places)
    output = original(*args, **kwargs)
    for target in targets:
        types = list(checker.records.of(target).types)
        for place in places:
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
