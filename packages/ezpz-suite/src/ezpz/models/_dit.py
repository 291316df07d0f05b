"""A diffusion transformer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ._errors import ModelError
from ._transformer import FeedForward, Patches, SelfAttention, check_sizes, checked_images, waves

_TIME = 256
"""Size of the sinusoidal embedding of the time."""


@dataclass(frozen=True, slots=True)
class DiTConfig:
    """Sizes of a `DiT`; the defaults are made for the digits.

    Attributes:
        image_size: Height and width of an image; ``patch_size`` divides it.
        patch_size: Height and width of a patch.
        channels: Of an image.
        classes: Labels there are; label ``classes`` means none.
        dim: Width of a token; ``heads`` and 4 divide it.
        layers: Number of blocks.
        heads: Of attention.
        hidden: Width of the feed-forward layers; if 0 four times ``dim``.
        label_dropout: Share of labels that training takes for none, for guidance without a
            classifier (Ho and Salimans, arXiv:2207.12598).

    Raises:
        ModelError: Sizes do not fit.
    """

    image_size: int = 8
    patch_size: int = 2
    channels: int = 1
    classes: int = 10
    dim: int = 64
    layers: int = 4
    heads: int = 4
    hidden: int = 0
    label_dropout: float = 0.1

    def __post_init__(self) -> None:
        if not self.hidden:
            object.__setattr__(self, "hidden", 4 * self.dim)
        check_sizes(self)
        if self.dim % 4:
            raise ModelError(f"DiTConfig(dim={self.dim}); expected a multiple of 4, for positions")


class ZeroLinear(nn.Linear):
    """A linear layer that starts as zero: what it steers is the identity at first."""

    def reset_parameters(self) -> None:
        """Fill weight and bias with zeros."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Block(nn.Module):
    """Attention and a feed-forward layer, shifted, scaled and gated by the condition."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = SelfAttention(config.dim, config.heads)
        self.feed_forward_norm = _norm(config)
        self.feed_forward = FeedForward(config.dim, config.hidden)
        self.modulation = ZeroLinear(config.dim, 6 * config.dim)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        """Return ``[batch, tokens, dim]`` of as much; the condition is ``[batch, dim]``."""
        steer = self.modulation(silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        inner = _modulated(self.attention_norm(hidden), steer[0], steer[1])
        hidden = hidden + steer[2] * self.attention(inner)
        inner = _modulated(self.feed_forward_norm(hidden), steer[3], steer[4])
        return hidden + steer[5] * self.feed_forward(inner)  # type: ignore[no-any-return]


class DiT(nn.Module):
    """DiT with adaLN-Zero blocks (Peebles and Xie, arXiv:2212.09748), on pixels.

    It predicts the noise and no variances. Each block, and the output, starts as zero, so that at
    first it predicts none. `NoiseSchedule` has its loss and its sampler.

    >>> model = DiT(DiTConfig())
    >>> images, times, labels = torch.zeros(5, 1, 8, 8), torch.zeros(5).long(), torch.arange(5)
    >>> model(images, times, labels).shape
    torch.Size([5, 1, 8, 8])

    Args:
        config: Sizes.

    Attributes:
        config: Sizes.
        layers: The blocks: what FSDP2 wraps.
    """

    config: DiTConfig
    patches: Patches
    positions: Tensor
    time: nn.Sequential
    labels: nn.Embedding
    layers: nn.ModuleList
    norm: nn.LayerNorm
    modulation: ZeroLinear
    head: ZeroLinear

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        side = config.image_size // config.patch_size
        self.patches = Patches(config.channels, config.patch_size, config.dim)
        self.register_buffer("positions", torch.empty(side**2, config.dim), persistent=False)
        self.time = nn.Sequential(
            nn.Linear(_TIME, config.dim), nn.SiLU(), nn.Linear(config.dim, config.dim)
        )
        self.labels = nn.Embedding(config.classes + 1, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.modulation = ZeroLinear(config.dim, 2 * config.dim)
        self.head = ZeroLinear(config.dim, config.patch_size**2 * config.channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill what this module holds itself, the positions; its children fill their own."""
        side, half = self.config.image_size // self.config.patch_size, self.config.dim // 2
        along = waves(torch.arange(side, device=self.positions.device), half)
        rows, columns = along.repeat_interleave(side, 0), along.repeat(side, 1)
        with torch.no_grad():
            self.positions.copy_(torch.cat([rows, columns], dim=-1))

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return the noise that is predicted to be in images.

        Args:
            images: ``[batch, channels, size, size]``, in -1..1 and noise on it.
            times: ``[batch]``, int64: steps of the schedule.
            labels: ``[batch]``, int64; ``classes`` means none.

        Returns:
            As ``images``.

        Raises:
            ModelError: The images have another shape.
        """
        config = self.config
        checked_images(images, config.channels, config.image_size)
        if self.training and config.label_dropout:
            dropped = torch.rand(labels.shape, device=labels.device) < config.label_dropout
            labels = labels.masked_fill(dropped, config.classes)
        hidden = self.patches(images)
        hidden = hidden + self.positions.to(hidden.dtype)
        condition = self.time(waves(times, _TIME).to(hidden.dtype)) + self.labels(labels)
        for layer in self.layers:
            hidden = layer(hidden, condition)
        shift, scale = self.modulation(silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        pixels = self.head(_modulated(self.norm(hidden), shift, scale))
        side, patch = config.image_size // config.patch_size, config.patch_size
        # [b, rows * columns, patch * patch * c] to [b, c, rows, patch, columns, patch]
        pixels = pixels.unflatten(1, (side, side)).unflatten(-1, (patch, patch, config.channels))
        return pixels.permute(0, 5, 1, 3, 2, 4).reshape(images.shape)  # type: ignore[no-any-return]


def _norm(config: DiTConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.dim, elementwise_affine=False, eps=1e-6)


def _modulated(hidden: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return hidden * (1 + scale) + shift
