"""The network of ezpz.models' Llama in plain PyTorch, as one writes it by hand: what it is beside.

Its parameters have the same names, so that both can be given the same weights. Rotary angles are
worked out once a step and turned by in fp32, as there.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from ezpz.models import LlamaConfig


class Attention(nn.Module):
    """Causal attention with rotary positions, as many key as query heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.width = dim // heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Take and return ``[batch, sequence, dim]``."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of a head's channels by its position's angle."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class FeedForward(nn.Module):
    """A gated MLP."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return ``[batch, sequence, dim]``."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a gated MLP, each after an RMSNorm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config.dim, config.heads)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = FeedForward(config.dim, config.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Take and return ``[batch, sequence, dim]``."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class RawLlama(nn.Module):
    """The whole network; of as many key as query heads, with a head of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.width, self.theta = config.dim // config.heads, config.rope_theta
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss."""
        x, device = self.embed_tokens(tokens), tokens.device
        steps = torch.arange(0, self.width, 2, device=device, dtype=torch.float32) / self.width
        angles = torch.outer(torch.arange(tokens.shape[1], device=device), self.theta**-steps)
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos(), angles.sin()
        for block in self.layers:
            x = block(x, cos, sin)
        logits = self.lm_head(self.norm(x))
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
