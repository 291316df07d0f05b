"""The two ends of backward: the loss that it starts from, and the gradients that it leaves."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ezpz_tp._training.grads import gradient

from .combine import fail
from .records import Records
from .types import INVARIANT, PARTIAL, REPLICATED, VARYING, Operand

_WRONG = {
    VARYING: (
        "Every rank would start from another loss, of its part of the model alone.",
        (
            "reduce what the loss is made of, by vocab_parallel_cross_entropy for sharded logits, "
            "or by reduce_from_tensor_parallel_region for sums over a part"
        ),
    ),
    PARTIAL: (
        "Every rank would start from its part of a sum. A reduction is missing.",
        "sum it by reduce_from_tensor_parallel_region",
    ),
    REPLICATED: (
        "Every rank starts the same gradient, and they are summed: once a rank too often.",
        (
            "start from the loss of before copy_to_tensor_parallel_region (or gather with "
            "tensor_parallel_output_grad=False)"
        ),
    ),
}


def check_loss(records: Records, name: str, loss: Operand) -> None:
    """Refuse to start backward from what is not one loss for all ranks.

    Raises:
        ParallelTypeError: Along the tensor axis it is not invariant; or along another, where
            each rank may have its own, it is a copy that all share.
    """
    for place, axis in enumerate(records.axes):
        kind = loss.settled(place)
        if kind is None or kind == INVARIANT or (axis != "tensor" and kind != REPLICATED):
            continue
        reason, mend = _WRONG[kind]
        if axis != "tensor":
            mend = (
                "call backward on this rank's own loss and reduce a detached copy for the log, or "
                f"sum by reduce_from_tensor_parallel_region(loss, {axis} group)"
            )
        raise fail(records, name, axis, [(loss, kind)], reason, mend)


def gradients_to_finalize(records: Records, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters, none of which was finalized as it is.

    Raises:
        ParallelTypeError: One was, and no backward pass has added to it since.
    """
    found = []
    for parameter in parameters:
        grad = gradient(parameter)
        if grad is None:
            continue
        if records.is_finalized(grad):
            operand = records.operand(parameter)
            raise fail(
                records,
                "finalize_grads",
                records.axes[0],
                [(operand, operand.record.types[0])],
                "Its gradient was finalized before, and no backward pass has added to it: what is "
                "summed would be summed twice.",
                "call finalize_grads once a step, after the last backward pass",
            )
        found.append(grad)
    return found
