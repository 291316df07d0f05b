"""Models of images: a perceptron, a vision transformer, a diffusion transformer and its noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss, scaled_dot_product_attention, silu

from ._errors import ModelError


class MLP(nn.Module):
    """Linear layers with ReLU between them (Rumelhart et al., Nature 323, 1986).

    >>> import torch
    >>> MLP((64, 32, 10))(torch.zeros(5, 8, 8)).shape
    torch.Size([5, 10])

    Args:
        widths: Of the input, of each hidden layer, and of the output.

    Attributes:
        layers: The linear layers.

    Raises:
        ModelError: There are fewer than two widths, or one is below 1.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        if len(widths) < 2 or min(widths) < 1:
            raise ModelError(
                f"MLP({tuple(widths)}); expected at least two widths from 1, those of input and "
                "output"
            )
        self.layers: nn.ModuleList = nn.ModuleList(nn.Linear(*both) for both in pairwise(widths))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``[batch, last width]`` of ``[batch, ...]``, which is flattened."""
        hidden = inputs.flatten(1)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden if number == 0 else hidden.relu())
        return hidden


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What both transformers' configurations have."""

    image_size: int = 8
    patch_size: int = 2
    channels: int = 1
    classes: int = 10
    dim: int = 64
    layers: int = 4
    heads: int = 4
    hidden: int = 0

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if not self.hidden:
            object.__setattr__(self, "hidden", 4 * self.dim)
        for field in fields(_Sizes):
            if (value := getattr(self, field.name)) < 1:
                raise ModelError(f"{kind}({field.name}={value!r}); expected a whole number from 1")
        for large, small in (("image_size", "patch_size"), ("dim", "heads")):
            whole, part = getattr(self, large), getattr(self, small)
            if whole % part:
                raise ModelError(
                    f"{kind}({large}={whole}, {small}={part}); expected a {small} that divides "
                    f"{large}"
                )


class SelfAttention(nn.Module):
    """Attention of all tokens to all (Vaswani et al., arXiv:1706.03762, section 3.2)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        # [batch, tokens, 3 * dim] to 3 of [batch, heads, tokens, head_dim]
        q, k, v = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed: Tensor = self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return mixed


class FeedForward(nn.Module):
    """Two layers with GELU between them (Hendrycks and Gimpel, arXiv:1606.08415)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down(gelu(self.up(hidden), approximate="tanh"))
        return output


class Patches(nn.Module):
    """Cuts images into square patches, and makes each a token."""

    def __init__(self, channels: int, patch_size: int, dim: int) -> None:
        super().__init__()
        # A convolution whose stride is its size: one linear layer, applied to each patch.
        self.projection: nn.Conv2d = nn.Conv2d(channels, dim, patch_size, patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``[batch, patches, dim]``, row by row, of ``[batch, channels, height, width]``."""
        return self.projection(images).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


def _check_images(images: Tensor, channels: int, size: int) -> None:
    if tuple(images.shape[1:]) != (channels, size, size) or images.dim() != 4:
        raise ModelError(
            f"images of shape {tuple(images.shape)}; expected (batch, {channels}, {size}, {size})"
        )


@dataclass(frozen=True, slots=True)
class ViTConfig(_Sizes):
    """Sizes of a `VisionTransformer`; the defaults are made for the digits.

    Attributes:
        image_size: Height and width of an image; ``patch_size`` divides it.
        patch_size: Height and width of a patch.
        channels: Of an image.
        classes: Logits there are.
        dim: Width of a token; ``heads`` divides it.
        layers: Number of blocks.
        heads: Of attention.
        hidden: Width of the feed-forward layers; if 0 four times ``dim``.
        dropout: Share of a block's outputs that is dropped in training.

    Raises:
        ModelError: Sizes do not fit.
    """

    dropout: float = 0.0

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2


class VisionBlock(nn.Module):
    """Norm before attention and before the feed-forward layer."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = SelfAttention(config.dim, config.heads)
        self.feed_forward_norm = nn.LayerNorm(config.dim)
        self.feed_forward = FeedForward(config.dim, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """ViT (Dosovitskiy et al., arXiv:2010.11929), with a class token and learned positions.

    Linear layers start as torch's do. On the meta device it can be built too: each module fills
    its own parameters by ``reset_parameters``.

    >>> model = VisionTransformer(ViTConfig())
    >>> model(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])

    Args:
        config: Sizes.

    Attributes:
        config: Sizes.
        layers: The blocks: what FSDP2 wraps and a pipeline splits.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config: ViTConfig = config
        self.patches: Patches = Patches(config.channels, config.patch_size, config.dim)
        self.class_token: nn.Parameter = nn.Parameter(torch.empty(1, 1, config.dim))
        self.positions: nn.Parameter = nn.Parameter(torch.empty(1, 1 + config.patches, config.dim))
        self.dropout: nn.Dropout = nn.Dropout(config.dropout)
        blocks = (VisionBlock(config) for _ in range(config.layers))
        self.layers: nn.ModuleList = nn.ModuleList(blocks)
        self.norm: nn.LayerNorm = nn.LayerNorm(config.dim)
        self.head: nn.Linear = nn.Linear(config.dim, config.classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill what this module holds itself; its children fill their own."""
        nn.init.trunc_normal_(self.class_token, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[batch, classes]`` of images ``[batch, channels, size, size]``.

        Raises:
            ModelError: The images have another shape.
        """
        _check_images(images, self.config.channels, self.config.image_size)
        hidden = self.patches(images)
        first = self.class_token.expand(len(images), -1, -1)
        hidden = self.dropout(torch.cat([first, hidden], dim=1) + self.positions)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(self.norm(hidden[:, 0]))
        return logits


@dataclass(frozen=True, slots=True)
class DiTConfig(_Sizes):
    """Sizes of a `DiT`, those of `ViTConfig` but for these; the defaults are made for the digits.

    Attributes:
        classes: Labels there are; label ``classes`` means none.
        dim: Width of a token; ``heads`` and 4 divide it.
        label_dropout: Share of labels that training takes for none, for guidance without a
            classifier (Ho and Salimans, arXiv:2207.12598).

    Raises:
        ModelError: Sizes do not fit.
    """

    label_dropout: float = 0.1

    def __post_init__(self) -> None:
        _Sizes.__post_init__(self)
        if self.dim % 4:
            raise ModelError(f"DiTConfig(dim={self.dim}); expected a multiple of 4, for positions")


def _waves(positions: Tensor, size: int, base: float = 10000.0) -> Tensor:
    """Return sinusoidal embeddings ``[positions, size]``, fp32 (arXiv:1706.03762, section 3.5)."""
    steps = torch.arange(size // 2, device=positions.device, dtype=torch.float32)
    angles = torch.outer(positions.float(), base ** (-steps / (size // 2)))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class ZeroLinear(nn.Linear):
    """A linear layer that starts as zero: what it steers is the identity at first."""

    def reset_parameters(self) -> None:
        """Fill weight and bias with zeros."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class DiffusionBlock(nn.Module):
    """Attention and a feed-forward layer, shifted, scaled and gated by the condition."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = SelfAttention(config.dim, config.heads)
        self.feed_forward_norm = _norm(config)
        self.feed_forward = FeedForward(config.dim, config.hidden)
        self.modulation = ZeroLinear(config.dim, 6 * config.dim)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        steer = self.modulation(silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        inner = _modulated(self.attention_norm(hidden), steer[0], steer[1])
        hidden = hidden + steer[2] * self.attention(inner)
        inner = _modulated(self.feed_forward_norm(hidden), steer[3], steer[4])
        return hidden + steer[5] * self.feed_forward(inner)  # type: ignore[no-any-return]


_TIME = 256  # size of the sinusoidal embedding of the time


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

    positions: Tensor

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config: DiTConfig = config
        side = config.image_size // config.patch_size
        self.patches: Patches = Patches(config.channels, config.patch_size, config.dim)
        self.register_buffer("positions", torch.empty(side**2, config.dim), persistent=False)
        self.time: nn.Sequential = nn.Sequential(
            nn.Linear(_TIME, config.dim), nn.SiLU(), nn.Linear(config.dim, config.dim)
        )
        self.labels: nn.Embedding = nn.Embedding(config.classes + 1, config.dim)
        blocks = (DiffusionBlock(config) for _ in range(config.layers))
        self.layers: nn.ModuleList = nn.ModuleList(blocks)
        self.norm: nn.LayerNorm = _norm(config)
        self.modulation: ZeroLinear = ZeroLinear(config.dim, 2 * config.dim)
        self.head: ZeroLinear = ZeroLinear(config.dim, config.patch_size**2 * config.channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill what this module holds itself, the positions; its children fill their own."""
        side, half = self.config.image_size // self.config.patch_size, self.config.dim // 2
        along = _waves(torch.arange(side, device=self.positions.device), half)
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
        _check_images(images, config.channels, config.image_size)
        if self.training and config.label_dropout:
            dropped = torch.rand(labels.shape, device=labels.device) < config.label_dropout
            labels = labels.masked_fill(dropped, config.classes)
        hidden = self.patches(images)
        hidden = hidden + self.positions.to(hidden.dtype)
        condition = self.time(_waves(times, _TIME).to(hidden.dtype)) + self.labels(labels)
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

    def __init__(self, steps: int = 1000) -> None:
        if steps < 2:
            raise ModelError(f"NoiseSchedule({steps}); expected at least 2 steps")
        self.steps: int = steps
        at = torch.arange(steps + 1, dtype=torch.float64) / steps
        kept = ((at + 0.008) / 1.008 * math.pi / 2).cos().square()
        betas = (1 - kept[1:] / kept[:-1]).clamp(max=0.999)
        self.signal: Tensor = (1 - betas).cumprod(0).float()

    def add_noise(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return images after so many steps (equation 4 of arXiv:2006.11239).

        Args:
            images: ``[batch, ...]``, in -1..1.
            noise: As ``images``, of variance 1.
            times: ``[batch]``, int64, 0 to ``steps - 1``.
        """
        kept = self.signal.to(images.device)[times].to(images.dtype)
        kept = kept.view(-1, *[1] * (images.dim() - 1))
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
        shares = self.signal[order].tolist()
        for time, kept, after in zip(order, shares, [*shares[1:], 1.0], strict=True):
            times = torch.full_like(labels, time)
            noise = model(images, times, labels).float()
            if no_label is not None and guidance != 1.0:
                without = model(images, times, torch.full_like(labels, no_label)).float()
                noise = without + guidance * (noise - without)
            clean = ((images - math.sqrt(1 - kept) * noise) / math.sqrt(kept)).clamp(-1, 1)
            # The noise that fits the clamped image.
            noise = (images - math.sqrt(kept) * clean) / math.sqrt(1 - kept)
            images = math.sqrt(after) * clean + math.sqrt(1 - after) * noise
        return images
