"""Ring attention: each rank keeps its part of the sequence, and keys and values go round.

Liu et al., arXiv:2310.01889. Under a causal mask the parts are balanced as Megatron-LM and others
do: of 2n chunks, rank r holds r and 2n - 1 - r, and has as much to do as any other rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.overrides import has_torch_function_variadic

from ezpz_tp._errors import ParallelError
from ezpz_tp._groups.default import context_group
from ezpz_tp._regions.mappings import applied
from ezpz_tp._regions.watched import watched

from .block_attention import (
    Block,
    Gradients,
    accumulated,
    block_attention,
    block_attention_backward,
)
from .rotation import Moving, Pair, Round
from .shapes import check_causal, checked


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None = None,
    is_causal: bool = False,
    balanced: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Return this rank's rows of the attention over a sequence that the ranks share.

    What `scaled_dot_product_attention` gives for the whole sequence, of which no rank ever holds
    more than its own part and two others' keys and values, and no scores: memory is O(s/n).
    While a block is computed, the next keys and values are on their way (n - 1 exchanges
    forward, twice as many backward). Blocks that a causal mask hides are not computed. Parts are
    summed in float32, float64 in float64.

    With one rank, or before anything is initialized, it is `scaled_dot_product_attention`.
    torch.compile traces it whole; exchanges do not overlap then.

    Collective: every rank of the group calls this, with equal shapes and arguments; what the
    others pass cannot be checked here. So it is with backward.

    Args:
        q: ``[batch, heads, s/n, head_dim]``, this rank's part (`shard_sequence`).
        k: ``[batch, kv_heads, s/n, head_dim]``; ``kv_heads`` divides ``heads``.
        v: ``[batch, kv_heads, s/n, value_dim]``.
        group: The ranks that share the sequence; default: the context-parallel group.
        is_causal: Whether a token sees those before it, and itself, only.
        balanced: Which part is whose, as in `shard_sequence`. Without ``is_causal`` it makes no
            difference.
        scale: Of the scores; ``head_dim ** -0.5`` if None.

    Raises:
        DegreeError: ``is_causal`` with other numbers of queries than of keys, or ``balanced`` with
            an odd number; the key heads do not divide the query heads.
        ParallelError: Shapes, dtypes or devices of q, k and v do not fit. In backward: a second
            derivative is asked for.
    """
    if has_torch_function_variadic(q, k, v):
        return watched(
            ring_attention,
            q,
            k,
            v,
            group=group,
            is_causal=is_causal,
            balanced=balanced,
            scale=scale,
        )
    ranks = context_group(group)
    q, k, v = checked("ring_attention", q, k, v)
    if is_causal:
        check_causal("ring_attention", q, k, balanced and ranks is not None)
    if ranks is None or not q.numel() or not k.numel():
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    if scale is None:
        scale = q.shape[-1] ** -0.5
    return applied(_Ring, q, k, v, ranks, is_causal, balanced, scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: ProcessGroup,
        is_causal: bool,
        balanced: bool,
        scale: float,
    ) -> Tensor:
        ctx.group, ctx.plan = group, _Plan(group.rank(), is_causal, balanced, scale)
        out, lse = _forward(ctx.plan, group, _rows(q), k, v)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ParallelError(
                "ring_attention: a second derivative is asked for (create_graph=True), which the "
                "kernels do not have; ulysses_attention has it, with an attention that has"
            )
        # All three are computed, whichever is asked for: so every rank exchanges as often.
        q, k, v, out, lse = ctx.saved_tensors
        known = _rows(q), grad.contiguous(), out, lse
        dq, dk, dv = _backward(ctx.plan, ctx.group, known, k, v)
        needs = ctx.needs_input_grad
        return (
            dq.to(q.dtype) if needs[0] else None,
            dk.to(k.dtype) if needs[1] else None,
            dv.to(v.dtype) if needs[2] else None,
            *[None] * 4,
        )


def _forward(
    plan: _Plan, group: ProcessGroup, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    round_ = Round(k, v, group)
    for source in round_:
        seen = plan.seen(source, q.shape[2])
        if seen is None:
            continue
        part, part_lse = block_attention(plan.block(seen, q, round_.pair))
        if source == plan.rank:
            out, lse = part.to(accumulated(q.dtype)), part_lse
        else:
            _merge_(out[:, :, seen.queries], lse[:, :, seen.queries], part, part_lse)
        del part  # before the next one is made
    return out, lse


def _merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take the attention to other keys into a mean, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _backward(
    plan: _Plan, group: ProcessGroup, known: tuple[Tensor, ...], k: Tensor, v: Tensor
) -> Gradients:
    """Send keys and values round again, and behind them the gradients that they collect.

    The gradients of a rank's own keys set out with the first rank that adds to them, and end at
    the one they belong to, where its own share has stayed.

    Args:
        plan: What to compute.
        group: The ring.
        known: What this rank has of each query: itself, its output's gradient, its output, and
            the log-sum-exp of its scores.
        k: This rank's keys.
        v: This rank's values.
    """
    wide, length = accumulated(k.dtype), known[0].shape[2]
    returning: Moving | None = None
    round_ = Round(k, v, group)
    for source in round_:
        seen = plan.seen(source, length)
        share = None if seen is None else _share(plan, seen, known, round_.pair)
        if source == plan.rank:
            assert share is not None
            dq, dk, dv = (each.to(wide) for each in share)
            del share
            continue
        collected = Pair.zeros(k, v, wide) if returning is None else returning.arrived()
        if seen is not None and share is not None:
            dq[:, :, seen.queries] += share[0]
            collected.k[:, :, seen.keys] += share[1]
            collected.v[:, :, seen.keys] += share[2]
        returning = Moving(collected, group)
        del share, collected  # before the next ones are made
    assert returning is not None
    collected = returning.arrived()
    return dq, dk.add_(collected.k), dv.add_(collected.v)


def _share(plan: _Plan, seen: _Seen, known: tuple[Tensor, ...], pair: Pair) -> Gradients:
    q, *others = known
    rows = (each[:, :, seen.queries] for each in others)
    return block_attention_backward(plan.block(seen, q, pair), *rows)


class _Seen(NamedTuple):
    """Which of this rank's queries see which of some rank's keys, and whether causally."""

    queries: slice
    keys: slice
    causal: bool


_ALL = slice(None)


class _Plan(NamedTuple):
    """What one rank of a ring has to compute."""

    rank: int
    is_causal: bool
    balanced: bool
    scale: float

    def seen(self, source: int, length: int) -> _Seen | None:
        """Return what this rank's queries see of a rank's keys; None where all is hidden.

        A rank's own part is causal within itself, also where it is two chunks. Of two ranks'
        chunks, the lower rank's first comes before both of the other's, its last after both.
        """
        if not self.is_causal:
            return _Seen(_ALL, _ALL, False)
        if source == self.rank:
            return _Seen(_ALL, _ALL, True)
        if not self.balanced:
            return _Seen(_ALL, _ALL, False) if source < self.rank else None
        if source < self.rank:
            return _Seen(_ALL, slice(length // 2), False)
        return _Seen(slice(length // 2, None), _ALL, False)

    def block(self, seen: _Seen, q: Tensor, pair: Pair) -> Block:
        """Return it with its tensors."""
        return Block(q[:, :, seen.queries], *pair.tokens(seen.keys), seen.causal, self.scale)


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with its last dim contiguous, as kernels want it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
