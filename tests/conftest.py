"""What folders of tests share; a run that is ended takes down what its tests have started."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

signal.signal(signal.SIGTERM, signal.default_int_handler)


def load(name):
    """Import ``tests.NAME`` by path, once: no folder of tests is on ``sys.path``."""
    qualified = f"tests.{name}"
    if qualified not in sys.modules:
        # pytest's own finder is the first: an assert that fails there shows its values, too.
        pytest.register_assert_rewrite(qualified)
        folder = Path(__file__).resolve().parent.joinpath(*name.split(".")[:-1])
        found = (finder.find_spec(qualified, [str(folder)]) for finder in sys.meta_path)
        spec = next(filter(None, found))
        sys.modules[qualified] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[qualified])
    return sys.modules[qualified]


SERVICES = ("slurm", "pbs", "hosts")
"""Folders whose tests share one service: they run one after another, in one process."""

NEEDS_SLURM = {"tests/faults/test_signals.py::test_slurm_s_own_signal_reaches_each_rank_once"}
"""Tests of other folders that start the private Slurm, beside the rows [srun]."""

SLOW = (*SERVICES, "faults", "benchmarks", "docs", "mpi", "packaging", "site", "typing")
"""Folders of slow tests."""


def pytest_collection_modifyitems(config, items):
    def folder_of(item):
        return item.path.relative_to(config.rootpath).parts[1]

    for item in items:
        if folder_of(item) in SLOW:
            item.add_marker(pytest.mark.slow)
    # What takes longest, one after another, begins first.
    items.sort(key=lambda item: folder_of(item) not in SERVICES)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hand out the tests of a service together, and all others one by one."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            folder = nodeid.split("/")[1]
            if folder in SERVICES:
                return folder
            if "[srun" in nodeid or nodeid in NEEDS_SLURM:
                return "slurm"
            return nodeid

    return Scheduler(config, log)


def lacking(reason):
    """Skip what this machine cannot run, but never where it is relied upon."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}: these tests must not be skipped where they are relied upon")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def tool():
    """Return the path of a command: this environment's own first, then ``PATH``'s."""

    def find(name):
        own = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
        for path in (*own, os.environ.get("PATH", os.defpath)):
            if found := shutil.which(name, path=path):
                return found
        return lacking(f"{name} is neither beside {sys.executable} nor on PATH")

    return find


@pytest.fixture
def program(request):
    """Return the words that start a program of the folder ``programs`` beside the test."""
    folder = request.path.parent / "programs"
    return lambda name: [sys.executable, str(folder / f"{name}.py")]


@pytest.fixture
def venv(tmp_path):
    """A venv over this Python's packages, by a path that no venv has of its own; its variables."""
    import ezpz_launch
    import ezpz_topo

    prefix = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    own = [str(Path(package.__file__).parents[1]) for package in (ezpz_launch, ezpz_topo)]
    return prefix, {
        "PATH": f"{prefix}/bin:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([sysconfig.get_path("purelib"), *own]),
        "HOME": str(tmp_path / "home"),
        "EZPZ_STATE_DIR": str(tmp_path / "state"),
    }


@pytest.fixture(scope="session")
def slurm():
    """A Slurm of four nodes, started once."""
    sandbox = load("slurm.sandbox")
    if missing := sandbox.missing():
        lacking(f"{', '.join(missing)} not installed (Debian: slurm-wlm and munge)")
    if os.geteuid() != 0:
        lacking("not root: slurmd starts steps as root")
    with sandbox.SlurmSandbox() as running:
        yield running
