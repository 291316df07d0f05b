"""A vision transformer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ._transformer import FeedForward, Patches, SelfAttention, check_images, check_sizes


@dataclass(frozen=True, slots=True)
class ViTConfig:
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

    image_size: int = 8
    patch_size: int = 2
    channels: int = 1
    classes: int = 10
    dim: int = 64
    layers: int = 4
    heads: int = 4
    hidden: int = 0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not self.hidden:
            object.__setattr__(self, "hidden", 4 * self.dim)
        check_sizes(self)

    @property
    def patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2


class Block(nn.Module):
    """Norm before attention and before the feed-forward layer."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = SelfAttention(config.dim, config.heads)
        self.feed_forward_norm = nn.LayerNorm(config.dim)
        self.feed_forward = FeedForward(config.dim, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``[batch, tokens, dim]`` of as much."""
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

    config: ViTConfig
    patches: Patches
    class_token: nn.Parameter
    positions: nn.Parameter
    dropout: nn.Dropout
    layers: nn.ModuleList
    norm: nn.LayerNorm
    head: nn.Linear

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = Patches(config.channels, config.patch_size, config.dim)
        self.class_token = nn.Parameter(torch.empty(1, 1, config.dim))
        self.positions = nn.Parameter(torch.empty(1, 1 + config.patches, config.dim))
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.classes)
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
        check_images(images, self.config.channels, self.config.image_size)
        hidden = self.patches(images)
        first = self.class_token.expand(len(images), -1, -1)
        hidden = self.dropout(torch.cat([first, hidden], dim=1) + self.positions)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(self.norm(hidden[:, 0]))
        return logits
