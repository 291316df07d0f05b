"""What each rank gets: its cores, its variables, and the port where ranks meet."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from socket import AF_INET, SOCK_DGRAM, socket
from typing import NamedTuple

from ezpz_topo import Machine, Topology

from ._errors import LaunchError, UsageError
from ._launchers import LAUNCHERS, Flags, Launcher
from ._options import Request, fold_ranks, read_ranges
from ._placement import Arrangement

# What the machine's options bring that the user selected by name (``[options.NAME]`` of its file).

BACKEND = "TORCH_BACKEND"
"""Where ezpz_device reads which backend to use."""


class Chosen(NamedTuple):
    """What the selected options bring, together."""

    names: tuple[str, ...] = ()  # in the order requested, each once
    flags: tuple[str, ...] = ()  # for the machine's launcher
    environment: Mapping[str, tuple[str, str]] = {}  # for the ranks: value, and who brings it
    cpu_bind: str = ""  # a bind list's name, or `"none"` where the flags bind; empty for any
    cpu_bind_option: str = ""  # the option that brings it
    notes: tuple[str, ...] = ()  # what people should know


def choose_options(machine: Machine, names: Sequence[str], launcher: Launcher) -> Chosen:
    names = tuple(dict.fromkeys(names))
    flags, notes, environment = list[str](), list[str](), dict[str, tuple[str, str]]()
    bind, binder = "", ""
    for name in names:
        if name not in machine.options:
            known = ", ".join(machine.options) or "none"
            raise UsageError(
                f"--option {name}: {machine.name} has no such option; expected one of its own: "
                f"{known}"
            )
        option = machine.options[name]
        if option.flags and launcher.kind != machine.launcher:
            raise UsageError(
                f"--option {name}: its flags ({' '.join(option.flags)}) are for "
                f"{machine.launcher}, and the launcher is {launcher.kind}; expected "
                f"--launcher {machine.launcher}, or no --option {name}"
            )
        if option.cpu_bind and bind and option.cpu_bind != bind:
            raise UsageError(
                f"--option {name} binds by {option.cpu_bind}, --option {binder} by {bind}; "
                "expected one of them"
            )
        if option.cpu_bind:
            bind, binder = option.cpu_bind, name
        flags += option.flags
        added = {**option.environment, **({BACKEND: option.backend} if option.backend else {})}
        for variable, value in added.items():
            set_to, other = environment.get(variable, (value, ""))
            if set_to != value:
                raise UsageError(
                    f"--option {name} sets {variable}={value}, {other} {set_to}; "
                    "expected one of them"
                )
            environment[variable] = value, f"--option {name}"
        if option.modules:
            notes.append(
                f"--option {name}: load its modules before the launch, in place of the machine's: "
                f"module load {' '.join(option.modules)}"
            )
    return Chosen(names, tuple(flags), environment, bind, binder, tuple(notes))


# How ranks are bound to cores, and which of the machine's flags its launcher is given.


def bind(
    machine: Machine, request: Request, arrangement: Arrangement, launcher: Launcher,
    chosen: Chosen, *, env: Mapping[str, str],
) -> tuple[Flags, tuple[str, ...], int, str]:  # fmt: skip
    """Return the launcher's flags, the cores of each rank, how many these are, and why."""
    kind, unbound = LAUNCHERS[launcher.kind], request.cpu_bind == "none"
    flags = machine.launcher_flags + chosen.flags if launcher.kind == machine.launcher else ()
    if request.cpu_bind:
        # All of it goes: a depth without its binding would mean something else.
        flags = tuple(flag for flag in flags if not flag.startswith(kind.binding_words))
    fitted = kind.fit_flags(flags, machine, arrangement, env, unbound=unbound)
    cores, why = _cores_of_ranks(machine, request, arrangement.placement.ppn, launcher, chosen)
    bound = [flag for flag in fitted.words if flag.startswith("--cpu-bind")]
    if bound:
        why = f"launcher_flags of {machine.name}.toml"
        if chosen.flags and bound[-1] in chosen.flags:
            why = f"--option {chosen.cpu_bind_option or ' '.join(chosen.names)}"
    each = min((len(set(read_ranges(ranges))) for ranges in cores), default=fitted.cores)
    return fitted, cores, each, why


def _cores_of_ranks(
    machine: Machine, request: Request, ppn: int, launcher: Launcher, chosen: Chosen
) -> tuple[tuple[str, ...], str]:
    name, why = request.cpu_bind, "--cpu-bind"
    if not name and chosen.cpu_bind:
        name, why = chosen.cpu_bind, f"--option {chosen.cpu_bind_option}"
    if not name:
        name, why = machine.default_cpu_bind, f"default_cpu_bind of {machine.name}.toml"
    if name in ("", "none"):
        return (), why if name else "not requested"
    listed = machine.cpu_bind.get(name) or tuple(name.split(":"))
    if name not in machine.cpu_bind and not name[:1].isdigit():
        known = ", ".join(machine.cpu_bind) or "none"
        raise UsageError(
            f"--cpu-bind {name}: expected none, one of {machine.name}'s lists ({known}), or cores "
            "such as 0-7:8-15"
        )
    for ranges in listed:
        read_ranges(ranges)
    if not LAUNCHERS[launcher.kind].takes_cores:
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
    return _beside_copper(listed[:ppn], machine, request), f"{name}: {why}"


def _beside_copper(listed: tuple[str, ...], machine: Machine, request: Request) -> tuple[str, ...]:
    """Leave the cores out that Copper runs on, where it is to run."""
    taken = machine.copper.cores if machine.copper and request.stage == "copper" else ()
    if not taken:
        return listed
    kept = [[core for core in read_ranges(r) if core not in taken] for r in listed]
    if not all(kept):
        cores = fold_ranks(taken)
        raise UsageError(
            f"--stage=copper: it runs on cores {cores}, and a rank would have no others; expected "
            "each to have some; choose them by --cpu-bind"
        )
    return tuple(map(fold_ranks, kept))


# A TCP port of this host that is free now, and that no outgoing connection will be given.

# Below Linux's and macOS's ephemeral ranges: the ranks bind it seconds later.
_FIRST, _COUNT = 20000, 10000

_reserved: list[object] = []
"""Sockets, until this process ends."""


def free_port() -> int:
    """Return a free port, which no other launch from this host is given while this one lives."""
    start = int.from_bytes(os.urandom(4), "little")
    for step in range(_COUNT):
        port = _FIRST + (start + step) % _COUNT
        with socket() as probe:
            try:
                # On every address: a listener on any of them is in the way.
                probe.bind(("", port))
            except OSError:
                continue
        # TCP's is the ranks' own to bind: UDP's of the same number tells other launches meanwhile.
        reservation = socket(AF_INET, SOCK_DGRAM)
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
"""True under the machine's own launcher only; others expect oneCCL's own choice (Hydra, OFI)."""


_ROOTS = 64


def _roots(topology: Topology, nproc: int) -> dict[str, tuple[str, str]]:
    """Limit what NCCL or RCCL reads: by default a number for each 128 ranks, all by every rank."""
    if nproc <= 128 * _ROOTS or topology.accelerators.device_type != "cuda":
        return {}
    why = f"each rank reads {_ROOTS} numbers of NCCL's from rank 0, not {nproc // 128}"
    return {"TORCH_NCCL_RANKS_PER_ROOT": (str(-(-nproc // _ROOTS)), why)}


def users_own(env: Mapping[str, str]) -> set[str]:
    """Return the variables that are the user's own choice: PBS's for each job are not."""
    # OpenPBS 23.06 (start_exec.c): OMP_NUM_THREADS and NCPUS are one number, and TMPDIR is a
    # folder of the job, /var/tmp/pbs.<job id> by default.
    names = set(env)
    if env.get("PBS_ENVIRONMENT"):
        if env.get("NCPUS") and env.get("OMP_NUM_THREADS") == env["NCPUS"]:
            names.discard("OMP_NUM_THREADS")
        job = env.get("PBS_JOBID")
        if job and job in env.get("TMPDIR", ""):
            names.discard("TMPDIR")
    return names


def ranks_environment(
    topology: Topology, request: Request, arrangement: Arrangement, launcher: Launcher,
    chosen: Chosen, *, bound: int, port: int, user_env: Mapping[str, str],
) -> tuple[dict[str, str], dict[str, str], list[str]]:  # fmt: skip
    """Return what is added to the ranks' environment, for each variable why, and notes."""
    machine, own, notes = topology.machine, users_own(user_env), list[str]()
    address, why = "127.0.0.1", "every rank is on this host"
    why_port = "a free port of this host, a new one for each launch"
    if not arrangement.on_this_host:
        first, suffix = arrangement.placement.hosts[0], machine.hsn_suffix
        address, why = first, "the first host"
        if suffix and not first.replace(".", "").isdigit() and ":" not in first:
            address = first.partition(".")[0] + suffix
            why += f", on the fast network ({machine.name}.toml)"
        why_port = "a port below the ephemeral ones, a new one for each launch"
    added = {"MASTER_ADDR": (address, why), "MASTER_PORT": (str(port), why_port)}
    cores, ranks = arrangement.cores, arrangement.placement.ppn
    if "OMP_NUM_THREADS" not in own and (bound or cores):
        why = f"{cores} cores / {ranks} ranks, at least 1"
        if bound:
            why = "the cores that each rank is given"
        added["OMP_NUM_THREADS"] = str(bound or max(1, cores // ranks)), why
    of_others = [name for name in machine.environment if name.startswith(_OF_A_LAUNCHER)]
    if of_others and launcher.is_of(machine.launcher):
        of_others = []
    if of_others:
        notes.append(
            f"{', '.join(of_others)} of {machine.name}.toml are for {machine.launcher}, and left "
            f"out under {launcher.kind}"
        )
    from_machine = {
        name: (value, f"{machine.name}.toml")
        for name, value in machine.environment.items()
        if name not in of_others
    }
    from_machine |= chosen.environment
    from_machine |= _roots(topology, arrangement.placement.nproc)
    added |= {name: both for name, both in from_machine.items() if name not in own}
    for name in added.keys() & (user_env.keys() - own):
        value, why = added[name]
        added[name] = value, f"{why}; {user_env[name]} is PBS's, not the user's"
    added |= LAUNCHERS[launcher.kind].environment(launcher, here=arrangement.on_this_host)
    if request.machine:
        # The ranks are on the machine that the user named, whatever their host looks like.
        added["EZPZ_MACHINE"] = request.machine, "--machine"
    for pair in request.env:
        name, _, value = pair.partition("=")
        added[name] = value, "--env"
    environment = {name: value for name, (value, _) in added.items()}
    return environment, {name: why for name, (_, why) in added.items()}, notes


def set_aside(environment: Mapping[str, str], request: Request, user_env: Mapping[str, str]) -> str:
    """Say which place to meet at, of the user's environment, the ranks do not get."""
    # It is mostly left over from another launch or written for torchrun, and a port that is fixed
    # is soon another launch's.
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
