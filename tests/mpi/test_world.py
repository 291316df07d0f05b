"""Under mpiexec: who we are, and that it is one world for MPI, torch and us."""

import torch.distributed as dist

import ezpz_topo


def test_topo_torch_and_mpi_agree(world):
    info = ezpz_topo.get_rank_info()
    assert (info.rank, info.world_size) == world == (dist.get_rank(), dist.get_world_size())
    assert info.local_rank == info.rank
    assert info.local_world_size == info.world_size
    if world[1] > 1:
        from mpi4py import MPI

        assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == world
