"""Rotary position embeddings (Su et al., arXiv:2104.09864), in Hugging Face's order of features.

Feature i of a head turns with feature i + head_dim / 2. (Meta's own files pair neighbors; their
weights are permuted when they are converted.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import LlamaConfig, RopeScaling


class Rotation:
    """By what the features of each token are turned.

    No tuple and no dataclass: FSDP2 would look into them, and cast the tensors to the 16 bits
    that it computes in.

    Attributes:
        cos: ``[tokens, head_dim]``, fp32.
        sin: ``[tokens, head_dim]``, fp32.
    """

    def __init__(self, angles: Tensor) -> None:
        self.cos, self.sin = angles.cos(), angles.sin()


def rotation(config: LlamaConfig, positions: Tensor) -> Rotation:
    """Return what `rotate` turns tokens at these positions by.

    Args:
        config: Of the model.
        positions: ``[tokens]``, int64.
    """
    steps = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / (config.rope_theta ** (steps / config.head_dim))
    if config.rope_scaling is not None:
        frequencies = _stretched(frequencies, config.rope_scaling)
    angles = torch.outer(positions.to(torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return Rotation(angles)


def rotate(values: Tensor, by: Rotation) -> Tensor:
    """Turn ``[batch, heads, tokens, head_dim]``, in fp32, and return it in its own dtype."""
    wide = values if values.dtype == torch.float64 else values.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * by.cos + torch.cat([-second, first], dim=-1) * by.sin).to(values.dtype)


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by a factor, and blend those between low and high (Llama 3.1)."""
    turns = scaling.original_length * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
