"""``mpiexec -n 4 python -m pytest --with-mpi tests/mpi``; ranks above 0 say only what failed."""

import os
import sys

import pytest
import torch.distributed as dist

import ezpz_dist
from ezpz_topo import get_rank_info


@pytest.hookimpl(trylast=True)  # after the reporter has registered itself
def pytest_configure(config):
    rank = get_rank_info().rank
    # At its end pytest tidies the folder of all its runs: ranks at the same would meet there.
    folder = config.rootpath / ".hatch" / "mpi" / f"rank-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
    if rank > 0:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        config.pluginmanager.unregister(reporter)
        config.pluginmanager.register(_OnlyFailures(), "only-failures")


class _OnlyFailures:
    def pytest_runtest_logreport(self, report):
        if report.failed:
            sys.stderr.write(
                f"\nrank {get_rank_info().rank}: {report.nodeid}\n{report.longreprtext}\n"
            )


@pytest.fixture(scope="session", autouse=True)
def world():
    """One set-up for all tests: (rank, world size)."""
    rank = ezpz_dist.setup_torch(timeout=300)
    yield rank, dist.get_world_size()
    ezpz_dist.cleanup()
