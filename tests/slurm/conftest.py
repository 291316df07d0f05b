"""The sandbox for a session, and the programs that the tests start in it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slurm.sandbox import SlurmSandbox

HERE = Path(__file__).resolve().parent


def _load(name: str) -> ModuleType:
    """Import a module of this folder by path: no folder of tests is on ``sys.path``."""
    qualified = f"_ezpz_slurm_{name}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    spec = importlib.util.spec_from_file_location(qualified, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[qualified] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def sandbox() -> ModuleType:
    """The module ``sandbox.py``."""
    return _load("sandbox")


@pytest.fixture(scope="session")
def slurm(sandbox: ModuleType) -> Iterator[SlurmSandbox]:
    """A Slurm of four nodes, started once."""
    reason = _why_not(sandbox)
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"{reason}: these tests must not be skipped where they are relied upon")
    if reason:
        pytest.skip(reason)
    with sandbox.SlurmSandbox() as running:
        yield running


def _why_not(sandbox: ModuleType) -> str:
    if missing := sandbox.missing():
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm and munge)"
    if os.geteuid() != 0:
        return "not root: slurmd starts steps as root"
    return ""


@pytest.fixture(scope="session")
def program() -> Callable[[str], list[str]]:
    """Return the words that start a program of the folder ``programs``."""
    return lambda name: [sys.executable, str(HERE / "programs" / f"{name}.py")]


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    """Return the path of a command: this environment's own first, then ``PATH``'s."""

    def find(name: str) -> str:
        own = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
        for path in (*own, os.environ.get("PATH", os.defpath)):
            if found := shutil.which(name, path=path):
                return found
        reason = f"{name} is neither beside {sys.executable} nor on PATH"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)

    return find
