"""Queries, keys and values of a whole sequence, and what full attention makes of them."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Case:
    """Sizes and options of one attention."""

    heads: int = 4
    kv_heads: int = 4
    length: int = 48
    keys: int | None = None
    head_dim: int = 16
    value_dim: int = 16
    is_causal: bool = False
    balanced: bool = True
    scale: float | None = None
    dtype: torch.dtype = torch.float64


@dataclass
class Whole:
    """Inputs, output, its gradient, and theirs; all of the whole sequence."""

    inputs: list[Tensor]
    output: Tensor
    output_grad: Tensor
    grads: list[Tensor]


def whole_of(case, *, batch=2):
    """Full attention in float64, of values that ``case.dtype`` can have. The same on every rank."""
    generator = torch.Generator().manual_seed(1)

    def draw(heads, length, size):
        drawn = torch.randn(batch, heads, length, size, generator=generator, dtype=torch.float64)
        return drawn.to(case.dtype).double()

    keys = case.length if case.keys is None else case.keys
    inputs = [
        draw(case.heads, case.length, case.head_dim).requires_grad_(),
        draw(case.kv_heads, keys, case.head_dim).requires_grad_(),
        draw(case.kv_heads, keys, case.value_dim).requires_grad_(),
    ]
    output = scaled_dot_product_attention(
        *inputs, is_causal=case.is_causal, scale=case.scale, enable_gqa=True
    )
    output_grad = draw(case.heads, case.length, case.value_dim)
    grads = torch.autograd.grad(output, inputs, output_grad)
    return Whole(inputs, output.detach(), output_grad, list(grads))


def differences(attention, case, part, *, layout=torch.Tensor.contiguous):
    """How far this rank's output, and the gradients of its q, k and v, are from full attention's.

    Args:
        attention: Of this rank's q, k and v.
        case: The sizes.
        part: From a whole tensor to this rank's part of its sequence.
        layout: What is done to q, k, v and the incoming gradient; it leaves the values alone.
    """
    whole = whole_of(case)
    own = [layout(part(each.detach()).to(case.dtype)).requires_grad_() for each in whole.inputs]
    output = attention(*own)
    assert output.dtype == case.dtype
    output.backward(layout(part(whole.output_grad).to(case.dtype)))
    found = [output, *(each.grad for each in own)]
    expected = [part(each) for each in (whole.output, *whole.grads)]
    return [(a.double() - b).abs().max().item() for a, b in zip(found, expected, strict=True)]
