"""What region functions, products, random draws and the ends of backward do to types."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.distributed import ProcessGroup

import ezpz_tp as tp

from . import _rules as rules
from ._kinds import Kind, is_random
from ._rules import (
    EQUAL,
    INVARIANT,
    PARTIAL,
    REPLICATED,
    UNCHECKED,
    VARYING,
    Operand,
    Operation,
    Record,
    Records,
)

Given: TypeAlias = Sequence[Operand | None]


@dataclass(frozen=True, slots=True)
class Region:
    takes: frozenset[str]
    returns: str
    fix: Mapping[str, str]
    weight: str | None = None
    bias: str | None = None
    axis: str = "tensor"
    inputs: int = 1


def _region(takes: tuple[str, ...], returns: str, more: Any = None, **fix: str) -> Region:
    """Return a region; the fix ``equal`` is for both types that are equal on all ranks."""
    both = {}
    if "equal" in fix:
        both = dict.fromkeys(EQUAL, fix.pop("equal"))
    partial = "a reduction is missing: sum it first, by reduce_from_tensor_parallel_region"
    return Region(frozenset(takes), returns, {PARTIAL: partial, **both, **fix}, **(more or {}))


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

_OWN = "every rank has its own, whose gradient is its own too: leave the copy out"
_copy = _region((INVARIANT,), REPLICATED, replicated=_TWICE, varying=_OWN)
_scatter = _region((INVARIANT,), VARYING, replicated=_TWICE, varying=_PART)
_gather = _region((VARYING,), INVARIANT, equal=_WHOLE)
_gather_sums = replace(_gather, returns=REPLICATED)
_reduce = _region(_SUMS, INVARIANT, equal=_SUMMED)
_reduce_scatter = _region(_SUMS, VARYING, equal="it is summed already: scatter it instead")
_exchange = _region((VARYING,), VARYING, equal="scatter it instead")
_OF_CONTEXT = {"axis": "context"}
_shard = _region(
    (REPLICATED, VARYING), VARYING, _OF_CONTEXT,
    invariant="its gradient is partial: pass it through "
    "copy_to_tensor_parallel_region(x, context group) first",
    partial="sum it first, by reduce_from_tensor_parallel_region(x, context group)",
)  # fmt: skip
_attention = _region(
    (VARYING,), VARYING, _OF_CONTEXT | {"inputs": 3},
    equal="give this rank's part, by shard_sequence",
    partial="a reduction is missing: sum it first",
)  # fmt: skip
_GATHERED = "build the layer with input_is_parallel=False, or leave out the gather before it"
_row = _region((VARYING,), INVARIANT, {"weight": VARYING, "bias": INVARIANT}, equal=_GATHERED)
_lookup = _region((VARYING,), INVARIANT, equal=_UNSAID.format("weight"))
_PARTS = {"weight": VARYING, "bias": VARYING}
_column = _region(
    (INVARIANT,), VARYING, _PARTS,
    replicated=_TWICE + "; or clear the layer's reduce_input_gradient",
    varying="gather or reduce it first: the layer takes what is the same on all ranks",
)  # fmt: skip
_column_unsummed = _region(
    (REPLICATED, VARYING), VARYING, _PARTS,
    invariant="the layer's reduce_input_gradient is cleared, so nothing sums the gradient of "
    "its input: pass it through copy_to_tensor_parallel_region once",
)  # fmt: skip
_column_sequence = _region(
    (VARYING,), VARYING, _PARTS,
    invariant="the layer gathers the sequence: scatter_to_sequence_parallel_region first, or "
    "build it with sequence_parallel=False",
    replicated="the layer gathers the sequence: leave out the gather before it",
    partial="sum it by reduce_scatter_to_sequence_parallel_region first",
)  # fmt: skip

REGIONS: dict[Callable[..., Any], Region | tuple[str, Region, Region]] = {
    # A region; or the argument that chooses, and the ones without and with it.
    tp.copy_to_tensor_parallel_region: _copy,
    tp.reduce_from_tensor_parallel_region: _reduce,
    tp.scatter_to_tensor_parallel_region: _scatter,
    tp.gather_from_tensor_parallel_region: _gather,
    tp.all_gather_last_dim_from_tensor_parallel_region: _gather_sums,
    tp.reduce_scatter_last_dim_to_tensor_parallel_region: _reduce_scatter,
    tp.scatter_to_sequence_parallel_region: _scatter,
    tp.gather_from_sequence_parallel_region: (
        "tensor_parallel_output_grad", _gather, _gather_sums
    ),
    tp.reduce_scatter_to_sequence_parallel_region: _reduce_scatter,
    tp.all_to_all: _exchange,
    tp.vocab_parallel_cross_entropy: _region((VARYING,), INVARIANT, equal=_LOGITS),
    tp.vocabulary_lookup: ("sequence_parallel", _lookup, replace(_lookup, returns=VARYING)),
    tp.column_linear: ("sequence_parallel", _column, _column_sequence),
    tp.row_linear: ("sequence_parallel", _row, replace(_row, returns=VARYING, bias=REPLICATED)),
    tp.shard_sequence: _shard,
    tp.unshard_sequence: (
        "sum_grads", replace(_gather, axis="context"), replace(_gather_sums, axis="context")
    ),
    **dict.fromkeys((tp.ring_attention, tp.ulysses_attention, tp.unified_attention), _attention),
}  # fmt: skip


MODULES = {region.__module__ for region in REGIONS}
"""Where their autograd functions are."""

_signature = functools.cache(inspect.signature)


def arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a call gives, and its defaults, by the names of parameters, in their order."""
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def select_region(
    function: Callable[..., Any], given: Mapping[str, Any]
) -> tuple[Region, ProcessGroup | None]:
    """Return what a call of one of `REGIONS` does to types, and the group that it is over."""
    region = REGIONS[function]
    if not isinstance(region, Region):
        flag, without, with_ = region
        region = without
        if given[flag]:
            region = with_
        if region is _column and not given["reduce_input_gradient"]:
            region = _column_unsummed
    for name in ("tp_group", "ring_group"):
        if name in given:
            return region, given[name]
    return region, given["group"]


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    if len(args) > place:
        return args[place]
    return kwargs.get(name)


def apply_region(
    records: Records, name: str, region: Region, operands: Given, axes: Sequence[int]
) -> Record:
    given = [one for one in operands if one is not None]
    elsewhere = Operation(name, Kind.NONLINEAR)  # along the axes that it is not over
    types = []
    for place, axis in enumerate(records.axes):
        if place in axes:
            for one in given[: region.inputs]:
                _check(records, name, region, one, axis, place)
            _check_parameters(records, name, region, operands[region.inputs :], axis, place)
            types.append(region.returns)
        else:
            types.append(rules.type_along(records, elsewhere, place, given))
    return Record(tuple(types))


def _check(
    records: Records, name: str, region: Region, one: Operand, axis: str, place: int
) -> None:
    if one.record.types[place] == UNCHECKED:
        return
    kind = one.settled(place)
    if kind is None:
        kind = INVARIANT
        fits = bool(region.takes & EQUAL)
    else:
        fits = kind in region.takes
    # Of data the user knows more; and a layer's weight says "tensor" whatever its group is.
    if fits or one.record.is_data or (axis != "tensor" and isinstance(one.tensor, nn.Parameter)):
        return
    wanted = " or ".join(sorted(region.takes))
    fix = region.fix.get(kind, f"make it {wanted}")
    raise rules.type_error(records, name, axis, [(one, kind)], f"It takes what is {wanted}.", fix)


def _check_parameters(
    records: Records, name: str, region: Region, parameters: Given, axis: str, place: int
) -> None:
    for one, wanted in zip(parameters, (region.weight, region.bias), strict=False):
        if one is None or wanted is None or axis != "tensor" or one.record.is_data:
            continue
        found = one.settled(place)
        if found is not None and found != wanted:
            raise _untagged_error(records, name, axis, one, found, wanted)


def _untagged_error(
    records: Records, name: str, axis: str, one: Operand, found: str, wanted: str
) -> Exception:
    called = records.parameter_name(one.tensor)
    if wanted == VARYING:
        reason = "It is used as this rank's part, but its attributes do not say so."
        fix = _UNSAID.format(called)
    elif wanted == REPLICATED:
        reason = "It is added to this rank's part of the sequence, so its gradient is partial."
        fix = f"mark_sequence_parallel({called}), and finalize_grads sums it"
    else:
        reason = "It is used on whole data: finalize_grads would count its gradient once a rank."
        fix = f"take the tag off {called} (sequence_parallel = False)"
    return rules.type_error(records, name, axis, [(one, found)], reason, fix)


# Products that sum over a dim which is split over the tensor-parallel ranks.

_ADDED_FIRST = frozenset({"addmm", "baddbmm", "addbmm", "addmv"})
_MATRICES = frozenset({"matmul", "__matmul__", "mm", "bmm", "mv", *_ADDED_FIRST})
_ROWS = frozenset({"linear", "conv1d", "conv2d", "conv3d"})


def contracts(
    name: str, operands: Sequence[Operand], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a product sums over a dim that is split over the ranks."""
    if all(one.record.sharded_dim is None for one in operands):
        return False
    factors = list(operands)
    if name in _ADDED_FIRST:
        factors.pop(0)
    for factor, dims in _summed_dims(name, factors, args, kwargs):
        if factor.record.sharded_dim in dims:
            return True
    return False


def _summed_dims(
    name: str, factors: Sequence[Operand], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Operand, Sequence[int]]]:
    """Yield the factors of a product, and the dims of each that it sums over."""
    if name == "einsum" and isinstance(args[0], str):
        yield from _of_einsum(args[0], factors)
    elif len(factors) < 2:
        return
    elif name in _ROWS:
        yield factors[1], (min(1, factors[1].tensor.dim() - 1),)
    elif name in _MATRICES:
        yield factors[0], (factors[0].tensor.dim() - 1,)
        yield factors[1], (max(0, factors[1].tensor.dim() - 2),)
    elif name == "tensordot":
        dims = argument(args, kwargs, 2, "dims")
        if isinstance(dims, int):
            dims = range(-dims, 0), range(dims)
        for factor, summed in zip(factors, dims, strict=True):
            yield factor, [dim % factor.tensor.dim() for dim in summed]


def _of_einsum(
    equation: str, factors: Sequence[Operand]
) -> Iterator[tuple[Operand, Sequence[int]]]:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        output = "".join(letter for letter in inputs if inputs.count(letter) == 1)
    for factor, letters in zip(factors, inputs.split(","), strict=False):
        if "." not in letters:
            yield factor, [dim for dim, letter in enumerate(letters) if letter not in output]


# Random numbers: the same on all tensor-parallel ranks, or other ones on each.


_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def draws_numbers(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers for a tensor; some draw in training only."""
    if not is_random(name):
        return False
    if name == "scaled_dot_product_attention":
        return bool(argument(args, kwargs, 4, "dropout_p"))
    if name.startswith("rrelu"):
        return bool(argument(args, kwargs, 3, "training"))
    if name in _RECURRENT:
        return _drops_between_layers(args, kwargs)
    if "dropout" not in name:
        return kwargs.get("generator") is None  # with one of the user's own, he knows
    probability = kwargs.get("p", 0.5)
    if len(args) > 1:
        probability = args[1]
    # Where nothing is said, those of alpha do not.
    training = kwargs.get("training", kwargs.get("train", "alpha" not in name))
    if len(args) > 2:
        training = args[2]
    return bool(probability and training)


def _drops_between_layers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a recurrent net is given dropout, and trains."""
    # Packed data comes with one tensor more, so places are counted among the numbers:
    # has_biases, num_layers, dropout, train.
    numbers = [value for value in args if isinstance(value, (int, float))]
    probability = argument(numbers, kwargs, 2, "dropout")
    training = argument(numbers, kwargs, 3, "train")
    return bool(probability and training)


def record_of_drawn(records: Records) -> Record:
    """Return what is known of a new tensor of random numbers."""
    if _is_forked():
        return _varying(records, records.data)
    return records.data


def check_random_op(
    records: Records, name: str, operands: Sequence[Operand], record: Record
) -> Record:
    """Refuse equal numbers for other parts, and other numbers for what is equal on all ranks."""
    if "tensor" not in records.axes:
        return record
    place = records.axes.index("tensor")
    forked = _is_forked()
    kind = record.types[place]
    reason = fix = ""
    if forked and kind == PARTIAL:
        reason = "Inside fork() every rank drops other elements of its part of a sum. "
        reason += "A reduction is missing."
        fix = "sum it by reduce_from_tensor_parallel_region, then drop, outside fork()"
    # Data that is drawn from, rather than dropped of, is probabilities.
    elif forked and kind in EQUAL and ("dropout" in name or not record.is_data):
        reason = "Inside fork() every tensor-parallel rank draws other numbers, and this tensor "
        reason += "should stay the same on all."
        fix = "call it outside `with get_rng_tracker().fork():`"
    elif not forked and kind == VARYING and tp.get_rng_tracker().current is None:
        reason = "Outside fork() all tensor-parallel ranks draw the same numbers, for different "
        reason += "parts of the data: equal seeds where they must differ."
        fix = "call it within `with get_rng_tracker().fork():`"
    if reason:
        seen = []
        for one in operands:
            type_ = one.record.types[place]
            seen.append((one, type_))
        raise rules.type_error(records, name, "tensor", seen, reason, fix)
    if forked:
        return _varying(records, record)
    return record


def _is_forked() -> bool:
    return tp.get_rng_tracker().current in {"model-parallel-rng", "expert-parallel-rng"}


def _varying(records: Records, record: Record) -> Record:
    types = list(record.types)
    if "tensor" in records.axes:
        types[records.axes.index("tensor")] = VARYING
    return Record(tuple(types))


# The two ends of backward: the loss that it starts from, and the gradients that it leaves.

_WRONG = {
    VARYING: (
        "Every rank would start from another loss, of its part of the model alone.",
        ("reduce what the loss is made of, by vocab_parallel_cross_entropy for sharded logits, "
         "or by reduce_from_tensor_parallel_region for sums over a part"),
    ),
    PARTIAL: (
        "Every rank would start from its part of a sum. A reduction is missing.",
        "sum it by reduce_from_tensor_parallel_region",
    ),
    REPLICATED: (
        "Every rank starts the same gradient, and they are summed: once a rank too often.",
        ("start from the loss of before copy_to_tensor_parallel_region (or gather with "
         "tensor_parallel_output_grad=False)"),
    ),
}  # fmt: skip


def check_loss(records: Records, name: str, loss: Operand) -> None:
    """Refuse to start backward from what is not one loss for all ranks."""
    for place, axis in enumerate(records.axes):
        kind = loss.settled(place)
        if kind is None or kind == INVARIANT or (axis != "tensor" and kind != REPLICATED):
            continue
        reason, fix = _WRONG[kind]
        if axis != "tensor":
            fix = (
                "call backward on this rank's own loss and reduce a detached copy for the log, or "
                f"sum by reduce_from_tensor_parallel_region(loss, {axis} group)"
            )
        raise rules.type_error(records, name, axis, [(loss, kind)], reason, fix)


def list_parameters(model_or_parameters: Any) -> list[Tensor]:
    """Return the parameters that `ezpz_tp.finalize_grads` is called with, each once."""
    if isinstance(model_or_parameters, nn.Module):
        return list(model_or_parameters.parameters())
    if isinstance(model_or_parameters, Tensor):
        return [model_or_parameters]
    found: dict[int, Tensor] = {}
    for one in model_or_parameters:
        parameters = one.parameters() if isinstance(one, nn.Module) else [one]
        for parameter in parameters:
            found[id(parameter)] = parameter
    return list(found.values())


def gradients_to_finalize(records: Records, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters, none of which was finalized as it is."""
    found = []
    for parameter in parameters:
        grad = getattr(parameter, "main_grad", None)  # Megatron's DDP sums in this one
        if grad is None:
            grad = parameter.grad
        if grad is None:
            continue
        if records.is_finalized(grad):
            operand = records.operand(parameter)
            seen = [(operand, operand.record.types[0])]
            axis = records.axes[0]
            reason = (
                "Its gradient was finalized before, and no backward pass has added to it: what "
                "is summed would be summed twice."
            )
            fix = "call finalize_grads once a step, after the last backward pass"
            raise rules.type_error(records, "finalize_grads", axis, seen, reason, fix)
        found.append(grad)
    return found
