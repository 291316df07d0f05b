"""The two hosts for a session, and the programs that the tests start on them."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def sandbox():
    """The module ``sandbox.py``, by path: no folder of tests is on ``sys.path``."""
    spec = importlib.util.spec_from_file_location("tests.hosts.sandbox", HERE / "sandbox.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def session_hosts(sandbox):
    """Two hosts, started once."""
    if reason := sandbox.missing():
        pytest.skip(reason)
    with sandbox.TwoHosts() as running:
        yield running


@pytest.fixture
def hosts(session_hosts):
    """The two hosts; what a test starts or writes there ends with it, also if it fails."""
    yield session_hosts
    session_hosts.reset()


@pytest.fixture(scope="session")
def program():
    """Return the words that start a program of the folder ``programs``."""
    return lambda name: [sys.executable, str(HERE / "programs" / f"{name}.py")]


@pytest.fixture(scope="session")
def tool():
    """Return the path of a command: this environment's own first, then ``PATH``'s."""

    def find(name):
        own = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
        for path in (*own, os.environ.get("PATH", os.defpath)):
            if found := shutil.which(name, path=path):
                return found
        pytest.skip(f"{name} is neither beside {sys.executable} nor on PATH")

    return find
