"""A diffusion transformer, and how noise comes into images and out of them again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, silu

from ._errors import ModelError
from ._transformer import FeedForward, Patches, SelfAttention, check_images, check_sizes, waves

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
        check_images(images, config.channels, config.image_size)
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


Denoiser = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Noisy images, times, labels; returns the noise: a `DiT`, wrapped or not."""

_OFFSET, _MOST = 0.008, 0.999


class NoiseSchedule:
    """Denoising diffusion (Ho et al., arXiv:2006.11239), with a cosine schedule.

    The schedule is that of Nichol and Dhariwal (arXiv:2102.09672, equation 17), the sampler DDIM
    (Song et al., arXiv:2010.02502, equation 12), without noise of its own.

    >>> schedule = NoiseSchedule(100)
    >>> bool(schedule.signal[0] > 0.99), bool(schedule.signal[-1] < 0.01)
    (True, True)

    Args:
        steps: From an image to noise.

    Attributes:
        steps: As given.
        signal: What share of the variance is the image's after each step, ``[steps]``, fp32.

    Raises:
        ModelError: There are fewer than 2 steps.
    """

    steps: int
    signal: Tensor

    def __init__(self, steps: int = 1000) -> None:
        if steps < 2:
            raise ModelError(f"NoiseSchedule({steps}); expected at least 2 steps")
        self.steps = steps
        at = torch.arange(steps + 1, dtype=torch.float64) / steps
        kept = ((at + _OFFSET) / (1 + _OFFSET) * math.pi / 2).cos().square()
        betas = (1 - kept[1:] / kept[:-1]).clamp(max=_MOST)
        self.signal = (1 - betas).cumprod(0).float()

    def add_noise(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return images after so many steps (equation 4 of arXiv:2006.11239).

        Args:
            images: ``[batch, ...]``, in -1..1.
            noise: As ``images``, of variance 1.
            times: ``[batch]``, int64, 0 to ``steps - 1``.
        """
        kept = self._at(times, images)
        return kept.sqrt() * images + (1 - kept).sqrt() * noise

    def loss(
        self,
        model: Denoiser,
        images: Tensor,
        labels: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the mean squared error of the noise that a model predicts, a scalar.

        Args:
            model: Called once: ``model(noisy, times, labels)``.
            images: ``[batch, ...]``, in -1..1.
            labels: ``[batch]``, int64.
            generator: Of times and noise, on the images' device; torch's own if None.
        """
        where = images.device
        times = torch.randint(self.steps, (len(images),), device=where, generator=generator)
        noise = torch.randn(images.shape, dtype=images.dtype, device=where, generator=generator)
        return mse_loss(model(self.add_noise(images, noise, times), times, labels), noise)

    @torch.no_grad()
    def sample(
        self,
        model: Denoiser,
        labels: Tensor,
        shape: tuple[int, ...],
        *,
        steps: int = 50,
        guidance: float = 1.0,
        no_label: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return an image for each label, made out of noise.

        Put the model into ``eval()`` before. Collective where the model is sharded over ranks:
        every rank calls this.

        Args:
            model: Called ``steps`` times (twice as often with guidance).
            labels: ``[batch]``, int64.
            shape: Of an image, as ``(1, 8, 8)``.
            steps: Of the sampler, 1 to the schedule's.
            guidance: 1: as the label says; above: more than it says (arXiv:2207.12598).
            no_label: The label that means none, with guidance: ``config.classes`` of a `DiT`.
            generator: Of the first noise, on the labels' device; torch's own if None.

        Returns:
            ``[batch, *shape]``, fp32, in -1..1.

        Raises:
            ModelError: ``steps`` are too many, or there is guidance and no ``no_label``.
        """
        if not 1 <= steps <= self.steps:
            raise ModelError(f"sample(steps={steps}); expected 1 to {self.steps}")
        if guidance != 1.0 and no_label is None:
            raise ModelError(f"guidance={guidance} without no_label; expected a DiT's classes")
        size = (len(labels), *shape)
        images = torch.randn(size, device=labels.device, generator=generator)
        order = torch.linspace(self.steps - 1, 0, steps).round().long().tolist()
        for place, time in enumerate(order):
            times = torch.full_like(labels, time)
            noise = model(images, times, labels).float()
            if no_label is not None and guidance != 1.0:
                without = model(images, times, torch.full_like(labels, no_label)).float()
                noise = without + guidance * (noise - without)
            kept = self.signal[time].item()
            clean = ((images - math.sqrt(1 - kept) * noise) / math.sqrt(kept)).clamp(-1, 1)
            if place + 1 == len(order):
                return clean
            # The noise that fits the clamped image.
            noise = (images - math.sqrt(kept) * clean) / math.sqrt(1 - kept)
            after = self.signal[order[place + 1]].item()
            images = math.sqrt(after) * clean + math.sqrt(1 - after) * noise
        return images

    def _at(self, times: Tensor, like: Tensor) -> Tensor:
        kept = self.signal.to(like.device)[times].to(like.dtype)
        return kept.view(-1, *[1] * (like.dim() - 1))
