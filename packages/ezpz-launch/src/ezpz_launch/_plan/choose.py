"""Which launcher starts the ranks: the user's choice, else the machine's, else one on PATH."""

from __future__ import annotations

import sys

from ezpz_launch._errors import CommandNotFoundError, LaunchError
from ezpz_launch._plan.executables import find_executables
from ezpz_launch._plan.identify import find_mpiexec
from ezpz_launch._plan.kind import Env, Launcher
from ezpz_launch._plan.launchers import LAUNCHERS
from ezpz_launch._plan.options import Request
from ezpz_launch._plan.placement import Arrangement, match_hosts
from ezpz_topo import Topology

_NO_MPI = (
    "no mpiexec here: the ranks are started as plain processes, and a program that uses MPI itself "
    "would be a world of one in each; for such a one load the site's MPI, or: pip install mpich"
)


def choose_launcher(
    arrangement: Arrangement, *, topology: Topology, request: Request, env: Env
) -> Launcher:
    """Choose and find the launcher for ranks that are arranged on hosts.

    Raises:
        CommandNotFoundError: It is not on PATH.
        LaunchError: The first mpiexec on PATH is of another kind than requested, or cannot reach
            the other hosts.
    """
    on_this_host = arrangement.on_this_host
    requested = request.launcher
    if requested == "auto":
        launcher = _find_default(topology, env, on_this_host=on_this_host)
    elif requested == "mpiexec" or LAUNCHERS[requested].is_mpiexec:
        launcher = find_mpiexec(env)
        if requested not in ("mpiexec", launcher.kind):
            raise LaunchError(
                f"--launcher {requested}: {launcher.path} is {launcher.kind} ({launcher.source}); "
                f"expected {requested} first on PATH; load its module"
            )
    else:
        launcher = _find_by_kind(requested, f"--launcher {requested}", env)
    if on_this_host:
        return launcher
    _, outside_of_job = match_hosts(arrangement.placement.hosts, topology.allocation.hosts)
    if outside_of_job:
        return launcher
    kind = LAUNCHERS[launcher.kind]
    return kind.prepare_remote_start(launcher, env, request.launcher_args)


def _find_default(topology: Topology, env: Env, *, on_this_host: bool) -> Launcher:
    machine = topology.machine
    in_slurm = topology.allocation.scheduler == "slurm"
    # A named machine's flags and bind lists are srun's.
    has_srun_flags = machine.launcher == "srun" and machine.devices_per_node
    if in_slurm and (has_srun_flags or not on_this_host):
        try:
            return find_launcher("srun", "srun", env)
        except CommandNotFoundError:
            if not on_this_host:
                raise
    kind = LAUNCHERS.get(machine.launcher)
    program = "mpiexec"
    if kind is not None and kind.is_mpiexec:
        program = kind.program
    elif kind is not None and kind.name != "srun":
        return _find_by_kind(kind.name, f"{machine.name}.toml", env)
    try:
        return find_mpiexec(env, program)
    except CommandNotFoundError:
        if not on_this_host:
            raise
    if in_slurm and find_executables("srun", env):
        # srun gives programs that use MPI their world; plain processes cannot.
        return find_launcher("srun", "srun", env)
    source = f"no {program} on PATH or in this environment"
    return Launcher(sys.executable, "spawn", source, (_NO_MPI,))


def _find_by_kind(kind: str, source: str, env: Env) -> Launcher:
    if kind == "spawn":
        return Launcher(sys.executable, kind, source)
    return find_launcher(LAUNCHERS[kind].program, kind, env)


def find_launcher(program: str, kind: str, env: Env) -> Launcher:
    """Find a launcher that is recognised by the name of its program."""
    paths = find_executables(program, env)
    if not paths:
        raise CommandNotFoundError(
            f"no {program} on PATH; expected it here; load the site's module, or choose another "
            "--launcher"
        )
    return Launcher(paths[0], kind, f"{program} on PATH")


def imagine_launcher(topology: Topology, request: Request) -> Launcher:
    """Return the launcher that a machine's file names, without looking for it."""
    machine = topology.machine
    if request.launcher == "auto":
        name = machine.launcher
        source = f"{machine.name}.toml"
    else:
        name = request.launcher
        source = f"--launcher {name}"
    if name == "mpiexec":
        # The site's own, if the file has its kind.
        site = LAUNCHERS.get(machine.launcher)
        name = "hydra"
        if site is not None and site.is_mpiexec:
            name = site.name
    program = LAUNCHERS[name].program
    if name == "spawn":
        program = sys.executable
    return Launcher(program, name, f"{source}, not looked for")
