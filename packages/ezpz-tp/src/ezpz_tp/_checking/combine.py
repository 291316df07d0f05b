"""What the types of an operation's operands make of its result, or why they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from ezpz_tp._errors import ParallelTypeError

from .operations import ADDING, BIASED, DIVIDING, LOOKING, MULTIPLYING, PASSING
from .place import user_line
from .records import Records
from .types import EQUAL, INVARIANT, PARTIAL, REPLICATED, VARYING, Operand, Record

_COPY = (
    "copy_to_tensor_parallel_region (Megatron-LM's copy_to_tensor_model_parallel_region)",
    "copy_to_tensor_parallel_region(x, {group})",
)
_REDUCE = (
    (
        "reduce_from_tensor_parallel_region (where the sequence is sharded, "
        "reduce_scatter_to_sequence_parallel_region)"
    ),
    "reduce_from_tensor_parallel_region(x, {group})",
)


def call(names: tuple[str, str], axis: str) -> str:
    """Return the region function to name for an axis."""
    return names[0] if axis == "tensor" else names[1].format(group=f"{axis} group")


def fail(
    records: Records,
    operation: str,
    axis: str,
    operands: Sequence[tuple[Operand, str]],
    reason: str,
    mend: str,
) -> ParallelTypeError:
    """Return the error: the user's line, the operation, its operands' types, and what to do."""
    seen = ", ".join(f"{records.name(one.tensor)} is {kind}" for one, kind in operands)
    return ParallelTypeError(
        f"{operation}, on the {axis} axis: {seen or 'no tensor'}.\n"
        f"  {user_line()}\n  {reason}\n  Mend: {mend}"
    )


def combine(
    records: Records,
    operation: str,
    operands: Sequence[Operand],
    *,
    shifts: bool = False,
    contracts: bool = False,
) -> Record:
    """Return what is known of the result of an operation of torch.

    Args:
        records: What is known so far.
        operation: The function's name.
        operands: Its tensors, at least one.
        shifts: Whether a number other than zero is added to the tensor, or put in its place.
        contracts: Whether a dim that is split over the tensor-parallel ranks is summed over.

    Raises:
        ParallelTypeError: The types do not fit each other, or the operation.
    """
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
    records: Records,
    operation: str,
    place: int,
    operands: Sequence[Operand],
    contracts: bool = False,
    shifts: bool = False,
) -> str:
    """Return the type of an operation's result along one axis.

    Args:
        records: What is known so far.
        operation: The function's name.
        place: That of the axis.
        operands: Its tensors.
        contracts: Whether a dim that is split over the axis is summed over.
        shifts: Whether a number other than zero is added.
    """
    axis = records.axes[place]
    settled = [(one, kind) for one in operands if (kind := one.settled(place)) is not None]
    kinds = {kind for _, kind in settled}
    if contracts and operation in BIASED and len(operands) > 2:
        raise fail(
            records,
            operation,
            axis,
            settled,
            "The product over a sharded dim is a partial sum, to which each rank adds the bias: "
            "once a rank after the sum.",
            f"leave the bias out, sum by {call(_REDUCE, axis)}, then add the bias, as "
            "RowParallelLinear does",
        )
    if INVARIANT in kinds and len(kinds) > 1:
        raise _mixed(records, operation, axis, settled)
    if PARTIAL in kinds:
        if operation in LOOKING:
            return VARYING
        return _partial(records, operation, axis, operands, settled, shifts)
    if VARYING not in kinds:
        return next(iter(kinds), INVARIANT)
    return PARTIAL if contracts else VARYING


def _partial(
    records: Records,
    operation: str,
    axis: str,
    operands: Sequence[Operand],
    settled: Sequence[tuple[Operand, str]],
    shifts: bool,
) -> str:
    """The result where at least one operand is a partial sum."""
    partial = sum(kind == PARTIAL for _, kind in settled)
    varying = any(kind == VARYING for _, kind in settled)
    place = records.axes.index(axis)
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
        operation in DIVIDING and settled[0][1] == PARTIAL and operands[0] is settled[0][0]
    ):
        if partial == 1 and not varying:
            return PARTIAL
        reason = "A product of sums is not the sum of the ranks' products."
    elif operation in PASSING:
        reason = "Partial and whole values in one tensor cannot be summed over the ranks."
    else:
        reason = f"{operation} is not linear: of partial sums it is not the part of a sum."
    raise fail(records, operation, axis, settled, f"{reason} A reduction is missing.", mend)


def _mixed(
    records: Records,
    operation: str,
    axis: str,
    settled: Sequence[tuple[Operand, str]],
) -> ParallelTypeError:
    """The error where an invariant operand meets another type."""
    own = next(one for one, kind in settled if kind == INVARIANT)
    others = {kind for _, kind in settled} - {INVARIANT}
    tagged = next((one for one, kind in settled if kind == REPLICATED), None)
    if PARTIAL in others:
        reason = (
            "The other operand is a partial sum: what is added to it is added on every rank, "
            "once a rank after the sum. A reduction is missing."
        )
        mend = f"sum the partial one first, by {call(_REDUCE, axis)}"
    elif isinstance(own.tensor, nn.Parameter):
        name = records.tag_of(own.tensor)
        reason = "The parameter is replicated, but used on other data by each rank: its gradient "
        reason += "is partial."
        mend = (
            "if this is the rank's part of the sequence or of the heads, tag it, "
            f"mark_sequence_parallel({name}), and finalize_grads sums it; if the data should be "
            "whole here, or summed, gather or reduce it first"
        )
    elif REPLICATED in others and isinstance(getattr(tagged, "tensor", None), nn.Parameter):
        name = records.tag_of(tagged.tensor)  # type: ignore[union-attr]
        reason = (
            "The parameter is tagged sequence_parallel, but used on whole data: finalize_grads "
        )
        reason += "would count its gradient once a rank."
        mend = f"take the tag off {name} (sequence_parallel = False), or shard the data"
    elif REPLICATED in others and VARYING not in others:
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
