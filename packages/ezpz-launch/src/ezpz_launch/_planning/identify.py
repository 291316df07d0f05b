"""Which launcher is it: found on PATH, and told apart by asking it, never by its name."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ezpz_launch._errors import CommandNotFoundError, LaunchError

_PALS = "/opt/cray/pals"
"""Where the site's PALS lies; its --version is not among our facts."""

MPIEXEC_KINDS = ("pals", "hydra", "openmpi")

_MARKS = (
    # Intel MPI's own (developer reference; not run) has Hydra's flags, but not all of MPICH's.
    ("Intel(R) MPI", "hydra", "intel"),
    # MPICH's, and MVAPICH's.
    ("HYDRA", "hydra", ""),
    ("Open MPI", "openmpi", ""),
    ("OpenRTE", "openmpi", ""),
)
"""What ``--version`` says, the kind, the flavour."""


class Launcher(NamedTuple):
    """One launcher: where it is, whose it is, and by what that is known.

    Attributes:
        path: Its executable.
        kind: ``"pals"``, ``"hydra"``, ``"openmpi"``, ``"srun"``, ``"torchrun"`` or ``"spawn"``.
        source: By what it was found and recognised.
        notes: What people should know, such as another one that it shadows.
        flavour: ``"intel"`` for Intel MPI's Hydra, whose flags differ; ``"tm"`` for one that knows
            PBS's own interface for tasks; else empty.
        pbs_tmrsh: What starts Hydra's proxies on a PBS job's other nodes; empty for its own way.
    """

    path: str
    kind: str
    source: str
    notes: tuple[str, ...] = ()
    flavour: str = ""
    pbs_tmrsh: str = ""

    def is_of(self, launcher: str) -> bool:
        """Whether it is the one that a machine's file names (``"mpiexec"``: any MPI's)."""
        return self.kind == launcher or (launcher == "mpiexec" and self.kind in MPIEXEC_KINDS)


def find_mpiexec(
    env: Mapping[str, str],
    *,
    beside: str = "",
    name: str = "mpiexec",
    meanwhile: Callable[[], None] | None = None,
) -> Launcher:
    """Find an MPI's launcher on PATH, else beside this Python, and identify it.

    One that belongs to no MPI that we know (PBS has an mpiexec of its own) is passed over where
    one that does follows.

    Args:
        env: The environment whose PATH is searched.
        beside: Directory of this environment's commands, for a venv that is not activated.
        name: ``"mpiexec"`` or ``"mpirun"``.
        meanwhile: Called while it is asked whose it is, if it is asked.

    Raises:
        CommandNotFoundError: There is none.
        LaunchError: It is one that this version does not know.
    """
    directories = [d for d in (*env.get("PATH", "").split(os.pathsep), beside) if d]
    here = dict.fromkeys(os.path.join(directory, name) for directory in directories)
    found = [path for path in here if _is_executable(path)]
    if not found:
        raise CommandNotFoundError(
            f"no {name} on PATH or in this environment; expected an MPI; "
            "load the site's MPI module, or: pip install mpich"
        )
    chosen = _first_of_an_mpi(found, meanwhile)
    shadowed = next((path for path in found[1:] if path.startswith(_PALS)), None)
    if shadowed is None or chosen.kind == "pals":
        return chosen
    note = (
        f"{chosen.path} comes before the site's {shadowed} on PATH: it may not reach the other "
        "nodes; deactivate the environment that brings it, or load the site's module after it"
    )
    return chosen._replace(notes=(*chosen.notes, note))


def _first_of_an_mpi(found: Sequence[str], meanwhile: Callable[[], None] | None) -> Launcher:
    wrong: list[LaunchError] = []
    for path in found:
        try:
            chosen = identify(path, meanwhile)
        except LaunchError as error:
            wrong.append(error)
            continue
        passed = f"; passed over {', '.join(found[: len(wrong)])}: no MPI's" if wrong else ""
        return chosen._replace(source=chosen.source + passed)
    raise wrong[0]


def find_command(name: str, kind: str, env: Mapping[str, str], *, beside: str = "") -> Launcher:
    """Find a launcher that goes by one name only (srun, torchrun).

    Raises:
        CommandNotFoundError: It is not there.
    """
    for directory in (*env.get("PATH", "").split(os.pathsep), beside):
        path = os.path.join(directory, name)
        if directory and _is_executable(path):
            return Launcher(path, kind, f"{name} on PATH")
    raise CommandNotFoundError(
        f"no {name} on PATH; expected it here; load the site's module, or choose another --launcher"
    )


def identify(path: str, meanwhile: Callable[[], None] | None = None) -> Launcher:
    """Ask an mpiexec whose it is: by where it lies, then by ``--version``.

    Args:
        path: Its executable.
        meanwhile: Called until it answers, if it is asked.

    Raises:
        LaunchError: It answers like none that we know, or not at all.
    """
    if os.path.realpath(path).startswith(_PALS):
        return Launcher(path, "pals", f"it lies under {_PALS}")
    try:
        answer = _ask(path, meanwhile)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version failed ({error}); expected an mpiexec") from error
    for mark, kind, flavour in _MARKS:
        if mark in answer:
            launchers = answer.partition("Launchers available:")[2].partition("\n")[0].split()
            found = Launcher(path, kind, f"--version says {mark}", flavour=flavour)
            return found._replace(flavour="tm") if "pbs" in launchers else found
    first = answer.strip().partition("\n")[0][:80]
    raise LaunchError(
        f"{path} --version says {first!r}; expected MPICH's Hydra, Intel MPI, Open MPI or PALS; "
        "put one of them first on PATH (pip install mpich), or choose --launcher spawn"
    )


def _ask(path: str, meanwhile: Callable[[], None] | None) -> str:
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(
        [path, "--version"], stdin=null, stdout=pipe, stderr=null, text=True, errors="replace"
    ) as process:
        try:
            if meanwhile is not None:
                meanwhile()
            return process.communicate(timeout=20)[0]
        except BaseException:  # also at Ctrl-C: it is not waited for by who leaves; raised again
            process.kill()
            raise


def _is_executable(path: str) -> bool:
    return os.access(path, os.X_OK) and not os.path.isdir(path)
