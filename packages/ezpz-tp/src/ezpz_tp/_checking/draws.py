"""Random numbers: the same on all tensor-parallel ranks, or other ones on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ezpz_tp._training.random import EXPERT_PARALLEL_RNG, MODEL_PARALLEL_RNG, get_rng_tracker

from .combine import fail
from .records import Records
from .types import EQUAL, PARTIAL, VARYING, Operand, Record

DRAWING = frozenset(
    {
        *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"),
        *("feature_alpha_dropout", "feature_dropout", "rrelu", "rrelu_", "bernoulli", "bernoulli_"),
        *("rand_like", "randn_like", "randint_like", "normal_", "uniform_", "random_"),
        *("exponential_", "multinomial", "gumbel_softmax", "scaled_dot_product_attention"),
    }
)
"""What draws random numbers for a tensor."""

GENERATING = frozenset({"rand", "randn", "randint", "randperm", "normal"})
"""What makes a tensor of random numbers."""

_DROPPING = frozenset(name for name in DRAWING if "dropout" in name)
"""What draws only in training, with a probability above zero."""

_TRAINING = {"alpha_dropout": False, "feature_alpha_dropout": False}
"""Whether they do where nothing is said."""


def draws(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call draws at all."""
    if name == "scaled_dot_product_attention":
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p"))
    if name.startswith("rrelu"):
        return bool(args[3] if len(args) > 3 else kwargs.get("training", False))
    if name not in _DROPPING:
        return kwargs.get("generator") is None  # with one of the user's own, he knows
    probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = kwargs.get("training", kwargs.get("train", _TRAINING.get(name, True)))
    return bool(probability and (args[2] if len(args) > 2 else training))


def generated(records: Records) -> Record:
    """Return what is known of a tensor of random numbers."""
    return _varying(records, records.data) if _is_forked() else records.data


def drawn(records: Records, name: str, operands: Sequence[Operand], record: Record) -> Record:
    """Return what random numbers make of an operation's result.

    Raises:
        ParallelTypeError: Ranks draw the same for what differs, or the other way round.
    """
    if "tensor" not in records.axes:
        return record
    place = records.axes.index("tensor")
    seen = [(one, one.record.types[place]) for one in operands]
    kind = record.types[place]
    if _is_forked() and kind == PARTIAL:
        raise fail(
            records,
            name,
            "tensor",
            seen,
            "Inside fork() every rank drops other elements of its part of a sum. A reduction is "
            "missing.",
            "sum it by reduce_from_tensor_parallel_region, then drop, outside fork()",
        )
    if _is_forked():
        # Data that is drawn from, rather than dropped of, is probabilities.
        if kind in EQUAL and (name in _DROPPING or not record.is_data):
            raise fail(
                records,
                name,
                "tensor",
                seen,
                "Inside fork() every tensor-parallel rank draws other numbers, and this tensor "
                "should stay the same on all.",
                "call it outside `with get_rng_tracker().fork():`",
            )
        return _varying(records, record)
    if kind == VARYING and get_rng_tracker().current is None:
        raise fail(
            records,
            name,
            "tensor",
            seen,
            "Outside fork() all tensor-parallel ranks draw the same numbers, for different parts "
            "of the data: equal seeds where they must differ.",
            "call it within `with get_rng_tracker().fork():`",
        )
    return record


def _is_forked() -> bool:
    return get_rng_tracker().current in {MODEL_PARALLEL_RNG, EXPERT_PARALLEL_RNG}


def _varying(records: Records, record: Record) -> Record:
    pairs = zip(records.axes, record.types, strict=True)
    return Record(tuple(VARYING if axis == "tensor" else kind for axis, kind in pairs))
