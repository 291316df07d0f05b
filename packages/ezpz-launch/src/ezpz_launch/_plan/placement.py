"""On which hosts ranks start, and how many on each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ezpz_launch._errors import LaunchError, UsageError
from ezpz_launch._plan.options import Request
from ezpz_topo import (
    NodelistError,
    Topology,
    expand_nodelist,
    is_own_address,
    same_host,
    short_name,
)

# Which hosts a launch may use: all that there are, less those that the user leaves out.


def select_hosts(
    hosts: Sequence[str],
    source: str,
    *,
    include: str = "",
    exclude: str = "",
    nodes: int = 0,
    spares: int = 0,
) -> tuple[tuple[str, ...], str]:
    """Return the first ``nodes`` hosts (0: all) with the spares behind them, and the reason."""
    selected = list(hosts)
    why = source
    if include:
        named = _match_nodelist("--include", include, hosts, source)
        selected = [host for host in selected if host in named]
        why += f", --include {include}"
    if exclude:
        named = _match_nodelist("--exclude", exclude, hosts, source)
        selected = [host for host in selected if host not in named]
        why += f", --exclude {exclude}"
    if not selected:
        raise UsageError(
            f"{why}: no host is left of {len(hosts)}; expected one at least; exclude fewer"
        )
    _check_number_of_hosts(len(selected), why, nodes, spares)
    if nodes:
        why = f"the first {nodes} of {len(selected)}: {why}"
        selected = selected[: nodes + spares]
    if spares:
        why += f", and {spares} kept aside (--spares)"
    return tuple(selected), why


def _match_nodelist(flag: str, nodelist: str, hosts: Sequence[str], source: str) -> dict[str, str]:
    try:
        names = expand_nodelist(nodelist)
    except NodelistError as error:
        raise UsageError(f"{flag}: {error}") from error
    matches, unknown = match_hosts(names, hosts)
    if unknown:
        raise UsageError(
            f"{flag} {unknown[0]}: none of the hosts {abbreviate(hosts)} ({source}); "
            "expected one of them"
        )
    return matches


def _check_number_of_hosts(available: int, why: str, nodes: int, spares: int) -> None:
    most = available - spares
    if most >= 1 and nodes <= most:
        return
    flags: list[str] = []
    if nodes:
        flags.append(f"-N {nodes}")
    if spares:
        flags.append(f"--spares {spares}")
    expected = "expected fewer spares than hosts"
    if most >= 1:
        expected = f"expected from 1 to {most}"
    raise UsageError(f"{' '.join(flags)}: there are {available} hosts ({why}); {expected}")


def match_hosts(names: Iterable[str], hosts: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Find the hosts that are named.

    Returns:
        For each host that is named, in the order of ``names``, its name; and the names of no host.
    """
    # As same_host has it, but ten thousand of each are matched in one pass.
    exact = set(hosts)
    by_short_name: dict[str, str] = {}
    matches: dict[str, str] = {}
    unknown: list[str] = []
    for name in names:
        host: str | None = None
        if name in exact:
            host = name
        elif ":" in name or same_host(name, "localhost"):
            host = _find_same_host(name, hosts)
        else:
            if not by_short_name:
                by_short_name = _map_short_names(hosts)
            host = by_short_name.get(short_name(name).lower())
        if host is None:
            unknown.append(name)
        else:
            matches[host] = name
    return matches, unknown


def _find_same_host(name: str, hosts: Sequence[str]) -> str | None:
    # IPv6 and loopback have several spellings, and only same_host knows them.
    for host in hosts:
        if same_host(host, name):
            return host
    return None


def _map_short_names(hosts: Sequence[str]) -> dict[str, str]:
    by_short_name: dict[str, str] = {}
    for host in hosts:
        by_short_name.setdefault(short_name(host).lower(), host)
    return by_short_name


def abbreviate(hosts: Sequence[str]) -> str:
    """List a few hosts for an error; there can be ten thousand."""
    text = ", ".join(hosts[:4])
    if len(hosts) > 4:
        text += ", ..."
    return text


# How many ranks each of them gets: pure arithmetic, and an error if numbers contradict.


class Placement(NamedTuple):
    """Ranks on hosts, filled host by host."""

    hosts: tuple[str, ...]  # the hosts that get ranks, in rank order
    ranks: tuple[int, ...]  # the number of each host: the same for all, or less for the last one
    source: str  # why there are that many ranks
    source_per_host: str  # why a host has that many ranks

    @property
    def nproc(self) -> int:
        return sum(self.ranks)

    @property
    def ppn(self) -> int:
        return self.ranks[0]


def place_ranks(
    hosts: Sequence[str], *, nproc: int | None, ppn: int | None, default_ppn: int, why_default: str
) -> Placement:
    if ppn is None:
        per_host = default_ppn
        why = why_default
    else:
        per_host = ppn
        why = "--ppn"
    if nproc is None:
        total = per_host * len(hosts)
        why_total = why
        if len(hosts) > 1:
            why_total = f"{len(hosts)} x {per_host}: {why}"
    else:
        total = nproc
        why_total = "-n"
        even = -(-nproc // len(hosts))
        if ppn is not None and even > ppn:
            raise UsageError(
                f"-n {nproc} with --ppn {ppn} on {len(hosts)} hosts: room for "
                f"{ppn * len(hosts)} ranks; expected at most that many, or more hosts"
            )
        if even > per_host:
            # More than one a device: on several hosts they are filled evenly.
            per_host = even
            why = f"-n {nproc} / {len(hosts)} hosts"
    per_host = min(per_host, total)
    full_hosts, rest = divmod(total, per_host)
    ranks = [per_host] * full_hosts
    if rest:
        ranks.append(rest)
    return Placement(tuple(hosts[: len(ranks)]), tuple(ranks), why_total, why)


# Both, and the facts of these hosts: decided before any launcher is.


class Arrangement(NamedTuple):
    """Ranks on hosts, and the facts of these hosts."""

    placement: Placement
    on_this_host: bool  # whether this host alone has ranks
    source: str  # why these hosts
    cores: int  # CPU cores of each of the hosts in use; 0 if unknown
    cores_source: str
    spares: tuple[str, ...] = ()  # hosts that replace those that fail
    warning: str = ""  # about slots that are not followed; mostly empty


class _Cores(NamedTuple):
    """CPU cores of a host."""

    number: int  # 0 if unknown
    source: str


class _Default(NamedTuple):
    """Ranks of a host if the user requests no number."""

    per_host: int
    last: int  # ranks of the last host; 0 if it has as many as the others
    why: str


def arrange(
    topology: Topology,
    request: Request,
    *,
    hosts: Sequence[str],
    hosts_source: str,
    slots: int | Sequence[int] = 0,
) -> Arrangement:
    """Select the hosts of a request, and place its ranks on them.

    ``slots`` are the ranks foreseen on each of ``hosts``, 0 if unknown; one number for all.

    Raises:
        UsageError: Numbers contradict each other, or a host cannot be used.
        LaunchError: The number of devices is unknown, and no number of ranks is requested.
    """
    selected, source = select_hosts(
        hosts,
        hosts_source,
        include=request.include,
        exclude=request.exclude,
        nodes=request.nodes or 0,
        spares=request.spares,
    )
    first_spare = len(selected) - request.spares
    names = selected[:first_spare]
    spares = selected[first_spare:]
    slots_in_use = _find_slots(names, hosts, slots)
    is_alone = len(names) == 1 and _is_this_host(topology, names[0])
    cores = _count_cores(topology, on_this_host=is_alone)
    default = _choose_default(topology, request, slots_in_use, hosts_source, cores)
    if request.nodes and request.nproc:
        # That many hosts are requested, and that many are used.
        per_host = -(-request.nproc // request.nodes)
        why = f"-n {request.nproc} / -N {request.nodes}"
        default = default._replace(per_host=per_host, why=why)
    placement = place_ranks(
        names,
        nproc=request.nproc,
        ppn=request.ppn,
        default_ppn=default.per_host,
        why_default=default.why,
    )
    warning = ""
    if default.last and request.nproc is None and request.ppn is None:
        placement = _reduce_last_host(placement, default)
        warning = _describe_unused_slots(slots_in_use, default)
    used = placement.hosts
    on_this_host = is_alone or (len(used) == 1 and _is_this_host(topology, used[0]))
    if on_this_host and not is_alone:
        cores = _count_cores(topology, on_this_host=True)
    if not on_this_host:
        _check_names_of_this_host(topology, (*used, *spares), source)
    _check_hosts_in_use(request, placement)
    _check_one_device(topology, request, placement)
    return Arrangement(placement, on_this_host, source, cores.number, cores.source, spares, warning)


def _find_slots(
    names: Sequence[str], hosts: Sequence[str], slots: int | Sequence[int]
) -> list[int]:
    """Return the slots of the hosts in use that have any; empty if none has."""
    if isinstance(slots, int):
        slots = [slots] * len(hosts)
    by_host = dict(zip(hosts, slots, strict=True))
    known = [by_host[name] for name in names if by_host[name]]
    if known and len(known) < len(names):
        # If some have none, all get the fewest.
        return [min(known)] * len(known)
    return known


def _reduce_last_host(placement: Placement, default: _Default) -> Placement:
    """Place as many ranks on the last host as it has slots."""
    if default.last == default.per_host:
        return placement
    ranks = (*placement.ranks[:-1], default.last)
    return placement._replace(ranks=ranks, source=f"{sum(ranks)}: {default.why}")


def _describe_unused_slots(slots: Sequence[int], default: _Default) -> str:
    """Describe slots that stay empty because hosts differ; '' if there are none."""
    if default.last < default.per_host or len(set(slots)) == 1:
        return ""
    numbers = abbreviate([str(number) for number in slots])
    return (
        f"{default.why} are {numbers}; {default.per_host} ranks a host are started: "
        "only the last host may have fewer than the others; expected the larger ones "
        "first; or choose by -n or --ppn"
    )


def _is_this_host(topology: Topology, host: str) -> bool:
    job = topology.allocation
    own_name = topology.hostname
    if job.scheduler != "none":
        if job.node_name is None:
            return False
        own_name = job.node_name
    return same_host(host, own_name) or same_host(host, "localhost") or is_own_address(host)


def _check_names_of_this_host(topology: Topology, hosts: Sequence[str], source: str) -> None:
    """Refuse a name that means another host on each host, and two names of this one."""
    loopback = [host for host in hosts if same_host(host, "localhost")]
    if loopback and len(hosts) == 1:
        raise UsageError(
            f"{loopback[0]} ({source}): this host is no node of job {topology.allocation.job_id}; "
            "expected a node's own name; correct the hostfile"
        )
    if loopback:
        raise UsageError(
            f"{loopback[0]} among several hosts ({source}): the others would not find it; expected "
            "this host's own name; correct the hostfile"
        )
    own_names = [host for host in hosts if _is_this_host(topology, host)]
    if len(own_names) > 1:
        raise UsageError(
            f"{own_names[0]} and {own_names[1]} are both this host ({source}), and two ranks would "
            "have LOCAL_RANK 0 there; expected each host once; remove one of them from the hostfile"
        )


def _count_cores(topology: Topology, *, on_this_host: bool) -> _Cores:
    # This process's affinity holds for this host alone. A job's other nodes are taken to be as
    # this one, if this is one of them; and never to have more than the machine's file has, which
    # counts cores where the kernel counts hardware threads.
    if on_this_host:
        cores = topology.cpu_count
        source = topology.cpu_source
    else:
        cores = topology.cpus_per_node
        source = topology.cpus_per_node_source
    machine = topology.machine
    is_measured = on_this_host or topology.allocation.on_node
    if machine.cores_per_node and (machine.cores_per_node < cores or not is_measured):
        return _Cores(machine.cores_per_node, f"cores_per_node of {machine.name}.toml")
    return _Cores(cores, source)


def _choose_default(
    topology: Topology,
    request: Request,
    slots: Sequence[int],
    hosts_source: str,
    cores: _Cores,
) -> _Default:
    """Choose the ranks of a host: by slots, then devices, then tasks of Slurm, then cores."""
    devices = topology.accelerators
    job = topology.allocation
    if slots and hosts_source in ("argument", "HOSTFILE"):
        return _default_from_slots(slots, f"slots of the hostfile ({hosts_source})")
    # PBS has one slot where the job requested no mpiprocs.
    if slots and job.scheduler == "pbs" and max(slots) > 1:
        why = f"mpiprocs of the job's chunks ({job.sources.get('slots')})"
        default = _default_from_slots(slots, why)
        if not devices.count or default.per_host <= devices.count:
            return default
    if devices.count:
        return _Default(devices.count, 0, f"one a device: {devices.source}")
    if devices.device_type != "cpu" and request.nproc is None and request.ppn is None:
        raise LaunchError(
            f"how many ranks? {devices.source}; expected -n, such as: ezpz-launch -n 4 "
            f"{request.command[0]} ..."
        )
    if slots and job.scheduler == "slurm":
        why = f"no device; tasks of {job.sources.get('slots', hosts_source)}"
        return _default_from_slots(slots, why)
    return _default_from_cores(cores, in_pbs=job.scheduler == "pbs")


def _default_from_cores(cores: _Cores, *, in_pbs: bool) -> _Default:
    if cores.number == 0:
        return _Default(2, 0, f"no device, and cores are {cores.source}: two")
    if cores.number == 1 and in_pbs:
        return _Default(1, 0, f"no device; the job has one core ({cores.source})")
    why = f"no device; one per two of {cores.number} cores, at least two ({cores.source})"
    return _Default(max(2, cores.number // 2), 0, why)


def _default_from_slots(slots: Sequence[int], why: str) -> _Default:
    first = slots[0]
    last = slots[-1]
    all_but_last = set(slots[:-1])
    if last > first or len(all_but_last) > 1:
        # Ranks know their hosts by division: all but the last have as many.
        return _Default(min(slots), min(slots), why)
    return _Default(first, last, why)


def _check_hosts_in_use(request: Request, placement: Placement) -> None:
    used = len(placement.hosts)
    nodes = request.nodes
    if request.min_nodes and request.min_nodes > used:
        raise UsageError(f"--min-nodes {request.min_nodes}: {used} hosts are used; expected fewer")
    if nodes and used < nodes:
        raise UsageError(
            f"-n {placement.nproc} on -N {nodes} hosts: {placement.ppn} ranks each "
            f"({placement.source_per_host}) fill {used} of them; expected -N {used}, or "
            f"-n from {placement.ppn * (nodes - 1) + 1} to {placement.ppn * nodes}"
        )


def _check_one_device(topology: Topology, request: Request, placement: Placement) -> None:
    if not request.one_device:
        return
    devices = topology.accelerators
    if devices.device_type == "cpu":
        raise UsageError(f"--one-device: no device to show ({devices.source}); expected none of it")
    if 0 < devices.count < placement.ppn:
        raise UsageError(
            f"--one-device with {placement.ppn} ranks a host ({placement.source_per_host}): there "
            f"are {devices.count} devices ({devices.source}); expected at most one rank a device"
        )
