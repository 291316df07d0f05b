"""Attention over a sequence that this rank has whole, or shares with others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

import ezpz_tp
from ezpz.models._errors import ModelError

from .layers import Build
from .rotary import Rotation, rotate

KINDS = ("ring", "ulysses", "unified")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal: queries ``[batch, heads, s, d]``, keys and values ``[batch, kv_heads, s, d]``."""


class SequenceShare:
    """Which part of each sequence this rank has, and how it attends to the whole.

    Args:
        kind: ``ring``, ``ulysses``, ``unified``; None: whole sequences.
        ulysses: Of ``unified``: ranks that share heads.

    Raises:
        ModelError: ``kind`` is unknown, or ``ulysses`` is missing or given in vain.
    """

    def __init__(self, kind: str | None, ulysses: int | None) -> None:
        if kind is not None and kind not in KINDS:
            raise ModelError(f"context_parallel={kind!r}; expected one of {', '.join(KINDS)}")
        if (kind == "unified") is (ulysses is None):
            raise ModelError(
                f"context_parallel={kind!r}, ulysses={ulysses}; expected ulysses= (ranks that "
                "share heads) with 'unified', and only there"
            )
        self.kind, self.degree = kind, 1
        self._group: ProcessGroup | None = None
        self._ulysses: ProcessGroup | None = None
        if kind is not None:
            self.degree = ezpz_tp.get_context_parallel_world_size()
        if ulysses is not None and kind is not None:
            self._ulysses, self._group = ezpz_tp.split_context(ulysses)

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of what has the whole sequence as a dim."""
        if self.kind is None:
            return tensor
        return ezpz_tp.shard_sequence(tensor, dim, group=self._group, ulysses_group=self._ulysses)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return where this rank's tokens lie in a sequence of ``length``."""
        if self.kind is None:
            return torch.arange(length, device=device)
        return ezpz_tp.sequence_positions(
            length, group=self._group, ulysses_group=self._ulysses, device=device
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return this rank's rows of causal attention; see `Attend`."""
        if self.kind == "ring":
            return ezpz_tp.ring_attention(q, k, v, is_causal=True)
        if self.kind == "ulysses":
            return ezpz_tp.ulysses_attention(q, k, v, is_causal=True)
        if self._ulysses is not None and self._group is not None:
            return ezpz_tp.unified_attention(
                q, k, v, ulysses_group=self._ulysses, ring_group=self._group, is_causal=True
            )
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def __deepcopy__(self, memo: dict[int, object]) -> SequenceShare:
        # The copy is of the same groups, which cannot be copied.
        return self


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) with rotary positions."""

    def __init__(self, build: Build, share: SequenceShare, layer: int) -> None:
        super().__init__()
        config = build.config
        self._build, self._share, self._head_dim = build, share, config.head_dim
        self.q_proj = build.column(config.heads * config.head_dim, 16 * layer + 1)
        self.k_proj = build.column(config.kv_heads * config.head_dim, 16 * layer + 2)
        self.v_proj = build.column(config.kv_heads * config.head_dim, 16 * layer + 3)
        self.o_proj = build.row(config.heads * config.head_dim, 16 * layer + 4)

    def forward(self, hidden: Tensor, by: Rotation) -> Tensor:
        """Return what attention adds to ``hidden``, of its shape."""
        hidden = self._build.enter(hidden)
        # [b, s, heads * d], sequence parallel [s, b, heads * d], to [b, heads, s, d]
        order = (1, 2, 0, 3) if self._build.sequence_parallel else (0, 2, 1, 3)
        q, k, v = (
            projection(hidden).unflatten(-1, (-1, self._head_dim)).permute(order)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = self._share.attend(rotate(q, by), rotate(k, by), v)
        back = (2, 0, 1, 3) if self._build.sequence_parallel else (0, 2, 1, 3)
        added: Tensor = self.o_proj(mixed.permute(back).flatten(-2))
        return added
