"""Tensors drawn as a matrix of matrices."""

import pytest
import torch

from ezpz_spmd import draw_tensor


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((), "0"),
        ((3,), "0 1 2"),
        ((2, 3), "0 1 2\n3 4 5"),
        ((2, 2, 2), "0 1   4 5\n2 3   6 7"),
        ((2, 1, 2, 2), "0 1\n2 3\n\n4 5\n6 7"),
        ((2, 1, 2, 1, 2), "0 1   2 3     4 5   6 7"),
        ((2, 0), ""),
    ],
)
def test_each_dim_has_its_direction(shape, text):
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    assert draw_tensor(numbers) == text


def test_cells_are_of_one_width():
    assert draw_tensor(torch.tensor([[1.5, 10.0], [-1.0, 0.0]])) == " 1.5 10.0\n-1.0  0.0"
    assert draw_tensor(torch.tensor([[True, False]])) == " True False"
