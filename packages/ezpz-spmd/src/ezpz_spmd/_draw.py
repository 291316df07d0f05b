"""Tensors of any number of dims, drawn as a matrix of matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_tensor(tensor: Tensor) -> str:
    """Return the values of a tensor of any number of dims as text.

    The last dim runs to the right and the one before it down. The third from the end repeats that
    matrix to the right, the fourth repeats this row of matrices downwards, and so on. So indices
    along each dim are found by eye, where nested brackets have to be counted. (The idea is Edward
    Yang's: blog.ezyang.com, "Draw high dimensional tensors as a matrix of matrices", 2025.)

    Args:
        tensor: Of any shape and dtype.

    >>> print(draw_tensor(torch.arange(16).view(2, 2, 2, 2)))
     0  1    4  5
     2  3    6  7
    <BLANKLINE>
     8  9   12 13
    10 11   14 15
    """
    cells = list(map(str, tensor.detach().cpu().flatten().tolist()))
    width = max(map(len, cells), default=0)
    numbers = torch.arange(tensor.numel()).view(tensor.shape)
    texts = [cell.rjust(width) for cell in cells]
    return "\n".join(line.rstrip() for line in _draw(numbers, texts))


def _draw(numbers: Tensor, texts: list[str]) -> list[str]:
    """Return the lines of a part of the tensor, given by the numbers of its elements."""
    if numbers.dim() == 0:
        return [texts[int(numbers)]]
    parts = [_draw(part, texts) for part in numbers]
    # Further dims have wider gaps.
    gap = max(0, (numbers.dim() - 1) // 2)
    if numbers.dim() % 2:
        space = " " * (2 * gap + 1)
        return [space.join(lines) for lines in zip(*parts, strict=True)]
    lines: list[str] = []
    for part in parts:
        if lines:
            lines += [""] * gap
        lines += part
    return lines
