"""Which launcher to use: the user's word, else the machine's, else what is here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ezpz_launch._errors import CommandNotFoundError, LaunchError
from ezpz_launch._request import Request
from ezpz_topo import Topology

from .arrange import Arrangement
from .identify import MPIEXEC_KINDS, Launcher, find_command, find_mpiexec
from .select import match_hosts

_REACHES = ("launcher", "launcher-exec", "bootstrap", "bootstrap-exec", "rmk")
"""Hydra's options about how it reaches other hosts."""

_HYDRA_REACHES = tuple(f"HYDRA_{name.upper().replace('-', '_')}" for name in _REACHES)
"""The same as variables."""

_NO_MPI = (
    "no mpiexec here: the ranks are started as plain processes, and a program that uses MPI itself "
    "would be a world of one in each; for such a one load the site's MPI, or: pip install mpich"
)


def choose_launcher(
    topology: Topology,
    request: Request,
    env: Mapping[str, str],
    *,
    beside: str,
    arrangement: Arrangement,
    meanwhile: Callable[[], None] | None = None,
) -> Launcher:
    """Find the launcher and identify it.

    Args:
        topology: Where we are.
        request: What the user asked for.
        env: The environment whose PATH is searched.
        beside: Directory of this environment's commands, for a venv that is not activated.
        arrangement: Which hosts get ranks.
        meanwhile: Called while an mpiexec is asked whose it is, if one is.

    Raises:
        LaunchError: It is not here, or is another one than was asked for.
    """
    found = _chosen(
        topology, request, env, beside=beside, arrangement=arrangement, meanwhile=meanwhile
    )
    names, job = arrangement.placement.hosts, topology.allocation.hosts
    if arrangement.on_this_host or match_hosts(names, job)[1]:
        return found
    return through_pbs(found, env, request.launcher_args)


def through_pbs(
    launcher: Launcher, env: Mapping[str, str], launcher_args: Sequence[str] = ()
) -> Launcher:
    """Return MPICH's Hydra with what starts its proxies on the other nodes of a PBS job.

    Its own way is ssh, which many sites do not have between nodes. What the user says to Hydra
    comes first.

    Raises:
        LaunchError: Nothing here reaches the other nodes.
    """
    is_told = any(env.get(name) for name in _HYDRA_REACHES) or any(
        word.lstrip("-") in _REACHES for word in launcher_args
    )
    if launcher.kind != "hydra" or launcher.flavour or is_told or not env.get("PBS_JOBID"):
        return launcher
    from ezpz_topo import get_pbs_folder  # noqa: PLC0415  # only a job of PBS needs it

    folders = [env.get("PATH", ""), get_pbs_folder(env), env.get("PBS_O_PATH", "")]
    path = {**env, "PATH": os.pathsep.join(folders)}
    for name, found in (("pbs_tmrsh", path), ("ssh", env)):
        with suppress(CommandNotFoundError):
            program = find_command(name, name, found).path
            source = f"{launcher.source}; other nodes by {program}"
            pbs_tmrsh = program if name == "pbs_tmrsh" else ""
            return launcher._replace(source=source, pbs_tmrsh=pbs_tmrsh)
    raise LaunchError(
        f"{launcher.path} starts nothing on the job's other nodes: neither pbs_tmrsh nor ssh is "
        "here; expected one of them on PATH; add the folder of PBS's commands to PATH, or load "
        "the site's own MPI"
    )


def _chosen(
    topology: Topology,
    request: Request,
    env: Mapping[str, str],
    *,
    beside: str,
    arrangement: Arrangement,
    meanwhile: Callable[[], None] | None,
) -> Launcher:
    asked = request.launcher
    if asked == "auto":
        return _auto(topology, env, beside, here=arrangement.on_this_host, meanwhile=meanwhile)
    if asked == "spawn":
        return _spawn("--launcher spawn")
    if asked in ("srun", "torchrun"):
        return find_command(asked, asked, env, beside=beside)
    found = find_mpiexec(env, beside=beside, meanwhile=meanwhile)
    if asked in MPIEXEC_KINDS and found.kind != asked:
        raise LaunchError(
            f"--launcher {asked}: {found.path} is {found.kind} ({found.source}); expected {asked} "
            "first on PATH; load its module"
        )
    return found


def imagine_launcher(topology: Topology, request: Request) -> Launcher:
    """Return the launcher that a machine's file names, without looking for it."""
    kind = topology.machine.launcher if request.launcher == "auto" else request.launcher
    source = f"{topology.machine.name}.toml, not looked for"
    if request.launcher != "auto":
        source = f"--launcher {request.launcher}, not looked for"
    if kind == "spawn":
        return _spawn(source)
    if kind == "mpiexec":
        # The site's own, where the file tells whose it is.
        named = topology.machine.launcher
        kind = named if named in MPIEXEC_KINDS else "hydra"
    program = {"openmpi": "mpirun", "srun": "srun", "torchrun": "torchrun"}.get(kind, "mpiexec")
    return Launcher(program, kind, source)


def _auto(
    topology: Topology,
    env: Mapping[str, str],
    beside: str,
    *,
    here: bool,
    meanwhile: Callable[[], None] | None,
) -> Launcher:
    machine, in_slurm = topology.machine, topology.allocation.scheduler == "slurm"
    if in_slurm and not here:
        return find_command("srun", "srun", env, beside=beside)
    if in_slurm and machine.launcher == "srun" and machine.devices_per_node:
        # A named machine's flags and bind lists are srun's.
        found = _srun_if_here(env, beside)
        if found:
            return found
    if machine.launcher == "spawn":
        return _spawn(f"{machine.name}.toml")
    if machine.launcher == "torchrun":
        return find_command("torchrun", "torchrun", env, beside=beside)
    name = "mpirun" if machine.launcher == "openmpi" else "mpiexec"
    try:
        return find_mpiexec(env, beside=beside, name=name, meanwhile=meanwhile)
    except CommandNotFoundError:
        if not here:
            raise
    # srun gives programs that use MPI their world; plain processes cannot.
    found = _srun_if_here(env, beside) if in_slurm else None
    return found or _spawn(f"no {name} on PATH or in this environment", _NO_MPI)


def _srun_if_here(env: Mapping[str, str], beside: str) -> Launcher | None:
    try:
        return find_command("srun", "srun", env, beside=beside)
    except CommandNotFoundError:
        return None


def _spawn(source: str, *notes: str) -> Launcher:
    return Launcher(sys.executable, "spawn", source, notes)
