"""A block of a Llama: attention, then a gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu

from .attention import Attention, SequenceShare
from .layers import Build
from .rotary import Rotation


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202)."""

    def __init__(self, build: Build, layer: int) -> None:
        super().__init__()
        self._build = build
        self.gate_proj = build.column(build.config.hidden, 16 * layer + 5)
        self.up_proj = build.column(build.config.hidden, 16 * layer + 6)
        self.down_proj = build.row(build.config.hidden, 16 * layer + 7)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what the layer adds to ``hidden``, of its shape."""
        hidden = self._build.enter(hidden)
        added: Tensor = self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return added


class Block(nn.Module):
    """One of a Llama's layers; its modules are named as transformers names them."""

    def __init__(self, build: Build, share: SequenceShare, layer: int) -> None:
        super().__init__()
        self.input_layernorm = build.norm()
        self.self_attn = Attention(build, share, layer)
        self.post_attention_layernorm = build.norm()
        self.mlp = FeedForward(build, layer)

    def forward(self, hidden: Tensor, by: Rotation) -> Tensor:
        """Return the residual stream after this layer.

        Args:
            hidden: ``[batch, s, dim]``; sequence parallel ``[s / tp, batch, dim]``.
            by: Of this rank's tokens.
        """
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), by)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]
