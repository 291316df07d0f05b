"""Kinds of operations, by what each makes of partial sums.

Of values that are equal or other ones on the ranks nothing need be known of an operation: its
result is equal if all of its operands are. Partial sums pass through what is linear in them,
f(a + b) = f(a) + f(b). Which operations are views and which elementwise is in torch's own schemas;
the rest are by name. What is in neither has no rule.
"""

from __future__ import annotations

import functools
from enum import Enum

import torch


class Kind(Enum):
    FRESH = "room to be written into: its value is zero, or not set yet"
    SHAPED = "takes of its tensor the shape, and no value"
    LINEAR = "linear in all of its tensors together, but for indices and masks"
    ADDITION = "a sum of its operands"
    PRODUCT = "linear in each factor by itself"
    QUOTIENT = "linear in the first operand"
    TEST = "may be asked of partial sums too"
    NONLINEAR = "a result of partial sums is not a part of a sum"
    UNKNOWN = "has no rule"


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NAMES = {
    Kind.FRESH: "zeros_like empty_like new_zeros new_empty new_empty_strided zero zeros empty "
    "empty_strided",
    Kind.SHAPED: "ones_like full_like new_ones new_full new_tensor fill",
    Kind.LINEAR: """
        sum mean nansum cumsum trace diff neg negative positive clone copy data type float double
        half bfloat16 type_as requires_grad retain_grad T H getitem setitem where masked_fill
        masked_select masked_scatter gather take take_along_dim index_select index_add index_copy
        index_put scatter scatter_add cat concat concatenate stack hstack vstack dstack pad repeat
        tile repeat_interleave broadcast_tensors roll flip tril triu dropout dropout1d dropout2d
        dropout3d feature_dropout
    """,
    Kind.ADDITION: "add sub subtract rsub",
    Kind.PRODUCT: "mul multiply matmul mm bmm mv dot einsum linear outer inner tensordot conv1d "
    "conv2d conv3d addmm baddbmm addbmm addmv",
    Kind.QUOTIENT: "div divide true_divide truediv",
    Kind.TEST: "isfinite isnan isinf",
    Kind.NONLINEAR: """
        softmax log_softmax layer_norm rms_norm group_norm batch_norm instance_norm normalize
        cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div
        binary_cross_entropy binary_cross_entropy_with_logits cosine_similarity cdist norm
        linalg_vector_norm amax amin argmax argmin median prod var std var_mean std_mean logsumexp
        logcumsumexp sort topk glu rpow rtruediv floor_divide remainder
        max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices
        max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
        fractional_max_pool2d fractional_max_pool3d scaled_dot_product_attention
    """,
}

_KINDS: dict[str, Kind] = {}
for _kind, _names in _NAMES.items():
    _KINDS |= dict.fromkeys(_names.split(), _kind)

_OPERATORS = {
    "radd": "add", "iadd": "add", "isub": "sub", "rmul": "mul", "imul": "mul",
    "rmatmul": "matmul", "itruediv": "truediv", "floordiv": "floor_divide",
    "rfloordiv": "floor_divide", "mod": "remainder", "rmod": "remainder",
}  # fmt: skip


@functools.cache
def base_name(name: str) -> str:
    """Return an operation's name without what makes it an operator or in place."""
    if name.startswith("__"):
        core = name.strip("_")
        return _OPERATORS.get(core, core)
    return name.removesuffix("_")


@functools.cache
def kind_of(name: str) -> Kind:
    base = base_name(name)
    if base in _KINDS:
        return _KINDS[base]
    overloads = _overloads(base)
    if any(map(_is_view, overloads)):
        return Kind.LINEAR
    if _have_tag(overloads, torch.Tag.pointwise):
        return Kind.NONLINEAR
    return Kind.UNKNOWN


_RANDOM_FUNCTIONS = words("dropout1d dropout2d dropout3d gumbel_softmax")
"""Written in Python, over others: not in torch's schemas."""


@functools.cache
def is_random(name: str) -> bool:
    """Whether an operation draws random numbers; dropout does in training only."""
    base = base_name(name)
    if base in _RANDOM_FUNCTIONS:
        return True
    return _have_tag(_overloads(base), torch.Tag.nondeterministic_seeded)


def _overloads(base: str) -> list[torch._ops.OpOverload]:
    packet = getattr(torch.ops.aten, base, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):  # noqa: SLF001 - its only name
        return []
    return [getattr(packet, name) for name in packet.overloads()]


def _have_tag(overloads: list[torch._ops.OpOverload], tag: torch.Tag) -> bool:
    return any(tag in one.tags for one in overloads)


def _is_view(overload: torch._ops.OpOverload) -> bool:
    """Whether a result is a tensor's own memory, not written to."""
    for result in overload._schema.returns:  # noqa: SLF001 - as torch's own code generation asks
        if result.alias_info is not None and not result.alias_info.is_write:
            return True
    return False


TAKING_AFTER = words("to type_as view_as expand_as reshape_as broadcast_to")
"""What takes of its second tensor no value."""

CUTTING = words("""
    narrow select getitem split chunk tensor_split index_select unbind split_with_sizes gather
    masked_select masked_fill
""")
"""What may take another part on each rank: of a replicated tensor, something that varies."""

NUMBERS = {
    "add": (0, 1),
    "sub": (0, 1),
    "subtract": (0, 1),
    "rsub": (0, 1),
    "setitem": (2,),
    "masked_fill": (2,),
    "scatter": (3,),
    "pad": (3,),
    "where": (1, 2),
}
"""Where operations that are linear with the number zero are given it; else as other or value."""

BIASED = words("linear addmm baddbmm addbmm addmv conv1d conv2d conv3d")
"""Products of two tensors to which a third is added."""

TRANSPOSING = words("t T mT transpose adjoint H mH swapaxes swapdims")
"""Of a matrix: they exchange its two dims."""

KEEPING_DIMS = words("detach clone contiguous to float double half bfloat16 type data")
"""What leaves a weight's dims where they are."""
