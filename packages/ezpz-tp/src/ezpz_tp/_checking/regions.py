"""What each region function takes and returns, along the axis of its group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ezpz_tp._layers.fused import column_linear, row_linear
from ezpz_tp._layers.lookup import vocabulary_lookup
from ezpz_tp._regions import exchange, mappings
from ezpz_tp._sequence.balance import shard_sequence, unshard_sequence
from ezpz_tp._sequence.ring import ring_attention
from ezpz_tp._sequence.ulysses import ulysses_attention
from ezpz_tp._sequence.unified import unified_attention
from ezpz_tp._training.cross_entropy import vocab_parallel_cross_entropy

from .combine import along, fail
from .records import Records
from .types import EQUAL, INVARIANT, PARTIAL, REPLICATED, VARYING, Operand, Record


@dataclass(frozen=True, slots=True)
class Region:
    """One region function, or one way to use it.

    Attributes:
        takes: The types that its first tensor may have. What no gradient flows to and is equal
            on all ranks goes as either of the equal types.
        returns: The type of its result.
        group: Place and name of the argument that holds the group.
        mend: What to do, by the type that was given instead.
        weight: The type that its second tensor, a parameter, must have.
        bias: The type that its third tensor, a parameter, must have.
        axis: Where it goes without a group.
        inputs: How many of its tensors are to be of the types that it takes.
    """

    takes: frozenset[str]
    returns: str
    group: tuple[int, str]
    mend: Mapping[str, str] = field(default_factory=dict)
    weight: str | None = None
    bias: str | None = None
    axis: str = "tensor"
    inputs: int = 1


def _region(
    takes: tuple[str, ...],
    returns: str,
    place: int,
    *,
    name: str = "tp_group",
    equal: str | None = None,
    **mend: str,
) -> Region:
    """``equal`` is the mend for both types that are equal on all ranks."""
    both = {} if equal is None else {INVARIANT: equal, REPLICATED: equal}
    partial = "a reduction is missing: sum it first, by reduce_from_tensor_parallel_region"
    return Region(frozenset(takes), returns, (place, name), {PARTIAL: partial, **both, **mend})


_TWICE = (
    "it went through copy_to_tensor_parallel_region (or a gather that sums gradients) before; "
    "leave one of the two out, or its gradient is summed twice"
)
_PART = "it is this rank's part already: leave the scatter out"
_WHOLE = "it is whole on all ranks: leave the gather out, or scatter it before"
_SUMMED = "it is the same on all ranks, so summed already: leave this reduction out"
_LOGITS = (
    "the logits are whole: use torch.nn.functional.cross_entropy, or leave out what gathers them "
    "(gather_output=False)"
)
_SUMS = (PARTIAL, VARYING)
_UNSAID = (
    "say so by set_tensor_model_parallel_attributes({}, True, dim, 1); where something replaces "
    "parameters (fully_shard), do it within keep_attributes(model), and give check the model"
)

_copy = _region(
    (INVARIANT,),
    REPLICATED,
    1,
    replicated=_TWICE,
    varying="every rank has its own, whose gradient is its own too: leave the copy out",
)
_scatter = _region((INVARIANT,), VARYING, 1, replicated=_TWICE, varying=_PART)
_gather = _region((VARYING,), INVARIANT, 1, equal=_WHOLE)
_reduce = _region(_SUMS, INVARIANT, 1, equal=_SUMMED)
_reduce_scatter = _region(_SUMS, VARYING, 1, equal="it is summed already: scatter it instead")
_exchange = _region((VARYING,), VARYING, 3, name="group", equal="scatter it instead")

_REGIONS: dict[Callable[..., Any], Region] = {
    mappings.copy_to_tensor_parallel_region: _copy,
    mappings.reduce_from_tensor_parallel_region: _reduce,
    mappings.scatter_to_tensor_parallel_region: _scatter,
    mappings.gather_from_tensor_parallel_region: _gather,
    mappings.all_gather_last_dim_from_tensor_parallel_region: replace(_gather, returns=REPLICATED),
    mappings.reduce_scatter_last_dim_to_tensor_parallel_region: _reduce_scatter,
    mappings.scatter_to_sequence_parallel_region: replace(_scatter, group=(2, "tp_group")),
    mappings.reduce_scatter_to_sequence_parallel_region: replace(
        _reduce_scatter, group=(2, "tp_group")
    ),
    exchange.all_to_all: _exchange,
    vocab_parallel_cross_entropy: _region((VARYING,), INVARIANT, 3, equal=_LOGITS),
}

_shard = Region(
    frozenset({REPLICATED, VARYING}),
    VARYING,
    (2, "group"),
    {
        INVARIANT: "its gradient is partial: pass it through "
        "copy_to_tensor_parallel_region(x, context group) first",
        PARTIAL: "sum it first, by reduce_from_tensor_parallel_region(x, context group)",
    },
    axis="context",
)
_attention = Region(
    frozenset({VARYING}),
    VARYING,
    (3, "group"),
    dict.fromkeys((INVARIANT, REPLICATED), "give this rank's part, by shard_sequence")
    | {PARTIAL: "a reduction is missing: sum it first"},
    axis="context",
    inputs=3,
)
_REGIONS |= {
    shard_sequence: _shard,
    ring_attention: _attention,
    ulysses_attention: _attention,
    unified_attention: replace(_attention, group=(3, "ring_group")),
}

_row = replace(
    _region(
        (VARYING,),
        INVARIANT,
        3,
        name="group",
        equal="build the layer with input_is_parallel=False, or leave out the gather before it",
    ),
    weight=VARYING,
    bias=INVARIANT,
)
_row_sequence = replace(_row, returns=VARYING, bias=REPLICATED)
_lookup = _region((VARYING,), INVARIANT, 3, name="group", equal=_UNSAID.format("weight"))
_column = replace(
    _region(
        (INVARIANT,),
        VARYING,
        3,
        name="group",
        replicated=_TWICE + "; or clear the layer's reduce_input_gradient",
        varying="gather or reduce it first: the layer takes what is the same on all ranks",
    ),
    weight=VARYING,
    bias=VARYING,
)
_column_unsummed = replace(
    _column,
    takes=frozenset({REPLICATED, VARYING}),
    mend={
        INVARIANT: "the layer's reduce_input_gradient is cleared, so nothing sums the gradient of "
        "its input: pass it through copy_to_tensor_parallel_region once",
        PARTIAL: _column.mend[PARTIAL],
    },
)
_column_sequence = replace(
    _column,
    takes=frozenset({VARYING}),
    mend={
        INVARIANT: "the layer gathers the sequence: scatter_to_sequence_parallel_region first, or "
        "build it with sequence_parallel=False",
        REPLICATED: "the layer gathers the sequence: leave out the gather before it",
        PARTIAL: "sum it by reduce_scatter_to_sequence_parallel_region first",
    },
)

_SHARING = {
    # layers, whether the sequence is shared outside of them or not
    column_linear: (_column, _column_sequence),
    row_linear: (_row, _row_sequence),
    vocabulary_lookup: (_lookup, replace(_lookup, returns=VARYING)),
}
_GATHERING = {
    # gathers, and the argument that says whether their gradients are summed
    mappings.gather_from_sequence_parallel_region: (
        replace(_gather, group=(3, "tp_group")),
        (1, "tensor_parallel_output_grad"),
    ),
    unshard_sequence: (replace(_gather, group=(2, "group"), axis="context"), (6, "sum_grads")),
}


def region_of(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Region | None:
    """Return what a function is in this call, if it is a region."""
    if function in _GATHERING:
        sums = argument(args, kwargs, *_GATHERING[function][1])
        return replace(_GATHERING[function][0], returns=REPLICATED if sums else INVARIANT)
    sequence = argument(args, kwargs, 4, "sequence_parallel")
    if function is column_linear and not sequence:
        return _column if argument(args, kwargs, 5, "reduce_input_gradient") else _column_unsummed
    if function in _SHARING:
        return _SHARING[function][bool(sequence)]
    return _REGIONS.get(function)


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    """Return an argument, given by place or by name."""
    return args[place] if len(args) > place else kwargs.get(name)


def through(
    records: Records,
    name: str,
    region: Region,
    operands: Sequence[Operand | None],
    axes: Sequence[int],
) -> Record:
    """Return what is known of a region's result.

    Args:
        records: What is known so far.
        name: The function's.
        region: What it is.
        operands: Its tensor arguments by place, None where there is none; the first is the one
            that changes its type.
        axes: Places of the axes of its group; along the others it is an operation like any.

    Raises:
        ParallelTypeError: An operand has another type than the region takes.
    """
    given = [one for one in operands if one is not None]
    types = []
    for place, axis in enumerate(records.axes):
        if place in axes:
            for one in given[: region.inputs]:
                _check(records, name, region, one, axis, place)
            _check_parameters(records, name, region, operands[region.inputs :], axis, place)
            types.append(region.returns)
        else:
            types.append(along(records, name, place, given))
    return Record(tuple(types))


def _check(
    records: Records, name: str, region: Region, one: Operand, axis: str, place: int
) -> None:
    kind = one.settled(place)
    fits = region.takes & EQUAL if kind is None else kind in region.takes
    # Of data the user knows more; and a layer's weight says "tensor" whatever its group is.
    if fits or one.record.is_data or (axis != "tensor" and isinstance(one.tensor, nn.Parameter)):
        return
    kind = kind or INVARIANT
    wanted = " or ".join(sorted(region.takes))
    mend = region.mend.get(kind, f"make it {wanted}")
    raise fail(records, name, axis, [(one, kind)], f"It takes what is {wanted}.", mend)


def _check_parameters(
    records: Records,
    name: str,
    region: Region,
    parameters: Sequence[Operand | None],
    axis: str,
    place: int,
) -> None:
    for one, wanted in zip(parameters, (region.weight, region.bias), strict=False):
        if one is None or wanted is None or axis != "tensor" or one.record.is_data:
            continue
        found = one.settled(place)
        if found is not None and found != wanted:
            raise _untagged(records, name, axis, one, found, wanted)


def _untagged(
    records: Records, name: str, axis: str, one: Operand, found: str, wanted: str
) -> Exception:
    """The error where a parameter does not say of itself what it is used as."""
    called = records.tag_of(one.tensor)
    if wanted == VARYING:
        reason = "It is used as this rank's part, but its attributes do not say so."
        mend = _UNSAID.format(called)
    elif wanted == REPLICATED:
        reason = "It is added to this rank's part of the sequence, so its gradient is partial."
        mend = f"mark_sequence_parallel({called}), and finalize_grads sums it"
    else:
        reason = "It is used on whole data: finalize_grads would count its gradient once a rank."
        mend = f"take the tag off {called} (sequence_parallel = False)"
    return fail(records, name, axis, [(one, found)], reason, mend)
