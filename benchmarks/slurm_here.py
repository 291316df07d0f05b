"""A private Slurm for the benchmarks: the tests' own, where its daemons are installed."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

_SANDBOX = Path(__file__).resolve().parent.parent / "tests" / "slurm" / "sandbox.py"


class SlurmMissingError(Exception):
    """No Slurm can be started here; the message says why."""


def in_a_job(words: list[str]) -> None:
    """Run a command in an allocation of one node with two cores, and wait for its end.

    Raises:
        SlurmMissingError: Slurm's daemons are not installed, or this is not root.
    """
    sandbox = _load()
    if missing := sandbox.missing():
        raise SlurmMissingError(f"{', '.join(missing)} not installed")
    if os.geteuid() != 0:
        raise SlurmMissingError("a private slurmd starts steps as root, and this is not root")
    with sandbox.SlurmSandbox() as slurm:
        slurm.run(["salloc", "-Q", "-N", "1", "-n", "2", *words], timeout=600)


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slurm_sandbox", _SANDBOX)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
