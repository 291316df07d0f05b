"""Ulysses: the whole sequence for some of the heads, in place of all heads for a part of it.

Jacobs et al., arXiv:2309.14509. One all-to-all before attention and one after it, whatever the
attention is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from ._current import context_group, get_state
from ._data import rank_order
from ._errors import DegreeError, ParallelError
from ._mappings import exchange_rows
from ._ranks import RankLayout
from ._ring import check_causal, checked, ring_attention
from ._state import ParallelState


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
        is_causal, scale, dropout_p: Passed on.
        balanced: Which part is whose, as in `shard_sequence`.
        attention: Called as ``attention(q, k, v, dropout_p=, is_causal=, scale=)``, and with
            ``enable_gqa=True`` where k and v have fewer heads than q. Returns
            ``[batch, heads/n, s, ...]``.

    Raises:
        DegreeError: The ranks do not divide the heads of q, or the key heads do not. Or
            ``is_causal`` has other numbers of queries than of keys, or ``balanced`` an odd one.
        ParallelError: Shapes, dtypes or devices of q, k and v do not fit, or ``attention``
            returned another shape.
    """
    ranks = context_group(group)
    q, k, v = checked("ulysses_attention", q, k, v)
    if is_causal:
        check_causal("ulysses_attention", q, k, balanced and ranks is not None)
    if ranks is not None:
        if balanced and (q.shape[2] % 2 or k.shape[2] % 2):
            raise DegreeError(
                f"ulysses_attention: this rank's part has {q.shape[2]} queries and {k.shape[2]} "
                "keys, and a balanced part is two chunks of one length; pad the sequence to a "
                "multiple of two chunks for each rank before shard_sequence, or shard and call "
                "with balanced=False"
            )
        k = _repeat_heads(q, k, ranks)
        v = _repeat_heads(q, v, ranks)
        q, k, v = _exchanged(True, balanced, ranks, q, k, v)
    grouped = {}
    if q.shape[1] != k.shape[1]:
        grouped = {"enable_gqa": True}
    output = attention(q, k, v, dropout_p=dropout_p, is_causal=is_causal, scale=scale, **grouped)
    if ranks is None:
        return output
    if output.shape[:3] != q.shape[:3]:
        raise ParallelError(
            f"ulysses_attention: {attention!r} returned {tuple(output.shape)} for queries of "
            f"shape {tuple(q.shape)}; expected [batch, heads, sequence, ...] of the same sizes"
        )
    return _exchanged(False, balanced, ranks, output)[0]


def _repeat_heads(q: Tensor, kv: Tensor, group: ProcessGroup) -> Tensor:
    """Repeat key heads until each rank's share of them is what its query heads need."""
    # A rank's query heads begin and end within the ``shared`` ones of a key head; pieces of the
    # greatest common length lie whole in both.
    heads = q.shape[1]
    ranks = group.size()
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
        ctx.to_heads = to_heads
        ctx.balanced = balanced
        ctx.group = group
        size = group.size()
        if balanced and not to_heads:
            tensors = tuple(rank_order(tensor, 2, size) for tensor in tensors)
        split = 2
        if to_heads:
            split = 1
        sent = [tensor.unflatten(split, (size, -1)).movedim(split, 0) for tensor in tensors]
        received = exchange_rows(torch.cat([parts.flatten(1) for parts in sent], 1), group)
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


# Two ways to share a sequence at once: by heads within some ranks, by a ring across them.
#
# Fang and Zhao, arXiv:2405.07719. The heads need not be as many as all ranks, and the ring's
# exchanges are fewer and go over the slower links.


def unified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ulysses_group: ProcessGroup,
    ring_group: ProcessGroup,
    is_causal: bool = False,
    balanced: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Return this rank's rows of the attention over a sequence shared by two groups of ranks.

    The ranks of ``ulysses_group`` together have one ring rank's part of the sequence, and go over
    it with some heads each, by `ring_attention`. This rank's own part is that of
    ``shard_sequence(tensor, dim, group=ring_group, ulysses_group=ulysses_group)``.

    The groups: `split_context` makes them of the context axis; or take two axes that there are,
    ``ulysses_group=get_tensor_parallel_group(), ring_group=get_context_parallel_group()`` for
    layers that are not tensor parallel. Any two do whose ranks form a grid: all members of a
    rank's Ulysses group are at one place of their rings.

    Collective: every rank of both groups calls this, with equal shapes and arguments; what the
    others pass cannot be checked here. So it is with backward.

    Args:
        q: ``[batch, heads, s/n, head_dim]``, with n the product of the groups' sizes.
        k: ``[batch, kv_heads, s/n, head_dim]``; ``kv_heads`` divides ``heads``.
        v: ``[batch, kv_heads, s/n, value_dim]``.
        ulysses_group: Those that share heads; best within a node.
        ring_group: Those that share the sequence within.
        is_causal: Whether a token sees those before it, and itself, only.
        balanced: As in `shard_sequence`.
        scale: Of the scores; ``head_dim ** -0.5`` if None.

    Raises:
        DegreeError: As `ulysses_attention` and `ring_attention`.
        ParallelError: Shapes, dtypes or devices of q, k and v do not fit; a group is not given, or
            is given twice.
    """
    given: tuple[ProcessGroup | None, ...] = ulysses_group, ring_group
    if None in given:  # which elsewhere stands for the context axis
        raise ParallelError(
            f"unified_attention: ulysses_group={ulysses_group!r}, ring_group={ring_group!r}; "
            "expected two process groups, as split_context returns them"
        )
    if ulysses_group is ring_group and ring_group.size() > 1:
        raise ParallelError(
            f"unified_attention: ulysses_group and ring_group are one group of {ring_group.size()} "
            "ranks; expected two that cross, as split_context returns them"
        )

    def ring(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        return ring_attention(
            q, k, v, group=ring_group, is_causal=is_causal, balanced=balanced, scale=scale
        )

    return ulysses_attention(q, k, v, group=ulysses_group, balanced=False, attention=ring)


def split_context(
    ulysses: int, *, state: ParallelState | None = None
) -> tuple[ProcessGroup, ProcessGroup]:
    """Return the two groups of `unified_attention` that make up the context axis.

    Neighbors along the axis are in one Ulysses group; every ``ulysses``-th is in one ring. They are
    made at the first call, and destroyed with the state.

    Collective at the first call: every rank of the world calls this, with the same argument.

    Args:
        ulysses: Ranks in a Ulysses group; the ring has the rest of the context degree.
        state: Whose context axis; the default's if None.

    Returns:
        The Ulysses group and the ring group of this rank.

    Raises:
        DegreeError: ``ulysses`` does not divide the context degree.
        NotInitializedError: There is no state, or no torch.distributed.
        ParallelError: The state has no layout to know the ranks by.
    """
    if state is None:
        state = get_state()
    key = f"split_context {ulysses}"
    known: tuple[ProcessGroup, ProcessGroup] | None = state.notes.get(key)
    if known is not None:
        return known
    degree = state.size("context")
    if ulysses < 1 or degree % ulysses:
        raise DegreeError(
            f"split_context: ulysses={ulysses} does not divide the context degree {degree}; "
            "expected one of its divisors"
        )
    if state.layout is None:
        raise ParallelError(
            "split_context: this state was made from groups without a layout; give "
            "unified_attention two groups of your own"
        )
    stride = state.layout.stride("context")
    heads = _strided(state, ulysses, stride)
    ring = _strided(state, degree // ulysses, stride * ulysses)
    state.notes[key] = heads, ring
    return heads, ring


def _strided(state: ParallelState, degree: int, stride: int) -> ProcessGroup:
    """The group of ranks that lie ``stride`` apart: the context axis of another layout."""
    whole = state.group("context")
    if degree == state.size("context"):
        return whole
    assert state.layout is not None
    layout = RankLayout(state.layout.world_size, tensor=stride, context=degree)
    backend = None
    if degree > 1:
        backend = dist.get_backend(whole)
    made = ParallelState.of_layout(layout, [("context",)], {}, backend=backend, timeout=None)
    state.attach(made)
    return made.group("context")
