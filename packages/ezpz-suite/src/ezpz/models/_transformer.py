"""What the vision and the diffusion transformer are both made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from ._errors import ModelError


class SelfAttention(nn.Module):
    """Attention of all tokens to all (Vaswani et al., arXiv:1706.03762, section 3.2)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``[batch, tokens, dim]`` of as much."""
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
        """Return ``[..., dim]`` of as much."""
        output: Tensor = self.down(gelu(self.up(hidden), approximate="tanh"))
        return output


class Patches(nn.Module):
    """Cuts images into square patches, and makes each a token."""

    projection: nn.Conv2d

    def __init__(self, channels: int, patch_size: int, dim: int) -> None:
        super().__init__()
        # A convolution whose stride is its size: one linear layer, applied to each patch.
        self.projection = nn.Conv2d(channels, dim, patch_size, patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``[batch, patches, dim]``, row by row, of ``[batch, channels, height, width]``."""
        return self.projection(images).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


def check_images(images: Tensor, channels: int, size: int) -> None:
    """Refuse images of another shape than ``[batch, channels, size, size]``."""
    if tuple(images.shape[1:]) != (channels, size, size) or images.dim() != 4:
        raise ModelError(
            f"images of shape {tuple(images.shape)}; expected (batch, {channels}, {size}, {size})"
        )


def check_sizes(config: object) -> None:
    """Refuse sizes that do not fit: of images and patches, of a model and its heads."""
    kind = type(config).__name__
    values: dict[str, int] = {
        name: getattr(config, name)
        for name in (
            "image_size", "patch_size", "channels", "classes", "dim", "layers", "heads", "hidden"
        )
    }  # fmt: skip
    for name, value in values.items():
        if value < 1:
            raise ModelError(f"{kind}({name}={value!r}); expected a whole number from 1")
    for large, small in (("image_size", "patch_size"), ("dim", "heads")):
        if values[large] % values[small]:
            raise ModelError(
                f"{kind}({large}={values[large]}, {small}={values[small]}); expected a {small} "
                f"that divides {large}"
            )


def waves(positions: Tensor, size: int, base: float = 10000.0) -> Tensor:
    """Return sinusoidal embeddings ``[positions, size]``, fp32 (arXiv:1706.03762, section 3.5)."""
    steps = torch.arange(size // 2, device=positions.device, dtype=torch.float32)
    angles = torch.outer(positions.float(), base ** (-steps / (size // 2)))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
