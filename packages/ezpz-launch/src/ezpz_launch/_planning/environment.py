"""What is added to the ranks' environment, and for each variable why."""

from __future__ import annotations

from collections.abc import Mapping

from ezpz_launch._request import Request
from ezpz_topo import Machine, Topology

from .arrange import Arrangement
from .identify import Launcher
from .machine_options import Chosen

_OF_A_LAUNCHER = ("CCL_PROCESS_LAUNCHER", "CCL_ATL_TRANSPORT", "CCL_KVS_MODE", "PALS_")
"""Beginnings of variables that are true under the machine's own launcher only.

oneCCL's own choice without them (Hydra, OFI) is right under others: it is what they expect.
"""

_OF_A_HOST = ("HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "DISPLAY", "TMPDIR", "XDG_RUNTIME_DIR")
_OF_A_LOGIN = ("HOME", "USER", "LOGNAME", "SHELL", "MAIL", "TERM")
_OF_OTHERS = ("SSH_", "OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_", "PBS_", "EZPZ_CONTROL")

_OF_SRUN = ("SLURM_HOSTFILE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE", "SLURM_LABELIO")


def users_own(env: Mapping[str, str]) -> set[str]:
    """Return the variables that are the user's own choice: PBS's for each job are not.

    OpenPBS 23.06 (start_exec.c): OMP_NUM_THREADS and NCPUS are one number, and TMPDIR is a folder
    of the job, ``/var/tmp/pbs.<job id>`` by default.
    """
    names = set(env)
    if env.get("PBS_ENVIRONMENT"):
        if env.get("NCPUS") and env.get("OMP_NUM_THREADS") == env["NCPUS"]:
            names.discard("OMP_NUM_THREADS")
        job = env.get("PBS_JOBID")
        if job and job in env.get("TMPDIR", ""):
            names.discard("TMPDIR")
    return names


def ranks_environment(
    topology: Topology,
    request: Request,
    arrangement: Arrangement,
    launcher: Launcher,
    chosen: Chosen,
    *,
    bound: int,
    port: int,
    user_env: Mapping[str, str],
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return what is added to the ranks' environment, for each variable why, and notes.

    Args:
        topology: Where we are.
        request: What the user asked for.
        arrangement: Which hosts get how many ranks.
        launcher: What starts them.
        chosen: What the machine's options bring.
        bound: Cores that each rank is bound to; 0 where it is not.
        port: A TCP port for the ranks' rendezvous.
        user_env: The environment we were called with.
    """
    here, own = arrangement.on_this_host, users_own(user_env)
    added = _rendezvous(topology, arrangement, port)
    threads, why = _threads(arrangement, bound)
    if threads and "OMP_NUM_THREADS" not in own:
        added["OMP_NUM_THREADS"] = str(threads), why
    from_machine, notes = _machines(topology.machine, launcher, chosen)
    added |= {name: both for name, both in from_machine.items() if name not in own}
    for name in added.keys() & (user_env.keys() - own):
        value, why = added[name]
        added[name] = value, f"{why}; {user_env[name]} is PBS's, not the user's"
    if launcher.flavour == "intel" and not here:
        # Below a scheduler it would otherwise follow that one's layout, whatever -ppn says
        # (Intel MPI developer reference).
        added["I_MPI_JOB_RESPECT_PROCESS_PLACEMENT"] = "0", "so that Intel MPI heeds -ppn"
    if launcher.pbs_tmrsh:
        added["EZPZ_PBS_TMRSH"] = launcher.pbs_tmrsh, "starts Hydra's proxies on the other nodes"
    if request.machine:
        # The ranks are on the machine that the user named, whatever their host looks like.
        added["EZPZ_MACHINE"] = request.machine, "--machine"
    for pair in request.env:
        name, _, value = pair.partition("=")
        added[name] = value, "--env"
    environment = {name: value for name, (value, _) in added.items()}
    return environment, {name: why for name, (_, why) in added.items()}, notes


def _rendezvous(
    topology: Topology, arrangement: Arrangement, port: int
) -> dict[str, tuple[str, str]]:
    address, why = "127.0.0.1", "every rank is on this host"
    why_port = "a free port of this host, a new one for each launch"
    if not arrangement.on_this_host:
        first, suffix = arrangement.placement.hosts[0], topology.machine.hsn_suffix
        address, why = first, "the first host"
        if suffix and not first.replace(".", "").isdigit() and ":" not in first:
            address = first.partition(".")[0] + suffix
            why += f", on the fast network ({topology.machine.name}.toml)"
        why_port = "a port below the ephemeral ones, a new one for each launch"
    return {"MASTER_ADDR": (address, why), "MASTER_PORT": (str(port), why_port)}


def set_aside(environment: Mapping[str, str], request: Request, user_env: Mapping[str, str]) -> str:
    """Say which place to meet at, of the user's environment, the ranks do not get.

    It is mostly left over from another launch or written for torchrun, and a port that is fixed
    is soon another launch's.
    """
    asked = {pair.partition("=")[0] for pair in request.env}
    names = [
        name
        for name in ("MASTER_ADDR", "MASTER_PORT")
        if name not in asked and user_env.get(name, environment[name]) != environment[name]
    ]
    if not names:
        return ""
    pairs = [f"{name}={user_env[name]}" for name in names]
    return (
        f"{' and '.join(pairs)} of the environment {'is' if len(names) == 1 else 'are'} not used: "
        f"the ranks meet at {environment['MASTER_ADDR']}:{environment['MASTER_PORT']}, a new place "
        f"for each launch; to have yours: {' '.join(f'--env {pair}' for pair in pairs)}"
    )


def _machines(
    machine: Machine, launcher: Launcher, chosen: Chosen
) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return the machine's variables and those of its options, each with its source, and notes."""
    added: dict[str, tuple[str, str]] = {}
    left_out = []
    for name, value in machine.environment.items():
        if name.startswith(_OF_A_LAUNCHER) and not launcher.is_of(machine.launcher):
            left_out.append(name)
        else:
            added[name] = value, f"{machine.name}.toml"
    for name, value in chosen.environment.items():
        added[name] = value, chosen.sources[name]
    if not left_out:
        return added, []
    note = f"{', '.join(left_out)} of {machine.name}.toml are for {machine.launcher}, and left out"
    return added, [f"{note} under {launcher.kind}"]


def exported_names(
    topology: Topology, environment: Mapping[str, str], user_env: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the variables to name to a launcher that exports none by itself.

    All of the user's, as other launchers bring them, less what is a host's, a login's or another
    launcher's own; and what is added. Open MPI complains of a name that is not set.
    """
    left_out = {*_OF_A_HOST, *_OF_A_LOGIN} - topology.machine.environment.keys()
    own = [
        name
        for name in sorted(user_env)
        if name.isidentifier() and name not in left_out and not name.startswith(_OF_OTHERS)
    ]
    return tuple(dict.fromkeys(["PATH", *own, *environment]))


def misleading(launcher: Launcher, user_env: Mapping[str, str], *, in_step: bool) -> list[str]:
    """Return the user's variables that this launcher must not see.

    srun takes its output, its hosts and its binding from them, whatever the plan is: ranks would
    write into files of its own, or lie on other hosts than MASTER_ADDR says.
    """
    if launcher.kind != "srun":
        return []
    names = [name for name in _OF_SRUN if name in user_env]
    if in_step:
        # Of the step that we are in: its ranks' cores are not ours.
        names += [name for name in user_env if name.startswith("SLURM_CPU_BIND")]
    return names


def _threads(arrangement: Arrangement, bound: int) -> tuple[int, str]:
    """Return the threads of a rank, 0 where the cores are not known, and why so many."""
    if bound:
        return bound, "the cores that each rank is given"
    cores, ranks = arrangement.cores, arrangement.placement.ppn
    return cores and max(1, cores // ranks), f"{cores} cores / {ranks} ranks, at least 1"
