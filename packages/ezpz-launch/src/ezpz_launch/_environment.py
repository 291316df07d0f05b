"""What each rank gets: its cores, its variables, and the port where ranks meet."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ezpz_topo import Machine, Topology

from ._errors import LaunchError, UsageError
from ._identify import Chosen, Launcher
from ._options import Request, count_cores, read_cores
from ._placement import Arrangement

# How ranks are bound to cores, and which of the machine's flags its launcher is given.


class Binding(NamedTuple):
    """Flags and cores.

    Attributes:
        flags: The machine's flags, and those of its options, for this launcher.
        cores: Cores of each rank of a host; empty for no list.
        depth: Cores for each rank where the machine binds in order; 0 where it does not.
        cores_each: Cores that each rank is bound to, the fewest of any; 0 where it is not.
        unbound: Whether the user wants no binding, and the launcher is to be told so.
        source: Why the ranks are bound so.
        flags_source: Why a flag is not the file's own; empty where all are.
    """

    flags: tuple[str, ...]
    cores: tuple[str, ...]
    depth: int
    cores_each: int
    unbound: bool
    source: str
    flags_source: str


def bind(
    machine: Machine,
    request: Request,
    arrangement: Arrangement,
    launcher: Launcher,
    chosen: Chosen,
) -> Binding:
    """Decide the launcher's flags and the cores of each rank.

    Raises:
        UsageError: What was asked for is no binding, or this launcher cannot do it.
    """
    ppn = arrangement.placement.ppn
    flags: tuple[str, ...] = ()
    if launcher.kind == machine.launcher:
        flags = machine.launcher_flags + chosen.flags
    if request.cpu_bind:
        # All of it goes: a depth without its binding would mean something else.
        flags = tuple(flag for flag in flags if not flag.startswith(("--cpu-bind", "--depth")))
    flags, flags_source = _cpus_per_task(flags, machine, ppn)
    cores, source = _cores_of_ranks(machine, request, ppn, launcher, chosen)
    bound = [flag for flag in flags if flag.startswith("--cpu-bind")]
    depth = 0
    if bound:
        source = f"launcher_flags of {machine.name}.toml"
        if chosen.flags and bound[-1] in chosen.flags:
            source = f"--option {chosen.cpu_bind_option or ' '.join(chosen.names)}"
    if "--cpu-bind=depth" in flags and not any(flag.startswith("--depth") for flag in flags):
        depth = max(1, arrangement.cores // ppn)
    unbound = request.cpu_bind == "none"
    each = 0 if unbound else depth or _cores_of_flags(flags)
    if cores:
        each = min(map(count_cores, cores))
    return Binding(flags, cores, depth, each, unbound, source, flags_source)


def with_cpus_of_the_job(
    binding: Binding, arrangement: Arrangement, env: Mapping[str, str]
) -> Binding:
    """Return the binding with the cores a task that the job was submitted with.

    From Slurm 22.05 on srun does not take them from the job by itself: without a word each rank
    gets one core.
    """
    text = env.get("SLURM_CPUS_PER_TASK", "")
    if not text.isdecimal() or _place_of_cpus(binding.flags) >= 0:
        return binding
    asked, room = int(text), arrangement.cores // arrangement.placement.ppn
    cpus = min(asked, room) if room else asked
    if cpus < 1:
        return binding
    source = "SLURM_CPUS_PER_TASK, which srun itself ignores from 22.05 on"
    return binding._replace(
        flags=(*binding.flags, f"--cpus-per-task={cpus}"),
        cores_each=binding.cores_each or cpus,
        flags_source=source if cpus == asked else f"{source}, less: {room} a rank are there",
    )


def _cores_of_ranks(
    machine: Machine, request: Request, ppn: int, launcher: Launcher, chosen: Chosen
) -> tuple[tuple[str, ...], str]:
    name, why = request.cpu_bind, "--cpu-bind"
    if not name and chosen.cpu_bind:
        name, why = chosen.cpu_bind, f"--option {chosen.cpu_bind_option}"
    if not name:
        name, why = machine.default_cpu_bind, f"default_cpu_bind of {machine.name}.toml"
    if name in ("", "none"):
        return (), why if name else "nobody asked for it"
    listed = machine.cpu_bind.get(name) or tuple(name.split(":"))
    if name not in machine.cpu_bind and not name[:1].isdigit():
        known = ", ".join(machine.cpu_bind) or "none"
        raise UsageError(
            f"--cpu-bind {name}: expected none, one of {machine.name}'s lists ({known}), or cores "
            "such as 0-7:8-15"
        )
    for ranges in listed:
        read_cores(ranges)
    if launcher.kind not in ("pals", "srun"):
        if request.cpu_bind:
            raise UsageError(
                f"--cpu-bind {name}: {launcher.kind} takes no list of cores; expected none, or its "
                "own words in --launcher-args"
            )
        return (), f"{launcher.kind} takes no list of cores"
    if ppn > len(listed):
        if request.cpu_bind:
            raise UsageError(
                f"--cpu-bind {name}: {len(listed)} ranges for {ppn} ranks a host; "
                "expected one a rank"
            )
        return (), f"{ppn} ranks a host are more than the {len(listed)} ranges of {name}"
    return listed[:ppn], f"{name}: {why}"


def _cpus_per_task(
    flags: tuple[str, ...], machine: Machine, ppn: int
) -> tuple[tuple[str, ...], str]:
    """Give srun's ``-c`` for as many ranks as there are.

    The file's number is for one rank a device: that many together are the cores that a node has
    to give.
    """
    devices = machine.devices_per_node or 0
    place = _place_of_cpus(flags)
    if machine.launcher != "srun" or place < 0 or not devices or ppn == devices:
        return flags, ""
    each = int(flags[place].rpartition("=")[2])
    fitting = max(1, each * devices // ppn)
    new = flags[place].replace(str(each), str(fitting))
    why = f"{machine.name}.toml has {each} for {devices} ranks a host; there are {ppn}"
    return (*flags[:place], new, *flags[place + 1 :]), why


def _cores_of_flags(flags: Sequence[str]) -> int:
    """Return the cores of each rank that flags bind it to; 0 where they bind to none."""
    depth = [flag.partition("=")[2] for flag in flags if flag.startswith("--depth=")]
    place = _place_of_cpus(flags)
    text = depth[-1] if depth else flags[place].rpartition("=")[2] if place >= 0 else ""
    return int(text) if text.isdecimal() else 0


def _place_of_cpus(flags: Sequence[str]) -> int:
    """Return the place of the word that has srun's cores per task; -1 where there is none."""
    for place, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name == "--cpus-per-task" and equals and value.isdecimal():
            return place
        if place and flags[place - 1] in ("-c", "--cpus-per-task") and flag.isdecimal():
            return place
    return -1


# A TCP port of this host that is free now, and that no outgoing connection will be given.

# Below Linux's and macOS's ephemeral ranges: the ranks bind it seconds later.
_FIRST, _COUNT = 20000, 10000

_reserved: list[object] = []
"""Sockets, until this process ends."""


def free_port() -> int:
    """Return a free port, which no other launch from this host is given while this one lives.

    Raises:
        LaunchError: All of the range are taken.
    """
    # Not socket, which takes 6 ms for the sake of names; nor /proc/net/tcp, which takes the kernel
    # up to 10.
    from _socket import AF_INET, SOCK_DGRAM  # noqa: PLC0415
    from _socket import socket as Socket  # noqa: N812, PLC0415

    start = int.from_bytes(os.urandom(4), "little")
    for step in range(_COUNT):
        port = _FIRST + (start + step) % _COUNT
        probe = Socket()
        try:
            # On every address: a listener on any of them is in the way.
            probe.bind(("", port))
        except OSError:
            continue
        finally:
            probe.close()
        # TCP's is the ranks' own to bind: UDP's of the same number tells other launches meanwhile.
        reservation = Socket(AF_INET, SOCK_DGRAM)
        try:
            reservation.bind(("127.0.0.1", port))
        except OSError as error:
            reservation.close()
            if error.errno == errno.EADDRINUSE:
                continue
        else:
            _reserved.append(reservation)
        return port
    raise LaunchError(
        f"every port from {_FIRST} to {_FIRST + _COUNT - 1} is taken; expected one for the ranks "
        "to meet at; end what holds them"
    )


# What is added to the ranks' environment, and for each variable why.

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
