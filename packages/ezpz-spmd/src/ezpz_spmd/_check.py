"""Checking the parallelism of a program, operation by operation."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import CheckpointFunction

from ezpz_tp import ParallelError, ParallelState, Pipeline, finalize_grads, get_state

from . import _regions as regions
from . import _rules as rules
from ._kinds import (
    CUTTING,
    KEEPING_DIMS,
    NUMBERS,
    TAKING_AFTER,
    TRANSPOSING,
    Kind,
    base_name,
    is_random,
    kind_of,
)
from ._regions import Region
from ._rules import (
    EQUAL,
    INVARIANT,
    PARTIAL,
    REPLICATED,
    VARYING,
    Operand,
    Operation,
    Record,
    Records,
)

# The function mode that watches every operation of a thread.

AXES = ("tensor", "context", "data")
_ATTRIBUTES = frozenset({"__get__", "__set__", "__delete__"})
Function: TypeAlias = Callable[..., Any]
Args: TypeAlias = tuple[Any, ...]
_ELSEWHERE = frozenset({"grad", "grad_fn", "_base", "_grad"})
_DISTRIBUTED = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class Checker(TorchFunctionMode):
    def __init__(self, state: ParallelState, model: nn.Module | None) -> None:
        super().__init__()
        self.state = state
        self.axes = tuple(axis for axis in AXES if state.size(axis) > 1)
        self.records = Records(self.axes, model)
        self.operations = 0
        self.paused = self.in_backward = False
        self._places: dict[object, list[int]] = {}
        self._special: dict[object, Callable[..., Any]] = {
            torch.autograd.grad: self._backward,
            "backward": self._backward,
        }

    @property
    def is_active(self) -> bool:
        return bool(self.axes) and not self.paused

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "?")
        if (
            self.paused
            or not self.axes
            or name.startswith(("_foreach", "_fused"))
            or getattr(func, "namespace", None) in _DISTRIBUTED
        ):
            return func(*args, **kwargs)
        if name in _ATTRIBUTES:
            return self._attribute(func, name, args, kwargs)
        special = self._special.get(func if func in self._special else name)
        return (special or self._operation)(func, name, args, kwargs)

    def _operation(self, func: Function, name: str, args: Args, kwargs: dict[str, Any]) -> Any:
        operands = self._operands(find_tensors(args, kwargs))
        output = func(*args, **kwargs)
        changed = output
        if name == "__setitem__":
            changed = args[0]
        results = find_tensors((changed,), {})
        if not results:
            return output
        if operands:
            self.operations += 1
            if not any(one.requires_grad for one in results):  # no gradient comes back from it
                operands = list(map(Operand.drop_gradient, operands))
            record = self.result(name, operands, args, kwargs)
        elif kind_of(name) is Kind.FRESH:
            record = self.records.fresh
        elif is_random(name):
            record = regions.record_of_drawn(self.records)
        else:
            return output
        in_place = name[-1] == "_" and (name[0] != "_" or name.startswith(("__i", "__set")))
        for one in results:
            self.records.set(one, record)
            if in_place and one._base is not None:  # noqa: SLF001 - its base is written to as well
                self._write_to_base(one, one._base)  # noqa: SLF001
        return output

    def _operands(self, tensors: Sequence[Tensor]) -> list[Operand]:
        return list(map(self.records.operand, tensors))

    def _write_to_base(self, view: Tensor, base: Tensor) -> None:
        write = Operation("__setitem__", Kind.LINEAR)
        record = rules.combine(self.records, write, self._operands([base, view]))
        self.records.set(base, record)

    def result(
        self, name: str, operands: Sequence[Operand], args: Args, kwargs: Mapping[str, Any]
    ) -> Record:
        """Return what is known of an operation's result; raise if the operands do not fit."""
        kind = kind_of(name)
        base = base_name(name)
        if kind is Kind.FRESH:
            return self.records.fresh
        if kind is Kind.SHAPED:
            return self.records.data
        if base in TAKING_AFTER:
            operands = operands[:1]
        elif name == "copy_":
            operands = operands[1:]
        if len(operands) == 1 and base in TRANSPOSING:
            return _record_of_transposed(operands[0])
        if len(operands) == 1 and base in KEEPING_DIMS:
            return operands[0].record
        contracts = regions.contracts(name, operands, args, kwargs)
        adds_number = base in NUMBERS and _adds_number(NUMBERS[base], args, kwargs)
        operation = Operation(name, kind, contracts, adds_number)
        record = rules.combine(self.records, operation, operands)
        if base in CUTTING and REPLICATED in record.types:
            record = _record_of_part(record, operands[1:])
        if regions.draws_numbers(name, args, kwargs):
            return regions.check_random_op(self.records, name, operands, record)
        return record

    def places_along(self, group: ProcessGroup | None, default: str = "tensor") -> list[int]:
        """Return the places of the axes that a group spans; None is the default axis's group."""
        if group is None:
            if default in self.axes:
                return [self.axes.index(default)]
            return []
        if group not in self._places:
            self._places[group] = self._find_places(group)
        return self._places[group]

    def _find_places(self, group: ProcessGroup) -> list[int]:
        """By its ranks, for it may be one of the user's own."""
        ranks = set(dist.get_process_group_ranks(group))
        places = []
        for place, axis in enumerate(self.axes):
            along_axis = set(self.state.ranks(axis))
            if ranks >= along_axis:
                places.append(place)
        return places

    def result_of_region(
        self, region: Function, arguments: Mapping[str, Any]
    ) -> tuple[Record, bool]:
        """Return what is known of a region's result, and whether it is over a checked axis."""
        rule, group = regions.select_region(region, arguments)
        places = self.places_along(group, rule.axis)
        operands: list[Operand | None] = []
        for one in list(arguments.values())[:3]:
            operand = None
            if isinstance(one, Tensor):
                operand = self.records.operand(one)
            operands.append(operand)
        self.operations += 1
        record = regions.apply_region(self.records, region.__name__, rule, operands, places)
        return record, bool(places)

    def receive(self, activations: Tensor, module: nn.Module) -> None:
        """Note what another stage sent: a part of the sequence where the module is tagged so."""
        self.records.set(activations, replace(self.records.data, is_data=False))
        for parameter in module.parameters():
            if getattr(parameter, "sequence_parallel", False):
                self.records.declare(activations, {"tensor": VARYING})

    def _attribute(self, func: Function, kind: str, args: Args, kwargs: Any) -> Any:
        output = func(*args, **kwargs)
        name: str = getattr(getattr(func, "__self__", None), "__name__", "?")
        if kind == "__get__" and isinstance(output, Tensor) and name not in _ELSEWHERE:
            operand = self.records.operand(args[0])
            made = operand.record
            if name in TRANSPOSING:
                made = _record_of_transposed(operand)
            self.records.set(output, made)
        elif kind == "__set__" and name == "data" and isinstance(args[1], Tensor):
            self.records.set(args[0], self.records.of(args[1]))
        return output

    def _backward(self, func: Function, name: str, args: Args, kwargs: Any) -> Any:
        """Check the loss; a gradient that is given says itself what it is."""
        roots = find_tensors(args[:1], {})
        place = 2
        if name == "backward":
            place = 1
        given = [*args[place : place + 1]]
        given += map(kwargs.get, ("gradient", "grad_tensors", "grad_outputs"))
        is_given = any(one is not None for one in given)
        for root in roots:
            if not (is_given and root.dim()):  # a number's gradient is a scale of the loss
                regions.check_loss(self.records, name, self.records.operand(root))
        self.in_backward = True
        try:
            output = func(*args, **kwargs)
        finally:
            self.in_backward = False
        for root in roots:
            self.records.finished[root] = True
        return output


def find_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [one for one in value if isinstance(one, Tensor)]
    return found


def _adds_number(places: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a number other than zero is added, or put in the place of others."""
    numbers = [kwargs.get("other"), kwargs.get("value")]
    for place in places:
        numbers += args[place : place + 1]
    return any(isinstance(number, (int, float, complex)) and number for number in numbers)


def _record_of_part(record: Record, indices: Sequence[Operand]) -> Record:
    """Return the record of a part: another one on each rank, unless all ranks cut alike."""
    types = list(record.types)
    for place, kind in enumerate(record.types):
        if kind == REPLICATED and not _is_computed_alike(indices, place):
            types[place] = VARYING
    return replace(record, types=tuple(types))


def _is_computed_alike(indices: Sequence[Operand], place: int) -> bool:
    """Whether what cuts is computed, and the same on all ranks: not a rank's number."""
    for one in indices:
        if one.record.types[place] not in EQUAL or one.record.is_data:
            return False
    return bool(indices)


def _record_of_transposed(operand: Operand) -> Record:
    dim = operand.record.sharded_dim
    tensor = operand.tensor
    flipped = None
    if dim is not None and tensor.dim() == 2:
        flipped = 1 - dim
    return replace(operand.record, sharded_dim=flipped)


# Region functions, and collectives and autograd functions of the user's own: no function mode is
# told of them.
#
# While anything is checked, they are exchanged for ones that tell the checkers of their thread, and
# do the same as before for everybody else: ``ezpz_tp``'s region functions wherever a module has
# them by name, methods of `Pipeline`, ``torch.autograd.Function.apply``, and the functions of
# ``torch.distributed`` that change a tensor. What was compiled runs uncompiled.
#
# Several threads may check at once: the first exchanges the functions, and the last restores them.

_lock = threading.Lock()
_users = 0
_restore = ExitStack()

_WRITES = {
    **dict.fromkeys(("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor"), INVARIANT),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor", "all_to_all_single"), VARYING),
}
"""What they make of their first argument, which they write to."""

_SUMS = frozenset({PARTIAL, VARYING})
_OWN = frozenset({VARYING})
_TWICE = dict.fromkeys(EQUAL, "it is the same on all ranks already: leave the collective out")
# Autograd functions of torch.distributed.nn.functional, whose gradients are summed too.
_TORCHS = {
    "_AllReduce": Region(_SUMS, REPLICATED, _TWICE),
    "_Reduce_Scatter": Region(_SUMS, VARYING, _TWICE),
    "_AllGather": Region(_OWN, REPLICATED, _TWICE),
    "_AllGatherBase": Region(_OWN, REPLICATED, _TWICE),
    "_AlltoAllSingle": Region(_OWN, VARYING, _TWICE),
}

_HANDING = frozenset({"BackwardHookFunction", "_DDPSink", "RegisterPostBackwardFunction"})
"""torch's own autograd functions that return what they are given."""


def active_checkers() -> list[Checker]:
    """Return those that check, the innermost first."""
    modes = reversed(_get_current_function_mode_stack())
    return [mode for mode in modes if isinstance(mode, Checker) and mode.is_active]


@contextmanager
def patched() -> Iterator[None]:
    """Exchange the functions as long as anybody checks, in any thread."""
    global _users, _restore
    with _lock:
        if not _users:
            _restore = _patch_all()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _restore.close()


def _patch_all() -> ExitStack:
    with ExitStack() as stack:
        apply = torch.autograd.Function.__dict__["apply"]
        torch.autograd.Function.apply = classmethod(  # type: ignore[assignment]
            functools.partial(_apply_function, apply.__func__)
        )
        stack.callback(setattr, torch.autograd.Function, "apply", apply)
        _patch_regions(stack)
        for name in ("step", "evaluate"):
            _patch_pipeline_method(stack, name)
        if "torch._dynamo" in sys.modules:  # what was compiled runs as it is written
            stack.push(torch.compiler.set_stance("force_eager"))
        for name in _WRITES:
            original = getattr(distributed_c10d, name)
            wrapper = functools.wraps(original)(functools.partial(_call_collective, name, original))
            for module in (dist, distributed_c10d):
                setattr(module, name, wrapper)
                stack.callback(setattr, module, name, original)
        return stack.pop_all()


@contextmanager
def _paused(checkers: Sequence[Checker]) -> Iterator[None]:
    """Let nothing be checked: what is inside of an operation is its own."""
    for checker in checkers:
        checker.paused = True
    try:
        yield
    finally:
        for checker in checkers:
            checker.paused = False


def _patch_regions(stack: ExitStack) -> None:
    """Exchange the region functions in every module that has one by name, the user's too."""
    wrappers: dict[int, Function] = {}  # by the id of the function: not every value has a hash
    wrappers[id(finalize_grads)] = functools.partial(_call_finalize_grads, finalize_grads)
    for region in regions.REGIONS:
        wrappers[id(region)] = functools.wraps(region)(functools.partial(_call_region, region))
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in wrappers:
                setattr(module, name, wrappers[id(value)])
                stack.callback(setattr, module, name, value)


def _call_region(region: Function, *args: Any, **kwargs: Any) -> Tensor:
    checkers = active_checkers()
    if not checkers:
        alone: Tensor = region(*args, **kwargs)
        return alone
    arguments = regions.arguments(region, args, kwargs)
    results = [checker.result_of_region(region, arguments) for checker in checkers]
    with _paused(checkers):
        output: Tensor = region(*args, **kwargs)
    given = next(iter(arguments.values()))
    for checker, (record, is_over_axes) in zip(checkers, results, strict=True):
        if is_over_axes or output is not given:
            checker.records.set(output, record)
    return output


def _call_finalize_grads(original: Function, model_or_parameters: Any, **options: Any) -> None:
    checkers = active_checkers()
    parameters = regions.list_parameters(model_or_parameters)
    grads = [regions.gradients_to_finalize(one.records, parameters) for one in checkers]
    with _paused(checkers):
        original(parameters, **options)
    for checker, finalized in zip(checkers, grads, strict=True):
        for grad in finalized:
            checker.records.finalize(grad)


def _patch_pipeline_method(stack: ExitStack, name: str) -> None:
    method = getattr(Pipeline, name)

    @functools.wraps(method)
    def run(pipeline: Pipeline, *args: Any, **kwargs: Any) -> Any:
        several = len(pipeline.layers) > 1
        modules = list(pipeline.module.children()) if several else [pipeline.module]
        receiving = modules
        if pipeline.is_first:
            receiving = modules[1:]
        with ExitStack() as hooks:
            for module in receiving:
                handle = module.register_forward_pre_hook(_note_received)
                hooks.callback(handle.remove)
            return method(pipeline, *args, **kwargs)

    setattr(Pipeline, name, run)
    stack.callback(setattr, Pipeline, name, method)


def _note_received(module: nn.Module, args: Args) -> None:
    for checker in active_checkers():
        for one in find_tensors(args, {}):
            checker.receive(one, module)


def _apply_function(original: Function, function: type, *args: Any, **kwargs: Any) -> Any:
    checkers = active_checkers()
    operands = find_tensors(args, kwargs)
    if not checkers or not operands:
        return original(function, *args, **kwargs)
    if function is CheckpointFunction:  # its first argument is looked into
        return original(
            function, _wrap_checkpointed(args[0], operands, checkers), *args[1:], **kwargs
        )
    records = [_record_of_function(checker, function, args, kwargs) for checker in checkers]
    with _paused(checkers):
        output = original(function, *args, **kwargs)
    outputs = find_tensors((output,), {})
    for checker, record in zip(checkers, records, strict=True):
        # torch's hooks, and wrappers of modules, hand tensors through that are of many types.
        known = map(checker.records.of, operands) if record is None else itertools.repeat(record)
        for one, kind in zip(outputs, known, strict=False):
            checker.records.set(one, kind)
    return output


def _record_of_function(
    checker: Checker, function: type, args: tuple[Any, ...], kwargs: Any
) -> Record | None:
    """Return what is known of an autograd function's result; None if it hands tensors through."""
    if function.__name__ in _HANDING and function.__module__.startswith("torch."):
        return None
    if function.__module__ in regions.MODULES and not checker.in_backward:
        raise ParallelError(
            f"check: {function.__module__}.{function.__name__} was applied by a region function "
            "that was called through a closure, an attribute or functools.partial made before the "
            "check, so its name is unknown; call the function by its name in a module, as in "
            "tp.reduce_from_tensor_parallel_region(x)"
        )
    operands = list(map(checker.records.operand, find_tensors(args, kwargs)))
    checker.operations += 1
    torchs = function.__module__ == "torch.distributed.nn.functional"
    region = None
    if torchs:
        region = _TORCHS.get(function.__name__)
    if region is None:
        return checker.result(function.__name__, operands, (), {})
    forward: Function = function.forward  # type: ignore[attr-defined]
    group = regions.arguments(forward, (None, *args), kwargs)["group"]
    places = checker.places_along(group or dist.group.WORLD)
    return regions.apply_region(checker.records, function.__name__, region, operands[-1:], places)


def _wrap_checkpointed(
    function: Function, tensors: list[Tensor], checkers: list[Checker]
) -> Function:
    """Return what torch's reentrant checkpointing runs, and in backward runs again."""
    # The first run has no gradients, by which much of what is wrong is known: the second is
    # checked too, with the types that the arguments had.
    known = []
    for checker in reversed(checkers):
        records = list(map(checker.records.of, tensors))
        known.append((checker, records))

    def run(*args: Any) -> Any:
        with ExitStack() as stack:
            for checker, records in known:
                if checker.in_backward:
                    for tensor, record in zip(find_tensors(args, {}), records, strict=True):
                        checker.records.set(tensor, record)
                    stack.enter_context(checker)
            return function(*args)

    return run


def _call_collective(name: str, original: Function, *args: Any, **kwargs: Any) -> Any:
    checkers = active_checkers()
    if not checkers:
        return original(*args, **kwargs)
    given = regions.arguments(original, args, kwargs)
    targets = find_tensors((next(iter(given.values())),), {})
    group = given.get("group") or dist.group.WORLD
    for checker in checkers:
        for target in targets:
            _refuse_unseen(checker, name, target, checker.places_along(group))
    output = original(*args, **kwargs)
    for checker in checkers:
        for target in targets:
            types = list(checker.records.of(target).types)
            for place in checker.places_along(group):
                types[place] = _WRITES[name]
            checker.records.set(target, Record(tuple(types)))
    return output


def _refuse_unseen(checker: Checker, name: str, target: Tensor, places: list[int]) -> None:
    """Refuse to change in place what autograd believes unchanged."""
    operand = checker.records.operand(target)
    if not places or not operand.differentiable or target in checker.records.finished:
        return
    if target.is_leaf and name == "broadcast":  # of a parameter, before training
        return
    kind = operand.record.types[places[0]]
    axis = checker.axes[places[0]]
    region = "a region function"
    if kind not in EQUAL:
        region = "reduce_from_tensor_parallel_region"
    reason = (
        "It changes the tensor in place, and autograd does not see it: the gradient is that of "
    )
    fix = f"use {region} (its group as tp_group=); for a log, reduce a detached copy"
    called = f"torch.distributed.{name}"
    seen = [(operand, kind)]
    raise rules.type_error(checker.records, called, axis, seen, reason + "this rank's value.", fix)


@contextmanager
def check(
    model: nn.Module | None = None, *, state: ParallelState | None = None
) -> Iterator[Checker]:
    """Check every operation in the block: a missing reduction or copy is an error at its line.

    Along each axis of degree above 1 (tensor, context, data) a tensor has one of four types. It is
    *invariant* (equal on all ranks, as is its gradient), *replicated* (equal, its gradient
    partial), *varying*, or *partial* (still to be summed). Sharded parameters start as varying,
    those tagged ``sequence_parallel`` as replicated, others as invariant. Data is invariant along
    the tensor axis and varying along the others. `declare_type` says otherwise. Regions and layers
    change types, and operations need ones that fit:

    * invariant goes with invariant; replicated with varying gives varying;
    * of a replicated tensor, a slice varies: it may be another one on each rank;
    * partial goes through what is linear, and with partial into a sum; what an operation without
      a rule makes of it is not checked, which a warning says once;
    * a loss that backward starts from is invariant along the tensor axis;
    * dropout of what varies belongs within ``get_rng_tracker().fork()``, any other outside.

    For tests, or the first step of a run: 10 to 50 us an operation. Nothing is left behind, and
    nothing is paid outside of it. What is compared is types, and no value: pair it
    with `verify_replicated`. Backward itself is not looked into, but for what checkpointing runs
    again. What torch.compile compiled before the block runs as it is written, and is checked.
    All ranks of the tensor axis fail alike; those of other pipeline stages may wait for them.

    Args:
        model: Whose parameters are known by name: in errors, and where FSDP2 replaces them.
        state: Whose groups; the default's if None.

    Yields:
        The checker: its ``operations`` says how many it saw.

    Raises:
        ParallelTypeError: Names the operation, the types, the user's line, and the fix.
        NotInitializedError: There is neither ``state`` nor default.
    """
    checker = Checker(state or get_state(), model)
    with patched(), checker:
        yield checker


def declare_type(tensor: Tensor, /, **types: str) -> Tensor:
    """Say what a tensor is, where `check` cannot know; it believes it. Else nothing happens.

    For what comes from other ranks, as a pipeline's activations under sequence parallelism, and
    for collectives within autograd functions of one's own, or torch's functional collectives.

    Args:
        tensor: Returned as it is.
        **types: By axis, ``tensor``, ``context`` or ``data``: ``invariant``, ``replicated``,
            ``varying`` or ``partial``. Axes that are not named keep their type.

    Raises:
        ParallelError: No such axis or type.

    >>> import torch
    >>> hidden = declare_type(torch.ones(4), tensor="varying")
    """
    for axis, kind in types.items():
        if axis not in AXES or kind not in rules.TYPES:
            raise ParallelError(
                f"declare_type({axis}={kind!r}); expected an axis of {', '.join(AXES)} and a type "
                f"of {', '.join(rules.TYPES)}"
            )
    for checker in active_checkers():
        checker.records.declare(tensor, types)
    return tensor


def type_of(tensor: Tensor) -> dict[str, str]:
    """Return a tensor's type by axis, within `check`; empty outside of it.

    >>> import torch
    >>> type_of(torch.ones(4))
    {}
    """
    checker = next(iter(active_checkers()), None)
    if checker is None:
        return {}
    return dict(zip(checker.axes, checker.records.of(tensor).types, strict=True))
