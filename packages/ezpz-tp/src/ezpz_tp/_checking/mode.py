"""The function mode that watches every operation of a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from ezpz_tp._groups.state import ParallelState
from ezpz_tp._groups.world import live_world
from ezpz_tp._pipeline.chunk import entering
from ezpz_tp._training.grads import finalize_grads

from .combine import combine
from .draws import DRAWING, GENERATING, drawn, draws, generated
from .ends import check_loss, gradients_to_finalize
from .operations import (
    CUTTING,
    FRESH,
    JUDGING,
    KEEPING_DIMS,
    NUMBERS,
    SHAPED,
    SILENT,
    TAKING_AFTER,
    TRANSPOSING,
)
from .products import contracts
from .records import Records
from .regions import Region, argument, region_of, through
from .types import EQUAL, REPLICATED, VARYING, Operand, Record

AXES = ("tensor", "context", "data")
_ATTRIBUTES = frozenset({"__get__", "__set__", "__delete__"})
_ELSEWHERE = frozenset({"grad", "grad_fn", "_base", "_grad"})
_DISTRIBUTED = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class Checker(TorchFunctionMode):
    """Follows the types of tensors through a program; see `check`.

    Attributes:
        axes: The axes that are checked: those of degree above 1.
        operations: How many operations were checked so far.
        paused: Whether nothing is looked into: the inside of an autograd function.
        in_backward: Whether backward is under way.
    """

    def __init__(self, state: ParallelState, model: nn.Module | None) -> None:
        super().__init__()
        self.state = state
        self.axes = tuple(axis for axis in AXES if state.size(axis) > 1)
        self.records = Records(self.axes, model)
        self.operations = 0
        self.paused = self.in_backward = False
        self._places: dict[object, list[int]] = {}
        self._special: dict[object, Callable[..., Any]] = {
            entering: self._enter,
            finalize_grads: self._finalize,
            torch.autograd.grad: self._backward,
            "backward": self._backward,
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Check one operation, do it, and remember what its result is."""
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "?")
        if self._is_of_no_concern(func, name):
            return func(*args, **kwargs)
        if name in _ATTRIBUTES:
            return self._attribute(func, name, args, kwargs)
        region = region_of(func, args, kwargs)
        if region is not None:
            return self._region(func, region, args, kwargs)
        special = self._special.get(func if func in self._special else name)
        return (special or self._operation)(func, name, args, kwargs)

    def _is_of_no_concern(self, func: Callable[..., Any], name: str) -> bool:
        return (
            self.paused
            or name in SILENT
            or not self.axes
            or name.startswith(("_foreach", "_fused"))
            or getattr(func, "namespace", None) in _DISTRIBUTED
        )

    def _operation(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        operands = [self.records.operand(one) for one in tensors_of(args, kwargs)]
        if name in JUDGING:
            operands = [replace(one, differentiable=False) for one in operands]
        if operands:
            self.operations += 1
            record = self.result(name, operands, args, kwargs)
        elif name in FRESH:
            record = self.records.fresh
        elif name in GENERATING:
            record = generated(self.records)
        else:
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        in_place = name[-1] == "_" and (name[0] != "_" or name.startswith(("__i", "__set")))
        for one in tensors_of((args[0] if name == "__setitem__" else output,), {}):
            self.records.set(one, record)
            if in_place and one._base is not None:  # noqa: SLF001 - its base is written to as well
                pair = [self.records.operand(tensor) for tensor in (one._base, one)]  # noqa: SLF001
                self.records.set(one._base, combine(self.records, "__setitem__", pair))  # noqa: SLF001
        return output

    def result(
        self,
        name: str,
        operands: Sequence[Operand],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Record:
        """Return what is known of an operation's result; raise if the operands do not fit."""
        kwargs = kwargs or {}
        if name in FRESH or name in SHAPED:
            return self.records.fresh if name in FRESH else self.records.data
        if name in TAKING_AFTER:
            operands = operands[:1]
        elif name == "copy_":
            operands = operands[1:]
        if len(operands) == 1 and name in TRANSPOSING:
            return _transposed(operands[0])
        if len(operands) == 1 and name in KEEPING_DIMS:
            return operands[0].record
        record = combine(
            self.records,
            name,
            operands,
            shifts=name in NUMBERS and _puts_a_number(NUMBERS[name], args, kwargs),
            contracts=contracts(name, operands, args, kwargs),
        )
        if name in CUTTING and REPLICATED in record.types:
            cut = (
                VARYING if kind == REPLICATED and not _is_known(operands[1:], place) else kind
                for place, kind in enumerate(record.types)
            )
            record = replace(record, types=tuple(cut))
        if name in DRAWING and draws(name, args, kwargs):
            return drawn(self.records, name, operands, record)
        return record

    def places_of(self, group: ProcessGroup | None, default: str = "tensor") -> list[int]:
        """Return the places of the axes that a group spans; None is the default axis's group."""
        if group is None:
            return [place for place, axis in enumerate(self.axes) if axis == default]
        found = self._places.get(group)
        if found is None:
            found = self._places[group] = self._find_places(group)
        return found

    def _find_places(self, group: ProcessGroup) -> list[int]:
        """By its ranks, for it may be one of the user's own; or else by the group itself."""
        ranks = ranks_of(group)
        if ranks is not None:
            return [p for p, axis in enumerate(self.axes) if ranks >= set(self.state.ranks(axis))]
        for axes in _subsets(self.axes):
            if self.state.has_group(*axes) and self.state.group(*axes) is group:
                return [self.axes.index(axis) for axis in axes]
        return []

    def _region(
        self, func: Callable[..., Any], region: Region, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        places = self.places_of(argument(args, kwargs, *region.group), region.axis)
        tensors = [one if isinstance(one, Tensor) else None for one in args[:3]]
        operands = [None if one is None else self.records.operand(one) for one in tensors]
        self.operations += 1
        record = through(self.records, func.__name__, region, operands, places)
        output = func(*args, **kwargs)
        if places or output is not args[0]:
            self.records.set(output, record)
        return output

    def _enter(self, func: object, name: str, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        """Activations of another stage: a part of the sequence where the module is tagged so."""
        del func, name, kwargs
        received: Tensor = args[0]
        module: nn.Module = args[1]
        parts = any(getattr(one, "sequence_parallel", False) for one in module.parameters())
        self.records.set(received, replace(self.records.data, is_data=False))
        if parts:
            self.records.declare(received, {"tensor": VARYING})
        return received

    def _finalize(self, func: object, name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        del func, name
        grads = gradients_to_finalize(self.records, args[0])
        finalize_grads(*args, **kwargs)
        for grad in grads:
            self.records.finalize(grad)

    def _attribute(
        self, func: Callable[..., Any], kind: str, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        output = func(*args, **kwargs)
        name: str = getattr(getattr(func, "__self__", None), "__name__", "?")
        if kind == "__get__" and isinstance(output, Tensor) and name not in _ELSEWHERE:
            operand = self.records.operand(args[0])
            transposed = name in TRANSPOSING
            self.records.set(output, _transposed(operand) if transposed else operand.record)
        elif kind == "__set__" and name == "data" and isinstance(args[1], Tensor):
            self.records.set(args[0], self.records.of(args[1]))
        return output

    def _backward(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Check the loss; a gradient that is given says itself what it is."""
        roots = tensors_of(args[:1], {})
        place = 1 if name == "backward" else 2
        given = [kwargs.get(key) for key in ("gradient", "grad_tensors", "grad_outputs")]
        is_given = any(one is not None for one in (*given, *args[place : place + 1]))
        for root in roots:
            if not (is_given and root.dim()):  # a number's gradient is a scale of the loss
                check_loss(self.records, name, self.records.operand(root))
        self.in_backward = True
        try:
            output = func(*args, **kwargs)
        finally:
            self.in_backward = False
        for root in roots:
            self.records.finish(root)
        return output


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among arguments, also in lists of them."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(one for one in value if isinstance(one, Tensor))
    return found


def ranks_of(group: ProcessGroup) -> set[int] | None:
    """Return the world's numbers of a group's ranks, where torch.distributed knows it."""
    if live_world() is None:
        return None
    try:
        return set(dist.get_process_group_ranks(group))
    except KeyError:  # of ranks that are threads
        return None


def _puts_a_number(places: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a number other than zero is added, or put in the place of others."""
    given = [args[place] for place in places if place < len(args)]
    given += [kwargs[key] for key in ("other", "value") if key in kwargs]
    return any(isinstance(one, (int, float, complex)) and one for one in given)


def _is_known(indices: Sequence[Operand], place: int) -> bool:
    """Whether what cuts is computed, and the same on all ranks: not a rank's number."""
    return bool(indices) and all(
        one.record.types[place] in EQUAL and not one.record.is_data for one in indices
    )


def _transposed(operand: Operand) -> Record:
    dim, tensor = operand.record.sharded_dim, operand.tensor
    flipped = None if dim is None or tensor.dim() != 2 else 1 - dim
    return replace(operand.record, sharded_dim=flipped)


def _subsets(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """All choices of axes, the smaller first."""
    return [one for count in range(len(axes)) for one in combinations(axes, count + 1)]
