"""What will be started, decided whole before anything starts, and explained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ezpz_topo import Machine, Topology, fold_nodelist

from ._environment import Chosen, bind, choose_options, ranks_environment, set_aside
from ._launchers import LAUNCHERS, SHIM, Launcher
from ._options import Request, settings
from ._placement import Arrangement, Placement, arrange

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
        control: Whether EZPZ_CONTROL will be in the launcher's environment, for the ranks.
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
    control: bool = False
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
    # With columns, those of a terminal, reasons are broken into lines below each other.
    rows = _decisions(plan)
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    # One long value must not push every source off the screen.
    widths[1] = min(widths[1], 40)
    lines = ["would run:", *_command(plan, argv), ""]
    if hostfile:
        long = len(hostfile) > 8
        listed = [*hostfile[:6], "...", hostfile[-1]] if long else hostfile
        lines += [f"with {plan.hostfile}:", *(f"  {line}" for line in listed), ""]
    lines += ["because:"]
    for name, value, why in rows:
        start = f"  {name:<{widths[0]}}  {value:<{widths[1]}}  "
        lines += _wrapped(start, f"({why})", columns) if columns else [f"{start}({why})"]
    return "\n".join([*lines, *(f"note: {note}" for note in (*plan.warnings, *plan.notes))])


def _wrapped(start: str, text: str, columns: int) -> list[str]:
    from textwrap import wrap  # noqa: PLC0415  # only a terminal needs it

    return wrap(
        text, max(columns, len(start) + 18), initial_indent=start,
        subsequent_indent=" " * len(start), break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def explain_json(plan: LaunchPlan, argv: Sequence[str], hostfile: Sequence[str]) -> str:
    import json  # noqa: PLC0415  # only this needs it

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
    import shlex  # noqa: PLC0415  # only this needs it

    added = [f"{name}={value}" for name, value in plan.environment.items()]
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
