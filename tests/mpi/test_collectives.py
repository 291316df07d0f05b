import pytest
import torch

import ezpz


def test_numbers(world):
    rank, size = world
    assert ezpz.all_reduce(rank) == size * (size - 1) // 2
    assert ezpz.all_reduce(float(rank), "mean") == (size - 1) / 2
    assert ezpz.all_reduce(rank, "max") == size - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_tensors(world, dtype):
    rank, size = world
    result = ezpz.all_reduce(torch.full((3, 2), rank + 1, dtype=dtype))
    assert result.dtype == dtype
    assert torch.equal(result, torch.full((3, 2), size * (size + 1) // 2, dtype=dtype))


def test_objects(world):
    rank, size = world
    assert ezpz.broadcast(("from", rank), root=size - 1) == ("from", size - 1)
    ezpz.barrier()


def test_seeds_differ_by_rank(world):
    ezpz.seed_everything(1)
    draw = torch.rand(1, dtype=torch.float64).item()
    low, high = ezpz.all_reduce(draw, "min"), ezpz.all_reduce(draw, "max")
    assert (low < high) == (world[1] > 1)
