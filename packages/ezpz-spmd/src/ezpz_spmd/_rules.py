"""The types of tensors, and what an operation makes of those of its operands."""

from __future__ import annotations

import linecache
import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

import ezpz_tp

from ._errors import ParallelTypeError
from ._kinds import BIASED, Kind, base_name

# The type of a tensor along one axis: what its value is on the ranks, and what its gradient is.
#
# =============  ===================================  ==============================================
# type           value on the ranks of the axis       gradient on the ranks of the axis
# =============  ===================================  ==============================================
# ``invariant``  equal                                equal
# ``replicated`` equal                                partial: the true one is the sum
# ``varying``    each its own                         each its own
# ``partial``    the true one is the sum              equal
# =============  ===================================  ==============================================
#
# A tensor that no gradient flows to is neither invariant nor replicated: it goes with both.
#
# The four are those of local SPMD, as in Edward Yang's "Global vs Local SPMD" and JAX's typed
# ``shard_map``: replicated and varying of one operation give varying, and autograd sums what is
# partial at the region that made replicated out of invariant.

INVARIANT = "invariant"
REPLICATED = "replicated"
VARYING = "varying"
PARTIAL = "partial"
TYPES = (INVARIANT, REPLICATED, VARYING, PARTIAL)
UNCHECKED = "unchecked"
"""Made of a partial sum by an operation without a rule: goes with every type."""
EQUAL = frozenset({INVARIANT, REPLICATED})
"""The types of which every rank has the same value."""


@dataclass(frozen=True, slots=True)
class Record:
    types: tuple[str, ...]
    sharded_dim: int | None = None
    is_data: bool = False
    is_fresh: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    kind: Kind
    contracts: bool = False
    """It sums over a dim that is split over the tensor-parallel ranks."""
    adds_number: bool = False
    """It adds a number other than zero, or puts it in the place of others."""


@dataclass(frozen=True, slots=True)
class Operand:
    tensor: Tensor
    record: Record
    differentiable: bool

    def drop_gradient(self) -> Operand:
        return replace(self, differentiable=False)

    def settled(self, axis: int) -> str | None:
        """Return its type along an axis, or None where it goes with invariant and replicated."""
        kind = self.record.types[axis]
        if kind == UNCHECKED or (kind in EQUAL and not self.differentiable):
            return None
        return kind


Operands: TypeAlias = Sequence[Operand]
Settled: TypeAlias = Sequence[tuple[Operand, str]]


# Where in the user's code something happens.


def _parent_folder(file: str | None) -> str:
    return str(Path(str(file)).resolve().parent) + os.sep


_OURS = (_parent_folder(__file__), _parent_folder(ezpz_tp.__file__))
_TORCH = _parent_folder(torch.__file__)
# Not the standard library's: a call through it (contextlib, functools) is not the user's line.
_STANDARD = _parent_folder(linecache.__file__)


def is_foreign(path: str) -> bool:
    standard = path.startswith(_STANDARD) and "site-packages" not in path
    return standard or path.startswith((*_OURS, _TORCH, "<frozen"))


def user_line() -> str:
    """Return ``file:line, in function`` and the source of the innermost line of the user's."""
    frame = sys._getframe(1)  # noqa: SLF001 - as traceback.walk_stack does, without its list
    while frame.f_back is not None and is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    code = frame.f_code
    source = linecache.getline(code.co_filename, frame.f_lineno).strip()
    place = f"{code.co_filename}:{frame.f_lineno}, in {code.co_qualname}"
    if source:
        return f"{place}\n    {source}"
    return place


# What is known of each tensor while a program is checked.


class Records:
    """The types of tensors, by the tensor itself; nothing is written onto a tensor."""

    # Of a tensor that no operation was seen to make: a parameter is what its attributes say
    # (sharded: varying; tagged ``sequence_parallel``: replicated; else invariant), and anything
    # else is data: the same on all tensor-parallel ranks, and different along the other axes.

    def __init__(self, axes: tuple[str, ...], model: nn.Module | None) -> None:
        self.axes = axes
        self._known = WeakIdKeyDictionary()
        self.finished = WeakIdKeyDictionary()  # backward went through: no gradient is at stake
        self._final = WeakIdKeyDictionary()
        self._names = WeakIdKeyDictionary()
        self._model: weakref.ref[nn.Module] | None = None
        if model is not None:
            self._model = weakref.ref(model)
        self._marks: dict[str, dict[str, Any]] = {}
        """The attributes of the model's parameters, by name."""
        for name, parameter in _named_parameters(model):
            self._names[parameter] = name
            self._marks[name] = vars(parameter)
        self._unchecked: set[str] = set()
        self.data = Record(self._types(INVARIANT, VARYING), is_data=True)
        self.fresh = replace(self.data, is_fresh=True)

    def _types(self, tensor: str, others: str) -> tuple[str, ...]:
        types = dict.fromkeys(self.axes, others)
        if "tensor" in types:
            types["tensor"] = tensor
        return tuple(types.values())

    def _parameter(self, kind: str, dim: int | None = None) -> Record:
        # Gradients of parameters are summed over the data axes once a step.
        return Record(self._types(kind, REPLICATED), dim)

    def warn_unchecked(self, operation: str) -> None:
        """Say once that an operation has no rule for partial sums."""
        if operation not in self._unchecked:
            self._unchecked.add(operation)
            warnings.warn(
                f"check: what {operation} makes of a partial sum is not checked, nor what is made "
                f"of that; declare_type says what it is\n  {user_line()}",
                stacklevel=2,
            )

    def of(self, tensor: Tensor) -> Record:
        found: Record | None = self._known.get(tensor)
        if found is not None:
            return found
        if not _is_parameter(tensor):
            return self.data
        marks = self._read_marks(tensor)
        if marks.get("tensor_model_parallel"):
            dim: int | None = marks.get("partition_dim", -1)
            if dim == -1:
                dim = None
            return self._parameter(VARYING, dim)
        if marks.get("sequence_parallel"):
            return self._parameter(REPLICATED)
        return self._parameter(INVARIANT)

    def _read_marks(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """Return a parameter's attributes; FSDP2 computes with its own, of the same names."""
        if parameter not in self._names:
            self._names[parameter] = None
            model = None
            if self._model is not None:
                model = self._model()
            for name, one in _named_parameters(model):
                if self._names.get(one) is None:
                    self._names[one] = name
        own = vars(parameter)
        if "tensor_model_parallel" in own or "sequence_parallel" in own:
            return own
        marks: Mapping[str, Any] = self._marks.get(self._names[parameter], own)
        return marks

    def operand(self, tensor: Tensor) -> Operand:
        differentiable = tensor.requires_grad and torch.is_grad_enabled()
        return Operand(tensor, self.of(tensor), differentiable)

    def set(self, tensor: Tensor, record: Record) -> None:
        """Remember what is known of a tensor; of a parameter its attributes say it."""
        if not _is_parameter(tensor):
            self._known[tensor] = record

    def declare(self, tensor: Tensor, types: Mapping[str, str]) -> None:
        """Believe what is said of a tensor, by axis, also of a parameter."""
        known = dict(zip(self.axes, self.of(tensor).types, strict=True))
        for axis in known.keys() & types.keys():
            known[axis] = types[axis]
        self._known[tensor] = Record(tuple(known.values()))

    def finalize(self, grad: Tensor) -> None:
        """Remember a gradient as it is now; accumulation makes another version of it."""
        self._final[grad] = grad._version  # noqa: SLF001 - autograd's own, in its documentation

    def is_finalized(self, grad: Tensor) -> bool:
        return bool(self._final.get(grad) == grad._version)  # noqa: SLF001

    def name(self, tensor: Tensor) -> str:
        shape = tuple(tensor.shape)
        name = self._names.get(tensor)
        if name:
            return f"parameter {name} {shape}"
        if isinstance(tensor, nn.Parameter):
            return f"parameter {shape}"
        return f"tensor {shape}"

    def parameter_name(self, tensor: Tensor) -> str:
        return str(self._names.get(tensor) or "parameter")


def _is_parameter(tensor: Tensor) -> TypeGuard[nn.Parameter]:
    # isinstance alone takes a microsecond: Parameter has a say in it.
    return type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)


def _named_parameters(model: nn.Module | None) -> Iterable[tuple[str, nn.Parameter]]:
    if model is None:
        return ()
    return model.named_parameters()


_COPY = "copy_to_tensor_parallel_region"
_REDUCE = "reduce_from_tensor_parallel_region"
_OF_TENSOR = {
    _COPY: "Megatron-LM's copy_to_tensor_model_parallel_region",
    _REDUCE: "where the sequence is sharded, reduce_scatter_to_sequence_parallel_region",
}


def describe_call(name: str, axis: str) -> str:
    if axis == "tensor":
        return f"{name} ({_OF_TENSOR[name]})"
    return f"{name}(x, {axis} group)"


def type_error(
    records: Records, operation: str, axis: str, operands: Settled, reason: str, fix: str
) -> ParallelTypeError:
    seen = ", ".join(f"{records.name(one.tensor)} is {kind}" for one, kind in operands)
    return ParallelTypeError(
        f"{operation}, on the {axis} axis: {seen or 'no tensor'}.\n"
        f"  {user_line()}\n  {reason}\n  Fix: {fix}"
    )


def combine(records: Records, operation: Operation, operands: Operands) -> Record:
    is_data = True
    written = []
    for one in operands:
        is_data = is_data and one.record.is_data
        if not one.record.is_fresh:
            written.append(one)
    if operands[0].record.is_fresh and not any(map(_is_numeric, written)):
        is_fresh = operation.kind is Kind.LINEAR and not operation.adds_number
        return replace(operands[0].record, is_fresh=is_fresh)
    types = []
    for place in range(len(records.axes)):
        found = type_along(records, operation, place, written)
        types.append(found)
    return Record(tuple(types), is_data=is_data)


def type_along(records: Records, operation: Operation, place: int, operands: Operands) -> str:
    """Return the type of a result along one axis; raise if the operands do not go together."""
    axis = records.axes[place]
    settled = []
    kinds = set()
    for one in operands:
        if one.record.types[place] == UNCHECKED:
            return UNCHECKED
        kind = one.settled(place)
        if kind is not None:
            settled.append((one, kind))
            kinds.add(kind)
    contracts = operation.contracts and axis == "tensor"
    if contracts and base_name(operation.name) in BIASED and len(operands) > 2:
        reason = (
            "The product over a sharded dim is a partial sum, to which each rank adds the bias: "
            "once a rank after the sum."
        )
        fix = f"leave the bias out, sum by {describe_call(_REDUCE, axis)}, then add the bias, as "
        raise type_error(
            records, operation.name, axis, settled, reason, fix + "RowParallelLinear does"
        )
    if INVARIANT in kinds and len(kinds) > 1:
        raise _mixed_error(records, operation.name, axis, settled)
    if PARTIAL in kinds:
        return _type_of_partial(records, operation, place, operands, settled)
    if VARYING not in kinds:
        return next(iter(kinds), INVARIANT)
    if contracts:
        return PARTIAL
    return VARYING


def _type_of_partial(
    records: Records, operation: Operation, place: int, operands: Operands, settled: Settled
) -> str:
    kind = operation.kind
    if kind is Kind.TEST:
        return VARYING
    if kind is Kind.UNKNOWN:
        records.warn_unchecked(operation.name)
        return UNCHECKED
    axis = records.axes[place]
    sums = True
    for one in operands:
        sums = sums and (one.record.types[place] == PARTIAL or _is_index(one, place))
    linear = sums and not operation.adds_number
    kinds = [found for _, found in settled]
    first_alone = kinds[0] == PARTIAL and operands[0] is settled[0][0]
    if kind is Kind.ADDITION:
        if linear:
            return PARTIAL
        reason = "What is not partial is added on every rank: once a rank after the sum."
    elif kind is Kind.LINEAR:
        if linear:
            return PARTIAL
        reason = "Partial and whole values in one tensor cannot be summed over the ranks."
    elif kind is Kind.PRODUCT or (kind is Kind.QUOTIENT and first_alone):
        if kinds.count(PARTIAL) == 1 and VARYING not in kinds:
            return PARTIAL
        reason = "A product of sums is not the sum of the ranks' products."
    else:
        reason = f"{operation.name} is not linear: of partial sums it is not the part of a sum."
    fix = f"sum it first, by {describe_call(_REDUCE, axis)}"
    reason += " A reduction is missing."
    raise type_error(records, operation.name, axis, settled, reason, fix)


def _mixed_error(
    records: Records, operation: str, axis: str, settled: Settled
) -> ParallelTypeError:
    of_type = {kind: one for one, kind in reversed(settled)}  # the first of each
    own = of_type.pop(INVARIANT)
    others = of_type.keys()
    tagged = of_type.get(REPLICATED, own).tensor
    if PARTIAL in others:
        reason = (
            "The other operand is a partial sum: what is added to it is added on every rank, "
            "once a rank after the sum. A reduction is missing."
        )
        fix = f"sum the partial one first, by {describe_call(_REDUCE, axis)}"
    elif isinstance(own.tensor, nn.Parameter):
        reason = (
            "The parameter is replicated, but used on other data by each rank: its gradient is "
            "partial."
        )
        fix = (
            "if this is the rank's part of the sequence or of the heads, tag it, "
            f"mark_sequence_parallel({records.parameter_name(own.tensor)}), and finalize_grads "
            "sums it; if the data should be whole here, or summed, gather or reduce it first"
        )
    elif isinstance(tagged, nn.Parameter):
        reason = (
            "The parameter is tagged sequence_parallel, but used on whole data: finalize_grads "
            "would count its gradient once a rank."
        )
        tag = records.parameter_name(tagged)
        fix = f"take the tag off {tag} (sequence_parallel = False), or shard the data"
    elif others == {REPLICATED}:
        reason = (
            "One went through a region that sums its gradient, the other did not: the gradient of "
            "their result can be either equal or partial, and is wrong for one of them."
        )
        fix = (
            "use the tensor of before the region for both, or put both through "
            f"{describe_call(_COPY, axis)}"
        )
    else:
        reason = (
            "The gradient that comes back to the invariant tensor is another one on each rank, and "
            "nothing sums it."
        )
        fix = (
            f"wrap the invariant tensor in {describe_call(_COPY, axis)}; or, if the other should "
            "be whole here (in a residual, say), gather or reduce that one"
        )
    return type_error(records, operation, axis, settled, reason, fix)


def _is_index(one: Operand, place: int) -> bool:
    """Whether it is an index or a mask, and the same on all ranks."""
    return not _is_numeric(one) and one.record.types[place] in EQUAL


def _is_numeric(one: Operand) -> bool:
    return one.tensor.is_floating_point() or one.tensor.is_complex()
