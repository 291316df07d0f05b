"""The function mode that watches every operation of a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from ezpz_tp._groups.state import ParallelState
from ezpz_tp._pipeline.chunk import entering
from ezpz_tp._training.grads import finalize_grads

from .combine import combine
from .draws import DRAWING, GENERATING, drawn, draws, generated
from .ends import check_loss, gradients_to_finalize
from .operations import ADDING, CUTTING, JUDGING, KEEPING_DIMS, SILENT, TRANSPOSING
from .records import Records
from .regions import Region, argument, region_of, through
from .types import REPLICATED, VARYING, Operand, Record

AXES = ("tensor", "context", "data")
_ATTRIBUTES = frozenset({"__get__", "__set__", "__delete__"})
_DISTRIBUTED = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class Checker(TorchFunctionMode):
    """Follows the types of tensors through a program; see `check`.

    Attributes:
        axes: The axes that are checked: those of degree above 1.
        operations: How many operations were checked so far.
    """

    def __init__(self, state: ParallelState, model: nn.Module | None) -> None:
        super().__init__()
        self.state = state
        self.axes = tuple(axis for axis in AXES if state.size(axis) > 1)
        self.records = Records(self.axes, model)
        self.operations = 0
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
            name in SILENT
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
        if not operands:
            record = generated(self.records) if name in GENERATING else None
        else:
            self.operations += 1
            record = self.result(name, operands, args, kwargs)
        output = func(*args, **kwargs)
        if record is not None:
            for one in tensors_of((args[0] if name == "__setitem__" else output,), {}):
                self.records.set(one, record)
        return output

    def result(
        self,
        name: str,
        operands: Sequence[Operand],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Record:
        """Return what is known of an operation's result; raise if the operands do not fit."""
        if len(operands) == 1 and name in TRANSPOSING:
            return _transposed(operands[0])
        if len(operands) == 1 and name in KEEPING_DIMS:
            return operands[0].record
        shifts = name in ADDING and any(
            isinstance(one, (int, float, complex)) and one for one in args[:2]
        )
        record = combine(self.records, name, operands, shifts=shifts)
        if name in CUTTING and REPLICATED in record.types:
            cut = (VARYING if kind == REPLICATED else kind for kind in record.types)
            record = replace(record, types=tuple(cut))
        if name in DRAWING and draws(name, args, kwargs or {}):
            return drawn(self.records, name, operands, record)
        return record

    def places_of(self, group: ProcessGroup | None, default: str = "tensor") -> list[int]:
        """Return the places of the axes that a group spans; None is the default axis's group."""
        if group is None:
            return [place for place, axis in enumerate(self.axes) if axis == default]
        found = [p for p, axis in enumerate(self.axes) if self.state.group(axis) is group]
        if found or group.size() == 1:
            return found
        several = [axis for axis in self.axes if self.state.size(axis) <= group.size()]
        for axes in _subsets(several):
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
        if kind == "__get__" and isinstance(output, Tensor) and name not in {"grad", "grad_fn"}:
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
        if all(one is None for one in (*given, *args[place : place + 1])):
            for root in roots:
                check_loss(self.records, name, self.records.operand(root))
        output = func(*args, **kwargs)
        for root in roots:
            self.records.finish(root)
        return output


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among arguments, also in lists of them."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(one for one in value if isinstance(one, Tensor))
    return found


def _transposed(operand: Operand) -> Record:
    dim, tensor = operand.record.sharded_dim, operand.tensor
    flipped = None if dim is None or tensor.dim() != 2 else 1 - dim
    return replace(operand.record, sharded_dim=flipped)


def _subsets(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """All choices of at least two axes."""
    count = len(axes)
    chosen = [tuple(a for i, a in enumerate(axes) if bits >> i & 1) for bits in range(1 << count)]
    return [one for one in chosen if len(one) > 1]
