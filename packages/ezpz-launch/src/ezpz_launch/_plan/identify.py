"""Which MPI an mpiexec belongs to: found by running it, never by its name."""

from __future__ import annotations

import os
import subprocess

from ezpz_launch._errors import CommandNotFoundError, LaunchError
from ezpz_launch._plan.executables import find_executables
from ezpz_launch._plan.kind import Env, Launcher
from ezpz_launch._plan.launchers import LAUNCHERS


def find_mpiexec(env: Env, name: str = "mpiexec") -> Launcher:
    """Find the first mpiexec on PATH that belongs to an MPI, with a note if it shadows a site's."""
    paths = find_executables(name, env)
    if not paths:
        raise CommandNotFoundError(
            f"no {name} on PATH or in this environment; expected an MPI; "
            "load the site's MPI module, or: pip install mpich"
        )
    errors: list[LaunchError] = []
    for path in paths:
        try:
            launcher = identify_mpiexec(path)
        except LaunchError as error:
            errors.append(error)
        else:
            passed_over = paths[: len(errors)]
            return _add_site_note(_add_passed_over(launcher, passed_over), paths[1:])
    raise errors[0]


def _add_passed_over(launcher: Launcher, passed_over: list[str]) -> Launcher:
    if not passed_over:
        return launcher
    source = f"{launcher.source}; passed over {', '.join(passed_over)}: no MPI's"
    return launcher._replace(source=source)


def _add_site_note(launcher: Launcher, later_paths: list[str]) -> Launcher:
    if LAUNCHERS[launcher.kind].folder:
        return launcher
    for path in later_paths:
        if _find_kind_by_folder(path):
            note = (
                f"{launcher.path} comes before the site's {path} on PATH: it may not reach the "
                "other nodes; deactivate the environment that brings it, or load the site's module "
                "after it"
            )
            return launcher._replace(notes=(*launcher.notes, note))
    return launcher


def identify_mpiexec(path: str) -> Launcher:
    """Return an mpiexec with its kind: by its folder, then by ``--version``."""
    kind_by_folder = _find_kind_by_folder(os.path.realpath(path))
    if kind_by_folder:
        return Launcher(path, kind_by_folder, f"it lies under {LAUNCHERS[kind_by_folder].folder}")
    output = _read_version(path)
    for kind_name, kind in LAUNCHERS.items():
        for mark, flavour in kind.versions.items():
            if mark in output:
                if _has_pbs_bootstrap(output):
                    return Launcher(path, kind_name, f"--version says {mark}", flavour="tm")
                return Launcher(path, kind_name, f"--version says {mark}", flavour=flavour)
    first_line = output.strip().partition("\n")[0]
    raise LaunchError(
        f"{path} --version says {first_line[:80]!r}; expected MPICH's Hydra, Intel MPI, Open MPI "
        "or PALS; put one of them first on PATH (pip install mpich), or choose --launcher spawn"
    )


def _find_kind_by_folder(path: str) -> str:
    """Return the kind that is installed in a folder above this path; empty if none is."""
    for name, kind in LAUNCHERS.items():
        if kind.folder and path.startswith(kind.folder):
            return name
    return ""


def _read_version(path: str) -> str:
    try:
        process = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version failed ({error}); expected an mpiexec") from error
    return process.stdout


def _has_pbs_bootstrap(version_output: str) -> bool:
    _, _, after = version_output.partition("Launchers available:")
    bootstraps, _, _ = after.partition("\n")
    return "pbs" in bootstraps.split()
