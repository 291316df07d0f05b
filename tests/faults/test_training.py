"""One rank of a training script fails: all end, and it is named, under every launcher."""

import os
import re
import socket
import sys
import time

import pytest
from tests.faults.launches import MEET_HERE, PROGRAMS, SLACK

pytestmark = pytest.mark.two_ranks

BARE = {
    "hydra": ["mpiexec", "-n", "2"],
    "srun": ["srun", "-N", "2", "-n", "2"],
    "torchrun": ["torchrun", "--nproc-per-node=2"],
}
GUILTY = {"hydra": 0, "srun": 1, "torchrun": 1}
"""Under ezpz-launch; without it, it is the other one. Rank 0 holds the store."""


def train(launch, what, guilty, **more):
    script = [sys.executable, str(PROGRAMS / "train.py"), ".", what, str(guilty)]
    # Long enough for the others to have ended by themselves.
    options = ["--env", "OMP_NUM_THREADS=1", "--grace", "600"]
    started = launch([*options, *MEET_HERE], script, **more)
    started.until((started.folder / "time").exists, "all ranks are set up")
    return started


def ends_at_once(started, guilty, *, mpi=False):
    status = started.ends(within=30)
    began = float((started.folder / "time").read_text())
    assert time.time() - began < 2 + SLACK, started.stderr
    assert status != 0
    stderr = started.stderr
    assert "ValueError: boo" in stderr
    # The others sleep, and would for long: they were ended, and one says by whom.
    host = re.escape(os.uname().nodename)
    said = re.search(
        rf"ezpz: rank {guilty} on {host} failed at train\.py:\d+ in <module>: ", stderr
    )
    # MPI may have ended them before.
    assert said or mpi, stderr
    assert not said or stderr.index("ValueError: boo") < said.start(), "its traceback first"
    # torchrun leaves an empty folder of logs; ezpz-launch removes it.
    started.leaves_nothing(files=bool(started.bare))


@pytest.mark.under("hydra", "srun", "torchrun")
def test_an_exception_ends_all_at_once_and_who_raised_it_is_named(launch, place):
    """Though the others, which leave because of it, have ended before it has."""
    guilty = GUILTY[place.launcher]
    started = train(launch, "lingers", guilty)
    ends_at_once(started, guilty)
    assert started.process.returncode == 1
    said = [line for line in started.stderr.splitlines() if "first of all ranks" in line]
    name = f"rank {guilty} on {place.hosts[guilty]}"
    expected = f"ezpz-launch: {name} exited with status 1, first of all ranks"
    assert [line.partition(";")[0] for line in said] == [expected]
    (record,) = (started.folder / "state").rglob("*.json")
    assert f'"rank": {guilty}' in record.read_text()


@pytest.mark.under("hydra", "srun", "torchrun")
def test_an_exception_ends_all_at_once_without_ezpz_launch(launch, place):
    guilty, mpi = 1 - GUILTY[place.launcher], place.launcher == "hydra"
    env = {"OMP_NUM_THREADS": "1"}
    if not mpi:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    bare = BARE[place.launcher]
    if place.launcher == "torchrun":
        bare = [*bare, f"--master-port={env['MASTER_PORT']}", "--no-python"]
    ends_at_once(train(launch, "raises", guilty, environment=env, bare=bare), guilty, mpi=mpi)
