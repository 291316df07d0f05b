"""Under mpiexec: every collective over MPI, on the ranks there are."""

import contextlib
import time

import pytest
import torch

import ezpz
import ezpz_dist
from ezpz_dist import _mpi

BY_MPI = {"implementation": "mpi"}


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.float64, 2), (torch.float32, 20000), (torch.bfloat16, 20000), (torch.int8, 2)],
)
def test_tensors(world, dtype, width):
    rank, size = world
    mine = {"these": torch.full((3, width), rank + 1, dtype=dtype), "ones": torch.ones(90_000)}
    for op, expected in (("sum", size * (size + 1) // 2), ("max", size), ("product", None)):
        result = ezpz.all_reduce(mine, op, **BY_MPI)
        assert result["these"].dtype == dtype
        if expected is not None:
            assert torch.equal(result["these"], torch.full((3, width), expected, dtype=dtype))
        assert torch.equal(result["ones"], torch.full((90_000,), size if op == "sum" else 1.0))


def test_nobody_leaves_a_barrier_before_the_last_has_come(world):
    rank, size = world
    if rank == size - 1:
        time.sleep(0.3)
    arrived = time.time()
    ezpz.barrier(**BY_MPI, timeout=120)
    left = time.time()
    assert left >= ezpz.all_reduce(arrived, "max")


@pytest.mark.mpi(min_size=2)
def test_ranks_that_differ_are_named(world):
    rank, size = world
    mine = {"loss": 1.0} if rank == 1 else {"loss": 1.0, "acc": torch.ones(2)}
    with pytest.raises(ezpz_dist.MismatchError) as caught:
        ezpz.all_reduce(mine, **BY_MPI)
    assert caught.value.ranks == (1,)
    expected = f"rank 1 ({ezpz.get_hostname()}) has no key 'acc' at test_collectives.py:"
    assert expected in str(caught.value)
    with pytest.raises(ezpz_dist.CollectiveError, match=r"rank 1 .* cannot take part .* of str"):
        ezpz.all_reduce("x" if rank == 1 else 1, **BY_MPI)
    assert ezpz.all_reduce(1, **BY_MPI) == size


@pytest.mark.mpi(min_size=2)
def test_a_barrier_over_mpi_does_not_wait_for_ever(world):
    rank, size = world
    ezpz.barrier(**BY_MPI)
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(ezpz_dist.HangError, match="barrier"):
            ezpz.barrier(**BY_MPI, timeout=0.5)
        assert time.monotonic() - start < 60
        with pytest.raises(ezpz_dist.CollectiveError, match="MPI cannot take it back"):
            ezpz.barrier(**BY_MPI)
        ezpz.barrier()
        # The others come after all, and MPI is in step again.
        while _mpi._abandoned:
            with contextlib.suppress(ezpz_dist.CollectiveError):
                ezpz.barrier(**BY_MPI)
            assert time.monotonic() - start < 120
    else:
        ezpz.barrier()
        ezpz.barrier(**BY_MPI)
        ezpz.barrier(**BY_MPI)
    assert ezpz.all_reduce(1, **BY_MPI) == size
