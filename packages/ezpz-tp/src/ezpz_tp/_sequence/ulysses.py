"""Ulysses: the whole sequence for some of the heads, in place of all heads for a part of it.

Jacobs et al., arXiv:2309.14509. One all-to-all before attention and one after it, whatever the
attention is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import has_torch_function_variadic

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._groups.default import context_group
from ezpz_tp._regions.collectives import all_to_all
from ezpz_tp._regions.watched import watched

from .balance import rank_order
from .shapes import check_causal, checked


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None = None,
    is_causal: bool = False,
    balanced: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    attention: Callable[..., Tensor] = scaled_dot_product_attention,
) -> Tensor:
    """Return this rank's rows of any attention over a sequence that the ranks share.

    Inside, each rank has ``1/n`` of the heads and the whole sequence in its own order. Queries,
    keys and values go there in one all-to-all, the output comes back in another; backward does
    the same. Memory is O(s) for activations of ``heads / n``, as much as the part had; what
    ``attention`` itself holds comes on top. Key heads that are fewer than ranks, or do not divide
    into them, are sent to each rank that needs them.

    With one rank, or before anything is initialized, it is ``attention``.

    Dropout takes torch's generator: where its state is the same on all ranks, their heads drop the
    same; call it within ``get_rng_tracker().fork()``.

    Collective: every rank of the group calls this, with equal shapes and arguments; what the
    others pass cannot be checked here. So it is with backward.

    Args:
        q: ``[batch, heads, s/n, head_dim]``, this rank's part (`shard_sequence`).
        k: ``[batch, kv_heads, s/n, head_dim]``; ``kv_heads`` divides ``heads``.
        v: ``[batch, kv_heads, s/n, value_dim]``.
        group: The ranks that share the sequence; default: the context-parallel group.
        is_causal: Passed on.
        balanced: Which part is whose, as in `shard_sequence`.
        scale: Passed on.
        dropout_p: Passed on.
        attention: Called as ``attention(q, k, v, dropout_p=, is_causal=, scale=)``, and with
            ``enable_gqa=True`` where k and v have fewer heads than q. Returns
            ``[batch, heads/n, s, ...]``.

    Raises:
        DegreeError: The ranks do not divide the heads of q, or the key heads do not; ``is_causal``
            with other numbers of queries than of keys; ``balanced`` with an odd number of either.
        ParallelError: Shapes, dtypes or devices of q, k and v do not fit, or ``attention``
            returned another shape.
    """
    if has_torch_function_variadic(q, k, v):
        return watched(
            ulysses_attention,
            q,
            k,
            v,
            group=group,
            is_causal=is_causal,
            balanced=balanced,
            scale=scale,
            dropout_p=dropout_p,
            attention=attention,
        )
    ranks = context_group(group)
    q, k, v = checked("ulysses_attention", q, k, v)
    if is_causal:
        check_causal("ulysses_attention", q, k, balanced and ranks is not None)
    if ranks is not None:
        _check_halves(q, k, balanced)
        k, v = _enough_heads(q, k, ranks), _enough_heads(q, v, ranks)
        q, k, v = _exchanged(True, balanced, ranks, q, k, v)
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    output = attention(q, k, v, dropout_p=dropout_p, is_causal=is_causal, scale=scale, **grouped)
    if ranks is None:
        return output
    if output.shape[:3] != q.shape[:3]:
        raise ParallelError(
            f"ulysses_attention: {attention!r} returned {tuple(output.shape)} for queries of "
            f"shape {tuple(q.shape)}; expected [batch, heads, sequence, ...] of the same sizes"
        )
    return _exchanged(False, balanced, ranks, output)[0]


def _check_halves(q: Tensor, k: Tensor, balanced: bool) -> None:
    if balanced and (q.shape[2] % 2 or k.shape[2] % 2):
        raise DegreeError(
            f"ulysses_attention: this rank's part has {q.shape[2]} queries and {k.shape[2]} keys, "
            "and a balanced part is two chunks of one length; pad the sequence to a multiple of "
            "two chunks for each rank before shard_sequence, or shard and call with balanced=False"
        )


def _enough_heads(q: Tensor, kv: Tensor, group: ProcessGroup) -> Tensor:
    """Repeat key heads until each rank's share of them is what its query heads need.

    A rank's query heads begin and end within the ``shared`` ones of a key head; pieces of the
    greatest common length lie whole in both.
    """
    heads, ranks = q.shape[1], group.size()
    if heads % ranks:
        raise DegreeError(
            f"ulysses_attention: {heads} heads of q do not divide among {ranks} ranks; expected "
            "a multiple. With fewer heads than ranks, use unified_attention or ring_attention"
        )
    shared = heads // kv.shape[1]
    times = shared // math.gcd(shared, heads // ranks)
    if times == 1:
        return kv
    # Summed in float32 by backward, as a sum of one tensor.
    return kv.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


def _exchanged(
    to_heads: bool, balanced: bool, group: ProcessGroup, *tensors: Tensor
) -> tuple[Tensor, ...]:
    apply: Any = _Exchange.apply
    exchanged: tuple[Tensor, ...] = apply(to_heads, balanced, group, *tensors)
    return exchanged


class _Exchange(torch.autograd.Function):
    """``[b, h, s/n, d]`` to ``[b, h/n, s, d]``, or back, for several tensors in one all-to-all."""

    @staticmethod
    def forward(
        ctx: Any, to_heads: bool, balanced: bool, group: ProcessGroup, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.to_heads, ctx.balanced, ctx.group = to_heads, balanced, group
        size = group.size()
        if balanced and not to_heads:
            tensors = tuple(rank_order(tensor, 2, size) for tensor in tensors)
        split = 1 if to_heads else 2
        sent = [tensor.unflatten(split, (size, -1)).movedim(split, 0) for tensor in tensors]
        received = all_to_all(torch.cat([parts.flatten(1) for parts in sent], 1), group)
        outputs = []
        for parts, rows in zip(
            sent, received.split([parts[0].numel() for parts in sent], 1), strict=True
        ):
            pieces = rows.reshape(parts.shape).unbind()
            if balanced and to_heads:
                halves = [piece.chunk(2, 2) for piece in pieces]
                pieces = (*(first for first, _ in halves), *(last for _, last in halves[::-1]))
            outputs.append(torch.cat(pieces, 2 if to_heads else 1))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_exchanged(not ctx.to_heads, ctx.balanced, ctx.group, *grads)
