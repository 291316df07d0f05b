"""What will be started, decided whole before anything starts, and explained.

And what each rank gets: its cores, its variables, and the port where ranks meet.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from socket import AF_INET, SOCK_DGRAM, socket
from typing import NamedTuple

from ezpz_launch._errors import LaunchError, UsageError
from ezpz_launch._plan.launchers import LAUNCHERS, SHIM, Flags, Launcher, pack_env
from ezpz_launch._plan.options import Request, read_ranges, settings
from ezpz_launch._plan.placement import Arrangement, Placement, arrange
from ezpz_topo import Machine, Topology, fold_nodelist

# What the machine's options bring that the user selected by name (``[options.NAME]`` of its file).

BACKEND = "TORCH_BACKEND"  # where ezpz_device reads which backend to use


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
    return listed[:ppn], f"{name}: {why}"


# A TCP port of this host that is free now, and that no outgoing connection will be given.

# Below Linux's and macOS's ephemeral ranges: the ranks bind it seconds later.
_FIRST, _COUNT = 20000, 10000
_reserved: list[object] = []  # sockets, until this process ends


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
        shared = f"{cores} cores / {ranks} ranks, at least 1"
        why = "the cores that each rank is given" if bound else shared
        added["OMP_NUM_THREADS"] = str(bound or max(1, cores // ranks)), why
    of_others = [name for name in machine.environment if name.startswith(_OF_A_LAUNCHER)]
    is_mpiexec = machine.launcher == "mpiexec" and LAUNCHERS[launcher.kind].is_mpiexec
    if launcher.kind == machine.launcher or is_mpiexec:
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


# Topology + Request -> LaunchPlan: pure, so that every command line can be shown and tested.


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What will be started.

    Attributes:
        request: What the user requested.
        command: The user's words, verbatim.
        launcher: What starts the ranks.
        placement: How many ranks on which hosts.
        machine: The machine's flags and options.
        on_this_host: Whether this host alone has ranks.
        nodelist: The hosts, where srun is to be told because they are not all of the job's.
        by_rank: Whether srun is to read the host of each rank from the hostfile.
        in_step: Whether we are in a step of the Slurm job, whose cores the ranks have to share.
        hostfile: Path of the file that names the hosts, where the launcher reads one.
        device_type: torch's word for the devices of the hosts.
        devices: Devices to ask the scheduler for on each host; 0 for none.
        flags: The machine's flags for this launcher.
        unbound: Whether the user wants no binding, and the launcher is to be told so.
        cpu_bind: Cores of each rank of a host; empty for no list.
        depth: Cores for each rank where the machine binds in order; 0 where it does not.
        launcher_args: The user's words for the launcher.
        environment: What is added to the ranks' environment.
        exported: Variables to name to a launcher that exports none by itself.
        removed: The user's variables that would lead the launcher astray.
        as_root: Whether we are root.
        spares: Hosts that are kept aside.
        control: Variables of ours in the launcher's environment, for the ranks' shims.
        sources: For each decision, by name, why it is so.
        notes: What people should know.
        warnings: What they are also told when the ranks are started.
    """

    request: Request
    command: tuple[str, ...]
    launcher: Launcher
    placement: Placement
    machine: Machine
    on_this_host: bool
    nodelist: str
    by_rank: bool
    in_step: bool
    hostfile: str
    device_type: str
    devices: int
    flags: tuple[str, ...]
    unbound: bool
    cpu_bind: tuple[str, ...]
    depth: int
    launcher_args: tuple[str, ...]
    environment: Mapping[str, str]
    exported: tuple[str, ...]
    removed: tuple[str, ...] = ()
    as_root: bool = False
    spares: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def nproc(self) -> int:
        """Number of ranks in all."""
        return self.placement.nproc


def plan(
    topology: Topology, request: Request, launcher: Launcher | Callable[[Arrangement], Launcher], *,
    hosts: Sequence[str], hosts_source: str, slots: int | Sequence[int] = 0, hostfile: str,
    port: int, user_env: Mapping[str, str], as_root: bool = False,
) -> LaunchPlan:  # fmt: skip
    """Decide how many ranks run where, by which launcher, and with what environment.

    Args:
        topology: Where we are.
        request: What the user requested.
        launcher: What starts the ranks; or what finds it when it is known where ranks run.
        hosts: The hosts that there are.
        hosts_source: Where they come from.
        slots: The ranks foreseen on each of ``hosts``, 0 where not told; one number for all.
        hostfile: Where a file with the hosts in use will be, if the launcher needs one.
        port: A TCP port for the ranks' rendezvous.
        user_env: The environment we were called with; an OMP_NUM_THREADS there is kept.
        as_root: Whether we are root.

    Raises:
        LaunchError: What was requested contradicts itself, or cannot be done here.
    """
    arrangement = arrange(topology, request, hosts=hosts, hosts_source=hosts_source, slots=slots)
    if not isinstance(launcher, Launcher):
        launcher = launcher(arrangement)
    machine = topology.machine
    kind = LAUNCHERS[launcher.kind]
    arrangement, nodelist, by_rank = kind.fit_hosts(topology, arrangement)
    chosen = choose_options(machine, request.options, launcher) if request.options else Chosen()
    fitted, cpu_bind, cores_each, why_bound = bind(
        machine, request, arrangement, launcher, chosen, env=user_env
    )
    environment, why, notes = ranks_environment(
        topology, request, arrangement, launcher, chosen,
        bound=cores_each, port=port, user_env=user_env,
    )  # fmt: skip
    placement, devices = arrangement.placement, topology.accelerators
    sources = {
        "nproc": placement.source,
        "ppn": placement.source_per_host,
        "hosts": arrangement.source,
        "launcher": launcher.source,
        "cpu_bind": why_bound,
        **({"flags": fitted.source} if fitted.source else {}),
        **{f"--option {name}": machine.options[name].why for name in chosen.names},
        **why,
    }
    aside = set_aside(environment, request, user_env)
    asks_for_devices = devices.device_type != "cpu" and machine.devices_per_node
    return LaunchPlan(
        request=request, command=request.command, launcher=launcher, placement=placement,
        machine=machine, on_this_host=arrangement.on_this_host, nodelist=nodelist, by_rank=by_rank,
        in_step="SLURM_STEP_ID" in user_env, hostfile=hostfile, device_type=devices.device_type,
        devices=devices.count if asks_for_devices else 0, flags=fitted.words,
        unbound=request.cpu_bind == "none", cpu_bind=cpu_bind, depth=fitted.depth,
        launcher_args=request.launcher_args, environment=environment,
        exported=kind.exported(machine, environment, user_env), removed=kind.removed(user_env),
        as_root=as_root, spares=arrangement.spares, sources=sources,
        notes=(*launcher.notes, *chosen.notes, *notes),
        warnings=tuple(filter(None, [arrangement.warning, aside])),
    )  # fmt: skip


# What ``--dry-run`` says: the command, and for each decision its value and its source.


def explain(
    plan: LaunchPlan, argv: Sequence[str], hostfile: Sequence[str], columns: int = 0
) -> str:
    """Return the explanation of a launch, for people; the command can be pasted into a shell."""
    lines = ["would run:", *_command(plan, argv), ""]
    if hostfile:
        listed = [*hostfile[:6], "...", hostfile[-1]] if len(hostfile) > 8 else hostfile
        lines += [f"with {plan.hostfile}:", *(f"  {line}" for line in listed), ""]
    lines += because(_decisions(plan), columns)
    return "\n".join([*lines, *(f"note: {note}" for note in (*plan.warnings, *plan.notes))])


def because(rows: Sequence[tuple[str, str, str]], columns: int = 0) -> list[str]:
    """Return lines of what was decided: name, value and why, which a terminal's columns break."""
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    # One long value must not push every source off the screen.
    widths[1] = min(widths[1], 40)
    lines = ["because:"]
    for name, value, why in rows:
        lines += wrapped(f"  {name:<{widths[0]}}  {value:<{widths[1]}}  ", f"({why})", columns)
    return lines


def wrapped(start: str, text: str, columns: int) -> list[str]:
    """Return a row whose last cell stays below itself; where there are no columns, one line."""
    if not columns:
        return [f"{start}{text}".rstrip()]
    from textwrap import wrap  # noqa: PLC0415  # only a terminal needs it

    return wrap(
        text, max(columns, len(start) + 18), initial_indent=start,
        subsequent_indent=" " * len(start), break_long_words=False, break_on_hyphens=False,
    ) or [start.rstrip()]  # fmt: skip


def explain_json(plan: LaunchPlan, argv: Sequence[str], hostfile: Sequence[str]) -> str:
    placement = plan.placement
    return json.dumps(
        {
            "argv": list(argv),
            "environment": dict(plan.environment),
            "hostfile": {"path": plan.hostfile, "lines": list(hostfile)} if hostfile else None,
            "launcher": {"kind": plan.launcher.kind, "path": plan.launcher.path},
            "machine": plan.machine.name,
            "nproc": placement.nproc,
            "ppn": placement.ppn,
            "hosts": list(placement.hosts),
            "ranks_per_host": list(placement.ranks),
            "settings": {name: value for name, value, _ in settings(plan.request)},
            "sources": dict(plan.sources),
            "notes": [*plan.warnings, *plan.notes],
        },
        indent=2,
    )


def _decisions(plan: LaunchPlan) -> list[tuple[str, str, str]]:
    placement, sources = plan.placement, plan.sources
    rows = [
        ("machine", plan.machine.name, plan.machine.matched_by),
        ("launcher", f"{plan.launcher.kind}: {plan.launcher.path}", sources["launcher"]),
        ("ranks", str(placement.nproc), sources["nproc"]),
        ("ranks per host", _ranks(placement.ranks), sources["ppn"]),
        ("hosts", fold_nodelist(placement.hosts), sources["hosts"]),
        ("cpu binding", _binding(plan), sources["cpu_bind"]),
    ]
    if "flags" in sources:
        rows += [("launcher flags", " ".join(plan.flags), sources["flags"])]
    for name in dict.fromkeys(plan.request.options):
        rows += [("option", name, f"--option: {sources[f'--option {name}']}")]
    rows += settings(plan.request)
    return rows + [(name, value, sources[name]) for name, value in plan.environment.items()]


def _binding(plan: LaunchPlan) -> str:
    if plan.cpu_bind:
        return ":".join(plan.cpu_bind)
    if plan.depth:
        return f"in order, {plan.depth} cores each"
    words = LAUNCHERS[plan.launcher.kind].binding_words
    return " ".join(flag for flag in plan.flags if flag.startswith(words)) or "none"


def _ranks(ranks: Sequence[int]) -> str:
    same = f"{ranks[0]} x {len(ranks)}" if len(ranks) > 1 else str(ranks[0])
    return same if ranks[-1] == ranks[0] else f"{ranks[0]} x {len(ranks) - 1}, {ranks[-1]}"


def _command(plan: LaunchPlan, argv: Sequence[str]) -> list[str]:
    """Return the command with one group of arguments a line, each but the last continued."""
    environment = {**plan.environment, **pack_env(plan.environment)}
    added = [f"{name}={value}" for name, value in environment.items()]
    removed = [["-u", name] for name in plan.removed]
    groups = [["env"], *removed, *([pair] for pair in added), [argv[0]]]
    start = argv.index(SHIM) - 1
    for word in argv[1:start]:
        # A flag begins a group, and what follows it belongs to it.
        if word.startswith("-") or len(groups[-1]) > 1 or groups[-1][0] == argv[0]:
            groups.append([word])
        else:
            groups[-1].append(word)
    end = len(argv) - len(plan.command)
    groups += [list(argv[start:end]), list(argv[end:])]
    lines = [shlex.join(group) for group in groups if group]
    return [f"  {line} \\" for line in lines[:-1]] + [f"  {lines[-1]}"]
