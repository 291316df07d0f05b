"""The least network that is worth training."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

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

    layers: nn.ModuleList

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        if len(widths) < 2 or min(widths) < 1:
            raise ModelError(
                f"MLP({tuple(widths)}); expected at least two widths from 1, those of input and "
                "output"
            )
        self.layers = nn.ModuleList(nn.Linear(*both) for both in pairwise(widths))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``[batch, last width]`` of ``[batch, ...]``, which is flattened."""
        hidden = inputs.flatten(1)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden if number == 0 else hidden.relu())
        return hidden
