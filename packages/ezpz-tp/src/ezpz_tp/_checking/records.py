"""What is known of each tensor while a program is checked."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .types import INVARIANT, REPLICATED, VARYING, Operand, Record


class Records:
    """The types of tensors, by the tensor itself; nothing is written onto a tensor.

    Of a tensor that no operation was seen to make: a parameter is what its attributes say
    (sharded: varying; tagged ``sequence_parallel``: replicated; else invariant), and anything
    else is data: the same on all tensor-parallel ranks, and different along the other axes.

    Args:
        axes: The axes of degree above 1.
        model: Whose parameters are known by their names.
    """

    def __init__(self, axes: tuple[str, ...], model: nn.Module | None) -> None:
        self.axes = axes
        self._known = WeakIdKeyDictionary()
        self._done = WeakIdKeyDictionary()
        self._final = WeakIdKeyDictionary()
        self._names = WeakIdKeyDictionary()
        self._model = None if model is None else weakref.ref(model)
        self._said: dict[str, dict[str, Any]] = {}
        for name, parameter in _named(model):
            self._names[parameter] = name
            self._said[name] = vars(parameter)
        data = tuple(INVARIANT if axis == "tensor" else VARYING for axis in axes)
        self.data = Record(data, is_data=True)
        self.fresh = Record(data, is_data=True, is_fresh=True)
        # Gradients of parameters are summed over the data axes once a step.
        self._invariant = self._parameter(INVARIANT)
        self._replicated = self._parameter(REPLICATED)

    def _parameter(self, kind: str, dim: int | None = None) -> Record:
        return Record(tuple(kind if axis == "tensor" else REPLICATED for axis in self.axes), dim)

    def of(self, tensor: Tensor) -> Record:
        """Return what is known of a tensor."""
        found: Record | None = self._known.get(tensor)
        if found is not None:
            return found
        if not _is_parameter(tensor):
            return self.data
        said = self._attributes(tensor)
        if said.get("tensor_model_parallel"):
            dim = said.get("partition_dim", -1)
            return self._parameter(VARYING, dim if dim >= 0 else None)
        return self._replicated if said.get("sequence_parallel") else self._invariant

    def _attributes(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """What is said of a parameter; FSDP2 computes with ones of its own, of the same names."""
        if parameter not in self._names:
            self._names[parameter] = None
            for name, one in _named(None if self._model is None else self._model()):
                if self._names.get(one) is None:
                    self._names[one] = name
        own = vars(parameter)
        if "tensor_model_parallel" in own or "sequence_parallel" in own:
            return own
        said: dict[str, Any] | None = self._said.get(self._names[parameter])
        return own if said is None else said

    def operand(self, tensor: Tensor) -> Operand:
        """Return a tensor with what is known of it."""
        differentiable = tensor.requires_grad and torch.is_grad_enabled()
        return Operand(tensor, self.of(tensor), differentiable)

    def set(self, tensor: Tensor, record: Record) -> None:
        """Remember what is known of a tensor; of a parameter its attributes say it."""
        if not _is_parameter(tensor):
            self._known[tensor] = record

    def declare(self, tensor: Tensor, types: Mapping[str, str]) -> None:
        """Believe what is said of a tensor, by axis, also of a parameter."""
        known = zip(self.axes, self.of(tensor).types, strict=True)
        self._known[tensor] = Record(tuple(types.get(axis, kind) for axis, kind in known))

    def finish(self, tensor: Tensor) -> None:
        """Remember that backward went through a tensor: its gradient is no longer at stake."""
        self._done[tensor] = True

    def is_finished(self, tensor: Tensor) -> bool:
        """Return whether `finish` was called."""
        return tensor in self._done

    def finalize(self, grad: Tensor) -> None:
        """Remember a gradient as it is now; accumulation makes another version of it."""
        self._final[grad] = grad._version  # noqa: SLF001 - autograd's own, in its documentation

    def is_finalized(self, grad: Tensor) -> bool:
        """Return whether a gradient is as `finalize` saw it."""
        return bool(self._final.get(grad) == grad._version)  # noqa: SLF001

    def name(self, tensor: Tensor) -> str:
        """Return what to call a tensor in an error."""
        known: str | None = self._names.get(tensor)
        shape = tuple(tensor.shape)
        if known is not None:
            return f"parameter {known} {shape}"
        return f"{'parameter' if isinstance(tensor, nn.Parameter) else 'tensor'} {shape}"

    def tag_of(self, tensor: Tensor) -> str:
        """Return how the user may write the parameter that a tensor is."""
        return str(self._names.get(tensor) or "parameter")


def _is_parameter(tensor: Tensor) -> TypeGuard[nn.Parameter]:
    # isinstance alone takes a microsecond: Parameter has a say in it.
    return type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)


def _named(model: nn.Module | None) -> Iterable[tuple[str, nn.Parameter]]:
    return () if model is None else model.named_parameters()
