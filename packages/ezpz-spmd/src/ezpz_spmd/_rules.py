"""The types of tensors, and what an operation makes of those of its operands."""

from __future__ import annotations

import linecache
import os
import sys
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
EQUAL = frozenset({INVARIANT, REPLICATED})
"""The types of which every rank has the same value."""


@dataclass(frozen=True, slots=True)
class Record:
    types: tuple[str, ...]
    sharded_dim: int | None = None
    is_data: bool = False
    is_fresh: bool = False


@dataclass(frozen=True, slots=True)
class Operand:
    tensor: Tensor
    record: Record
    differentiable: bool

    def settled(self, axis: int) -> str | None:
        """Return its type along an axis, or None where it goes with invariant and replicated."""
        kind = self.record.types[axis]
        if kind in EQUAL and not self.differentiable:
            return None
        return kind


Operands: TypeAlias = Sequence[Operand]
Settled: TypeAlias = Sequence[tuple[Operand, str]]


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What torch's functions do to partial sums, by name.
#
# A partial tensor may go through what is linear in it: f(a + b) = f(a) + f(b).

PASSING = words("""
    view reshape view_as reshape_as flatten unflatten ravel squeeze unsqueeze transpose permute
    movedim moveaxis swapaxes swapdims t contiguous clone detach detach_ expand expand_as repeat
    tile narrow select index_select gather take __getitem__ split chunk unbind tensor_split unfold
    flip roll diagonal tril triu sum mean nansum cumsum trace neg negative positive __neg__ to type
    float double half bfloat16 cpu cuda type_as real requires_grad_ retain_grad broadcast_to
    broadcast_tensors repeat_interleave cat concat concatenate stack hstack vstack dstack
    masked_select as_strided alias split_with_sizes pin_memory H T mT adjoint take_along_dim copy_
    diff data __setitem__ masked_fill masked_fill_ where pad index_add index_add_ index_copy
    index_copy_ index_put index_put_ scatter scatter_ scatter_add scatter_add_ masked_scatter
    masked_scatter_ dropout dropout_ dropout1d dropout2d dropout3d feature_dropout
""")
"""Linear in all of their tensors together, but for indices and masks: partial, if all are."""

LOOKING = frozenset({"isfinite", "isnan", "isinf"})
"""What may be asked of a partial sum too."""

FRESH = words("""
    zeros_like empty_like new_zeros new_empty new_empty_strided zero_ zeros empty empty_strided
""")
"""Room to be written into: its value is zero, or not set yet."""

SHAPED = frozenset({"ones_like", "full_like", "new_ones", "new_full", "new_tensor", "fill_"})
"""What takes of its tensor no value."""

TAKING_AFTER = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as", "broadcast_to"})
"""What takes of its second tensor no value."""

CUTTING = words("""
    narrow select __getitem__ split chunk tensor_split index_select unbind split_with_sizes gather
    masked_select masked_fill
""")
"""What may take another part on each rank: of a replicated tensor, something that varies."""

ADDING = words(
    "add add_ __add__ __radd__ __iadd__ sub sub_ subtract __sub__ __rsub__ __isub__ rsub"
)
"""Sums: partial with partial only; a whole term would be counted once a rank."""

NUMBERS = {
    **dict.fromkeys(ADDING, (0, 1)),
    **dict.fromkeys(("__setitem__", "masked_fill", "masked_fill_"), (2,)),
    **dict.fromkeys(("scatter", "scatter_", "pad"), (3,)),
    "where": (1, 2),
}
"""Where operations that are linear with the number zero are given it; else as other or value."""

MULTIPLYING = words("""
    mul mul_ multiply __mul__ __rmul__ __imul__ matmul __matmul__ __rmatmul__ mm bmm mv dot einsum
    linear outer inner tensordot conv1d conv2d conv3d
""")
"""Products: one partial factor, if the others are equal on all ranks."""

BIASED = frozenset({"linear", "addmm", "baddbmm", "addbmm", "addmv", "conv1d", "conv2d", "conv3d"})
"""Products of two tensors to which a third is added."""

DIVIDING = frozenset({"div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"})
"""As products, for the first operand."""

SILENT = words("""
    size dim numel nelement stride storage_offset is_contiguous is_floating_point is_complex
    element_size data_ptr item tolist __len__ __repr__ __format__ __bool__ __int__ __float__
    __index__ __hash__ is_pinned is_shared get_device untyped_storage storage register_hook
    register_post_accumulate_grad_hook _backward_hooks has_names ndimension __contains__ equal
    allclose is_same_size is_nonzero __reduce_ex__ __deepcopy__ __array__ numpy is_inference
    is_set_to result_type can_cast __dlpack__ record_stream __iter__ is_tensor
""")
"""What returns no tensor to follow, or is asked of one."""

JUDGING = words("""
    eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ isclose isfinite isnan isinf argmax
    argmin argsort sign bincount histc searchsorted bucketize logical_and logical_or floor
    logical_not logical_xor any all isin count_nonzero nonzero round
""")
"""What no gradient comes back from."""

TRANSPOSING = frozenset({"t", "T", "mT", "transpose", "adjoint", "H", "mH", "swapaxes", "swapdims"})
"""Of a matrix: they exchange its two dims."""

KEEPING_DIMS = words("detach clone contiguous to float double half bfloat16 type data")
"""What leaves a weight's dims where they are."""


# Where in the user's code something happens.

_OURS = tuple(
    str(Path(module).resolve().parent) + os.sep for module in (__file__, str(ezpz_tp.__file__))
)
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
# Not the standard library's: a call through it (contextlib, functools) is not the user's line.
_STANDARD = str(Path(linecache.__file__).resolve().parent) + os.sep


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
        self._said: dict[str, dict[str, Any]] = {}
        for name, parameter in _named(model):
            self._names[parameter] = name
            self._said[name] = vars(parameter)
        data = tuple(INVARIANT if axis == "tensor" else VARYING for axis in axes)
        self.data = Record(data, is_data=True)
        self.fresh = Record(data, is_data=True, is_fresh=True)

    def _parameter(self, kind: str, dim: int | None = None) -> Record:
        # Gradients of parameters are summed over the data axes once a step.
        return Record(tuple(kind if axis == "tensor" else REPLICATED for axis in self.axes), dim)

    def of(self, tensor: Tensor) -> Record:
        found: Record | None = self._known.get(tensor)
        if found is not None:
            return found
        if not _is_parameter(tensor):
            return self.data
        said = self._attributes(tensor)
        if said.get("tensor_model_parallel"):
            dim = said.get("partition_dim", -1)
            return self._parameter(VARYING, dim if dim >= 0 else None)
        return self._parameter(REPLICATED if said.get("sequence_parallel") else INVARIANT)

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
        if said is None:
            return own
        return said

    def operand(self, tensor: Tensor) -> Operand:
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

    def finalize(self, grad: Tensor) -> None:
        """Remember a gradient as it is now; accumulation makes another version of it."""
        self._final[grad] = grad._version  # noqa: SLF001 - autograd's own, in its documentation

    def is_finalized(self, grad: Tensor) -> bool:
        return bool(self._final.get(grad) == grad._version)  # noqa: SLF001

    def name(self, tensor: Tensor) -> str:
        known = self._names.get(tensor)
        kind = isinstance(tensor, nn.Parameter)
        what = f"parameter {known}" if known else "parameter" if kind else "tensor"
        return f"{what} {tuple(tensor.shape)}"

    def tag_of(self, tensor: Tensor) -> str:
        return str(self._names.get(tensor) or "parameter")


def _is_parameter(tensor: Tensor) -> TypeGuard[nn.Parameter]:
    # isinstance alone takes a microsecond: Parameter has a say in it.
    return type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)


def _named(model: nn.Module | None) -> Iterable[tuple[str, nn.Parameter]]:
    if model is None:
        return ()
    return model.named_parameters()


_COPY = "copy_to_tensor_parallel_region"
_REDUCE = "reduce_from_tensor_parallel_region"
_OF_TENSOR = {
    _COPY: "Megatron-LM's copy_to_tensor_model_parallel_region",
    _REDUCE: "where the sequence is sharded, reduce_scatter_to_sequence_parallel_region",
}


def call(name: str, axis: str) -> str:
    if axis == "tensor":
        return f"{name} ({_OF_TENSOR[name]})"
    return f"{name}(x, {axis} group)"


def fail(
    records: Records, operation: str, axis: str, operands: Settled, reason: str, mend: str
) -> ParallelTypeError:
    seen = ", ".join(f"{records.name(one.tensor)} is {kind}" for one, kind in operands)
    return ParallelTypeError(
        f"{operation}, on the {axis} axis: {seen or 'no tensor'}.\n"
        f"  {user_line()}\n  {reason}\n  Mend: {mend}"
    )


def combine(
    records: Records, operation: str, operands: Operands, contracts: bool, shifts: bool
) -> Record:
    is_data = all(one.record.is_data for one in operands)
    written = [one for one in operands if not one.record.is_fresh]
    if operands[0].record.is_fresh and not any(map(_is_number, written)):
        return replace(operands[0].record, is_fresh=operation in PASSING and not shifts)
    operands = written
    kinds = tuple(
        along(records, operation, place, operands, contracts and axis == "tensor", shifts)
        for place, axis in enumerate(records.axes)
    )
    return Record(kinds, is_data=is_data)


def along(
    records: Records, operation: str, place: int, operands: Operands, contracts: bool, shifts: bool
) -> str:
    axis = records.axes[place]
    settled = [(one, kind) for one in operands if (kind := one.settled(place)) is not None]
    kinds = {kind for _, kind in settled}
    if contracts and operation in BIASED and len(operands) > 2:
        reason = (
            "The product over a sharded dim is a partial sum, to which each rank adds the bias: "
            "once a rank after the sum."
        )
        mend = f"leave the bias out, sum by {call(_REDUCE, axis)}, then add the bias, as "
        raise fail(records, operation, axis, settled, reason, mend + "RowParallelLinear does")
    if INVARIANT in kinds and len(kinds) > 1:
        raise _mixed(records, operation, axis, settled)
    if PARTIAL in kinds:
        if operation in LOOKING:
            return VARYING
        return _partial(records, operation, place, operands, settled, shifts)
    if VARYING not in kinds:
        return next(iter(kinds), INVARIANT)
    if contracts:
        return PARTIAL
    return VARYING


def _partial(
    records: Records, operation: str, place: int, operands: Operands, settled: Settled, shifts: bool
) -> str:
    axis = records.axes[place]
    kinds = [kind for _, kind in settled]
    all_partial = all(
        one.record.types[place] == PARTIAL or _selects(one, place) for one in operands
    )
    mend = f"sum it first, by {call(_REDUCE, axis)}"
    if operation in ADDING:
        if all_partial and not shifts:
            return PARTIAL
        reason = "What is not partial is added on every rank: once a rank after the sum."
    elif operation in PASSING and all_partial and not shifts:
        return PARTIAL
    elif operation in MULTIPLYING or (
        operation in DIVIDING and kinds[0] == PARTIAL and operands[0] is settled[0][0]
    ):
        if kinds.count(PARTIAL) == 1 and VARYING not in kinds:
            return PARTIAL
        reason = "A product of sums is not the sum of the ranks' products."
    elif operation in PASSING:
        reason = "Partial and whole values in one tensor cannot be summed over the ranks."
    else:
        reason = f"{operation} is not linear: of partial sums it is not the part of a sum."
    raise fail(records, operation, axis, settled, f"{reason} A reduction is missing.", mend)


def _mixed(records: Records, operation: str, axis: str, settled: Settled) -> ParallelTypeError:
    own = next(one for one, kind in settled if kind == INVARIANT)
    others = {kind for _, kind in settled} - {INVARIANT}
    tagged = next((one.tensor for one, kind in settled if kind == REPLICATED), own.tensor)
    if PARTIAL in others:
        reason = (
            "The other operand is a partial sum: what is added to it is added on every rank, "
            "once a rank after the sum. A reduction is missing."
        )
        mend = f"sum the partial one first, by {call(_REDUCE, axis)}"
    elif isinstance(own.tensor, nn.Parameter):
        reason = (
            "The parameter is replicated, but used on other data by each rank: its gradient is "
            "partial."
        )
        mend = (
            "if this is the rank's part of the sequence or of the heads, tag it, "
            f"mark_sequence_parallel({records.tag_of(own.tensor)}), and finalize_grads sums it; if "
            "the data should be whole here, or summed, gather or reduce it first"
        )
    elif isinstance(tagged, nn.Parameter):
        reason = (
            "The parameter is tagged sequence_parallel, but used on whole data: finalize_grads "
            "would count its gradient once a rank."
        )
        tag = records.tag_of(tagged)
        mend = f"take the tag off {tag} (sequence_parallel = False), or shard the data"
    elif others == {REPLICATED}:
        reason = (
            "One went through a region that sums its gradient, the other did not: the gradient of "
            "their result can be either equal or partial, and is wrong for one of them."
        )
        mend = (
            f"use the tensor of before the region for both, or put both through {call(_COPY, axis)}"
        )
    else:
        reason = (
            "The gradient that comes back to the invariant tensor is another one on each rank, and "
            "nothing sums it."
        )
        mend = (
            f"wrap the invariant tensor in {call(_COPY, axis)}; or, if the other should be whole "
            "here (in a residual, say), gather or reduce that one"
        )
    return fail(records, operation, axis, settled, reason, mend)


def _selects(one: Operand, place: int) -> bool:
    """Whether it is an index or a mask, and the same on all ranks."""
    return not _is_number(one) and one.record.types[place] in EQUAL


def _is_number(one: Operand) -> bool:
    return one.tensor.is_floating_point() or one.tensor.is_complex()
