"""The local ``mpiexec``: MPICH's Hydra or Open MPI, told apart by asking it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from ezpz_launch._errors import CommandNotFoundError, LaunchError
from ezpz_launch._plan import LaunchPlan
from ezpz_topo import family

SHIM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "rank_shim.sh")

_ESCAPE = "+"
"""Put before every word of a command that holds mpiexec's own separator."""


@dataclass(frozen=True, slots=True)
class Mpiexec:
    """One mpiexec: where it is, whose it is, and by what that is known."""

    path: str
    kind: str
    source: str


def find(env: Mapping[str, str], *, beside: str) -> Mpiexec:
    """Find ``mpiexec`` on PATH, else beside this Python, and identify it.

    Args:
        env: The environment whose PATH is searched.
        beside: Directory of this environment's commands, for a venv that is not activated.

    Raises:
        CommandNotFoundError: There is none.
        LaunchError: It is one that this version does not know.
    """
    for directory in (*env.get("PATH", "").split(os.pathsep), beside):
        path = os.path.join(directory, "mpiexec")
        if directory and os.access(path, os.X_OK) and not os.path.isdir(path):
            return identify(path)
    raise CommandNotFoundError(
        "no mpiexec on PATH or in this environment; expected an MPI; "
        "load the site's MPI module, or: pip install mpich"
    )


def identify(path: str) -> Mpiexec:
    """Ask an mpiexec whose it is: by ``--version``.

    Raises:
        LaunchError: It answers like none that we know, or not at all.
    """
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=20,
            check=False, stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version failed ({error}); expected an mpiexec") from error
    for mark, kind in (("HYDRA", "hydra"), ("Open MPI", "openmpi"), ("OpenRTE", "openmpi")):
        if mark in answer:
            return Mpiexec(path, kind, f"--version says {mark}")
    first = answer.strip().partition("\n")[0][:80]
    raise LaunchError(
        f"{path} --version says {first!r}; expected MPICH's Hydra or Open MPI; "
        "put one of them first on PATH (pip install mpich)"
    )


def argv(plan: LaunchPlan, mpiexec: Mpiexec) -> list[str]:
    """Return the command line that starts a plan's ranks on this host."""
    head = [mpiexec.path, "-n", str(plan.nproc)]
    if mpiexec.kind == "hydra":
        # Inside a Slurm step Hydra would start its proxy by another srun, which waits for
        # cores that the step holds, and would take its hosts from the job (MPICH 5.0.2).
        head += ["-launcher", "fork", "-rmk", "user", "-host", "localhost"]
    if mpiexec.kind == "openmpi":
        # More ranks than cores is what a laptop asks for; root is what a container is.
        head += ["--oversubscribe"]
        # Two ranks or fewer it would bind to one core each, with all our threads on it.
        head += ["--bind-to", "none"]
        if os.geteuid() == 0:
            head += ["--allow-run-as-root"]
    return head + _shim_argv(mpiexec.kind) + _escape(plan.command)


def _shim_argv(kind: str) -> list[str]:
    names = family("openmpi" if kind == "openmpi" else "pmi")
    variables = (names.rank, names.world_size, names.local_rank, names.local_world_size)
    return ["sh", SHIM, names.name, *(alternatives[0] for alternatives in variables)]


def _escape(command: tuple[str, ...]) -> list[str]:
    """Hide a lone ``:`` from mpiexec, which would start another program after it."""
    if ":" not in command:
        return ["--", *command]
    return ["--escaped", *(_ESCAPE + word for word in command)]
