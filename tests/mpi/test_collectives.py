"""Under mpiexec: every collective on the ranks there are, over torch and over MPI."""

import contextlib
import time

import pytest
import torch

import ezpz
import ezpz_dist
from ezpz_dist import _mpi

both = pytest.mark.parametrize("implementation", ["torch", "mpi"])


@both
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8]
)
@pytest.mark.parametrize("width", [2, 20000])
def test_tensors(world, implementation, dtype, width):
    rank, size = world
    mine = torch.full((3, width), rank + 1, dtype=dtype)
    for op, expected in (("sum", size * (size + 1) // 2), ("max", size), ("product", None)):
        result = ezpz.all_reduce(mine, op, implementation)
        assert result.dtype == dtype
        if expected is not None:
            assert torch.equal(result, torch.full((3, width), expected, dtype=dtype))


@both
def test_dicts(world, implementation):
    rank, size = world
    parts = {"loss": float(rank), "deep": {"w": torch.ones(90000), "n": torch.tensor([rank])}}
    got = ezpz.all_reduce(
        parts if rank % 2 else dict(reversed(parts.items())), "sum", implementation
    )
    assert got["loss"] == got["deep"]["n"].item() == size * (size - 1) / 2
    assert torch.equal(got["deep"]["w"], torch.full((90000,), float(size)))


@both
def test_nobody_leaves_a_barrier_before_the_last_has_come(world, implementation):
    rank, size = world
    if rank == size - 1:
        time.sleep(0.3)
    arrived = time.time()
    ezpz.barrier(implementation=implementation, timeout=120)
    left = time.time()
    assert left >= ezpz.all_reduce(arrived, "max")


@pytest.mark.mpi(min_size=2)
@both
def test_ranks_that_differ_are_named(world, implementation):
    rank, size = world
    mine = {"loss": 1.0} if rank == 1 else {"loss": 1.0, "acc": torch.ones(2)}
    with pytest.raises(ezpz_dist.MismatchError) as caught:
        ezpz.all_reduce(mine, implementation=implementation)
    assert caught.value.ranks == (1,)
    expected = f"rank 1 ({ezpz.get_hostname()}) has no key 'acc' at test_collectives.py:"
    assert expected in str(caught.value)
    with pytest.raises(ezpz_dist.CollectiveError, match=r"rank 1 .* cannot take part .* of str"):
        ezpz.all_reduce("x" if rank == 1 else 1, implementation=implementation)
    assert ezpz.all_reduce(1, implementation=implementation) == size


@pytest.mark.mpi(min_size=2)
def test_a_barrier_over_mpi_does_not_wait_for_ever(world):
    rank, size = world
    ezpz.barrier(implementation="mpi")
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(ezpz_dist.HangError, match="barrier"):
            ezpz.barrier(implementation="mpi", timeout=0.5)
        assert time.monotonic() - start < 60
        with pytest.raises(ezpz_dist.CollectiveError, match="MPI cannot take it back"):
            ezpz.barrier(implementation="mpi")
        ezpz.barrier()
        # The others come after all, and MPI is in step again.
        while _mpi._abandoned:
            with contextlib.suppress(ezpz_dist.CollectiveError):
                ezpz.barrier(implementation="mpi")
            assert time.monotonic() - start < 120
    else:
        ezpz.barrier()
        ezpz.barrier(implementation="mpi")
        ezpz.barrier(implementation="mpi")
    assert ezpz.all_reduce(1, implementation="mpi") == size
