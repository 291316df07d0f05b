"""The least network that is worth training."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ._errors import ModelError


class MLP(nn.Sequential):
    """Linear layers with ReLU between them (Rosenblatt 1958; Rumelhart et al. 1986).

    >>> import torch
    >>> MLP((64, 32, 10))(torch.zeros(5, 8, 8)).shape
    torch.Size([5, 10])

    Args:
        widths: Of the input, of each hidden layer, and of the output.

    Raises:
        ModelError: There are fewer than two widths, or one is below 1.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        if len(self.widths) < 2 or min(self.widths) < 1:
            raise ModelError(
                f"MLP{self.widths}; expected at least two widths from 1, those of input and output"
            )
        modules: list[nn.Module] = []
        for before, after in zip(self.widths, self.widths[1:], strict=False):
            modules += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*modules[:-1])

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Return ``[batch, last width]`` of ``[batch, ...]``, which is flattened."""
        hidden = input.flatten(1)
        for module in self:
            hidden = module(hidden)
        return hidden
