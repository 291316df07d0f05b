"""What folders of tests share; a run that is ended takes down what its tests have started."""

import importlib.util
import os
import shutil
import signal
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
