"""Under mpiexec: who we are, and that it is one world for MPI, torch and us."""

import pytest
import torch.distributed as dist

import ezpz_topo


def test_topo_and_torch_agree(world):
    info = ezpz_topo.get_rank_info()
    assert (info.rank, info.world_size) == world == (dist.get_rank(), dist.get_world_size())
    assert info.local_rank == info.rank
    assert info.local_world_size == info.world_size


@pytest.mark.mpi(min_size=2)
def test_mpi_agrees(world):
    from mpi4py import MPI

    assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == world


@pytest.mark.mpi(min_size=2)
def test_every_rank_is_there_once(world):
    seen = [None] * world[1]
    dist.all_gather_object(seen, ezpz_topo.get_rank())
    assert seen == list(range(world[1]))
