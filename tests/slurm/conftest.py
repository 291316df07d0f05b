"""The sandbox for a session, and the programs that the tests start in it."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def _load(name):
    """Import a module of this folder by path: no folder of tests is on ``sys.path``."""
    qualified = f"tests.slurm.{name}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    # pytest's own finder is the first: an assert that fails there shows its values, too.
    pytest.register_assert_rewrite(qualified)
    found = (finder.find_spec(qualified, [str(HERE)]) for finder in sys.meta_path)
    spec = next(filter(None, found))
    module = importlib.util.module_from_spec(spec)
    sys.modules[qualified] = module
    spec.loader.exec_module(module)
    return module


# Tests import it by its full name, and find it loaded.
_load("topology")


@pytest.fixture(scope="session")
def sandbox():
    """The module ``sandbox.py``."""
    return _load("sandbox")


@pytest.fixture(scope="session")
def slurm(sandbox):
    """A Slurm of four nodes, started once."""
    reason = _why_not(sandbox)
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"{reason}: these tests must not be skipped where they are relied upon")
    if reason:
        pytest.skip(reason)
    with sandbox.SlurmSandbox() as running:
        yield running


def _why_not(sandbox):
    if missing := sandbox.missing():
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm and munge)"
    if os.geteuid() != 0:
        return "not root: slurmd starts steps as root"
    return ""


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
        reason = f"{name} is neither beside {sys.executable} nor on PATH"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)

    return find


@pytest.fixture
def said_in(tmp_path):
    directory = tmp_path / "said"
    directory.mkdir()
    return directory


@pytest.fixture
def words(program, said_in):
    return [*program("say_topology"), str(said_in)]


@pytest.fixture
def say(slurm, sandbox, words, said_in):
    """Start say_topology by the words given, and return what each process said."""

    def run(*launcher, then=(), env=None):
        # Whatever devices this host has, they are not the sandbox's.
        slurm.run([*launcher, *words, *then], env={"TORCH_DEVICE": "cpu", **(env or {})})
        return sandbox.reports(said_in)

    return run


@pytest.fixture
def batch(slurm, sandbox, words, said_in, tmp_path):
    """Run a batch script that finds say_topology as ``say``, and return what each said."""
    program = tmp_path / "bin" / "say"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    program.chmod(0o755)

    def run(body, *options, env=None):
        script = f'PATH={shlex.quote(str(program.parent))}:"$PATH"\n{body}'
        slurm.batch(script, *options, env={"TORCH_DEVICE": "cpu", **(env or {})})
        return sandbox.reports(said_in)

    return run


@pytest.fixture
def renamed():
    """Return words that go on where the host's name is a node's, as it is on a real machine."""
    # A namespace is this process's own: nobody else sees the name.
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        reason = "unshare --uts fails: a process may have no host name of its own here"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    script = 'hostname "$1" && shift && exec "$@"'
    return lambda node: ("unshare", "--uts", "sh", "-c", script, "sh", node)
