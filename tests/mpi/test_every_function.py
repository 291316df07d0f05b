"""Under mpiexec, and on one rank: every function of ezpz_dist, as on other worlds."""

import inspect
import re
from pathlib import Path

import pytest
from tests.conftest import load

import ezpz_dist
import ezpz_topo

PROGRAM = Path(__file__).resolve().parents[1] / "worlds" / "every_function.py"


@pytest.fixture
def program():
    return load("worlds.every_function")


def test_topo_torch_and_mpi_agree(world):
    info = ezpz_topo.get_rank_info()
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == 2 * world
    if world[1] > 1:
        from mpi4py import MPI

        assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == world


def test_every_function(world, program, tmp_path):
    rank, size = world
    folder = Path(ezpz_dist.broadcast(str(tmp_path)))
    program.exercise(rank, size, folder, mpi=True)


def test_none_is_forgotten(program):
    functions = {name for name in ezpz_dist.__all__ if inspect.isroutine(getattr(ezpz_dist, name))}
    source = PROGRAM.read_text(encoding="utf-8")
    called = set(re.findall(r"\bez\.(\w+)", source))
    assert functions - called <= program.LEFT_OUT
