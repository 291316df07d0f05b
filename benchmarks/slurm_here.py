"""A private Slurm for the benchmarks: the tests' own, where its daemons are installed."""

import importlib.util
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

from callee import last_line

_SANDBOX = Path(__file__).resolve().parent.parent / "tests" / "slurm" / "sandbox.py"


class SlurmMissingError(Exception):
    """No Slurm can be started here; the message says why."""


class SlurmJobError(Exception):
    """A Slurm was started, and the command in its job failed; the message has its last word."""


def in_a_job(words: list[str]) -> None:
    """Run a command in an allocation of one node with two cores, and wait for its end.

    Raises:
        SlurmMissingError: Slurm's daemons are not installed or do not start, or this is not root.
        SlurmJobError: The command failed, or was not done within 500 s.
    """
    sandbox = _load()
    if missing := sandbox.missing():
        raise SlurmMissingError(f"{', '.join(missing)} not installed")
    if os.geteuid() != 0:
        raise SlurmMissingError("a private slurmd starts steps as root, and this is not root")
    # Launches are not to be noted as the user's; the sandbox takes EZPZ_ variables away.
    env = {name: text for name, text in os.environ.items() if name == "EZPZ_STATE_DIR"}
    with ExitStack() as stack:
        try:
            slurm = stack.enter_context(sandbox.SlurmSandbox())
        except (sandbox.SandboxError, OSError) as error:
            said = str(error).splitlines()
            raise SlurmMissingError(f"a private Slurm does not start: {said[0]}") from error
        command = ["salloc", "-Q", "-N", "1", "-n", "2", *words]
        try:
            done = slurm.run(command, env=env, expect=None, timeout=500)
        except sandbox.SandboxError as error:
            raise SlurmJobError(str(error).splitlines()[0]) from error
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        raise SlurmJobError(f"exit status {done.returncode}: {last_line(done.stderr)}")


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slurm_sandbox", _SANDBOX)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
