"""Two ways to share a sequence at once: by heads within some ranks, by a ring across them.

Fang and Zhao, arXiv:2405.07719. The heads need not be as many as all ranks, and the ring's
exchanges are fewer and go over the slower links.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import has_torch_function_variadic

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._groups.default import get_state
from ezpz_tp._groups.ranks import RankLayout
from ezpz_tp._groups.state import ParallelState
from ezpz_tp._regions.watched import watched

from .ring import ring_attention
from .ulysses import ulysses_attention


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
    if has_torch_function_variadic(q, k, v):
        return watched(
            unified_attention,
            q,
            k,
            v,
            ulysses_group=ulysses_group,
            ring_group=ring_group,
            is_causal=is_causal,
            balanced=balanced,
            scale=scale,
        )

    _check_groups(ulysses_group, ring_group)

    def ring(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        return ring_attention(
            q, k, v, group=ring_group, is_causal=is_causal, balanced=balanced, scale=scale
        )

    return ulysses_attention(q, k, v, group=ulysses_group, balanced=False, attention=ring)


def _check_groups(ulysses: ProcessGroup | None, ring: ProcessGroup | None) -> None:
    if ulysses is None or ring is None:  # which elsewhere stands for the context axis
        raise ParallelError(
            f"unified_attention: ulysses_group={ulysses!r}, ring_group={ring!r}; expected two "
            "process groups, as split_context returns them"
        )
    if ulysses is ring and ulysses.size() > 1:
        raise ParallelError(
            f"unified_attention: ulysses_group and ring_group are one group of {ring.size()} "
            "ranks; expected two that cross, as split_context returns them"
        )


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
    state = get_state() if state is None else state
    key = f"split_context {ulysses}"
    if key not in state.notes:
        state.notes[key] = _split(ulysses, state)
    groups: tuple[ProcessGroup, ProcessGroup] = state.notes[key]
    return groups


def _split(ulysses: int, state: ParallelState) -> tuple[ProcessGroup, ProcessGroup]:
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
    return (
        _strided(state, ulysses, stride),
        _strided(state, degree // ulysses, stride * ulysses),
    )


def _strided(state: ParallelState, degree: int, stride: int) -> ProcessGroup:
    """The group of ranks that lie ``stride`` apart: the context axis of another layout."""
    whole = state.group("context")
    if degree == state.size("context"):
        return whole
    assert state.layout is not None
    layout = RankLayout(state.layout.world_size, tensor=stride, context=degree)
    backend = dist.get_backend(whole) if degree > 1 else None
    made = ParallelState.of_layout(layout, [("context",)], {}, backend=backend, timeout=None)
    state.attach(made)
    return made.group("context")
