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

# Which hosts a launch may use: all that there are, less what the user leaves out.


def select_hosts(
    hosts: Sequence[str], source: str, *, include: str = "", exclude: str = "", nodes: int = 0,
    spares: int = 0,
) -> tuple[tuple[str, ...], str]:  # fmt: skip
    """Return the first so many hosts, 0 for all, then the spares among them, and why."""
    kept, why = list(hosts), source
    for flag, nodelist in (("--include", include), ("--exclude", exclude)):
        if nodelist:
            try:
                named = expand_nodelist(nodelist)
            except NodelistError as error:
                raise UsageError(f"{flag}: {error}") from error
            chosen, unknown = match_hosts(named, hosts)
            if unknown:
                raise UsageError(
                    f"{flag} {unknown[0]}: none of the hosts {shown(hosts)} ({source}); "
                    "expected one of them"
                )
            kept = [host for host in kept if (host in chosen) == (flag == "--include")]
            why += f", {flag} {nodelist}"
    if not kept:
        raise UsageError(
            f"{why}: no host is left of {len(hosts)}; expected one at least; exclude fewer"
        )
    most = len(kept) - spares
    if most < 1 or nodes > most:
        flags = [f"-N {nodes}"] * bool(nodes) + [f"--spares {spares}"] * bool(spares)
        expected = f"expected from 1 to {most}" if most > 0 else "expected fewer spares than hosts"
        raise UsageError(f"{' '.join(flags)}: there are {len(kept)} hosts ({why}); {expected}")
    if nodes:
        kept, why = kept[: nodes + spares], f"the first {nodes} of {len(kept)}: {why}"
    if spares:
        why += f", and {spares} kept aside (--spares)"
    return tuple(kept), why


def match_hosts(names: Iterable[str], hosts: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return those of ``hosts`` that are named, each with its name, in order; and what is none."""
    # As same_host has it, but ten thousand of each are matched in one pass.
    exact = set(hosts)
    by_short: dict[str, str] = {}
    found: dict[str, str] = {}
    unknown: list[str] = []
    for name in names:
        host: str | None = name if name in exact else None
        if host is None and (":" in name or same_host(name, "localhost")):
            # IPv6 and loopback have several spellings, and only same_host knows them.
            host = next((each for each in hosts if same_host(each, name)), None)
        elif host is None:
            by_short = by_short or {short_name(each).lower(): each for each in reversed(hosts)}
            host = by_short.get(short_name(name).lower())
        if host is None:
            unknown.append(name)
        else:
            found[host] = name
    return found, unknown


def shown(hosts: Sequence[str]) -> str:
    """Return a few hosts for an error; there can be ten thousand."""
    return ", ".join([*hosts[:4], *(["..."] if len(hosts) > 4 else [])])


# How many ranks each of them gets: pure arithmetic, and an error where numbers contradict.


class Placement(NamedTuple):
    """Ranks on hosts, filled host by host."""

    hosts: tuple[str, ...]  # the hosts that get ranks, in rank order
    ranks: tuple[int, ...]  # how many each of them gets: all the same, but for a smaller last one
    source: str  # where the number of ranks comes from
    source_per_host: str  # where the number of ranks of a host comes from

    @property
    def nproc(self) -> int:
        return sum(self.ranks)

    @property
    def ppn(self) -> int:
        return self.ranks[0]


def place(
    hosts: Sequence[str], *, nproc: int | None, ppn: int | None, default_ppn: int, why_default: str
) -> Placement:
    per_host, why = (default_ppn, why_default) if ppn is None else (ppn, "--ppn")
    if nproc is None:
        total = per_host * len(hosts)
        why_total = why if len(hosts) == 1 else f"{len(hosts)} x {per_host}: {why}"
    else:
        total, why_total = nproc, "-n"
        crowded = -(-nproc // len(hosts))
        if ppn is not None and crowded > ppn:
            raise UsageError(
                f"-n {nproc} with --ppn {ppn} on {len(hosts)} hosts: room for "
                f"{ppn * len(hosts)} ranks; expected at most that many, or more hosts"
            )
        if crowded > per_host:
            # More than one a device: on several hosts they are filled evenly.
            per_host, why = crowded, f"-n {nproc} / {len(hosts)} hosts"
    per_host = min(per_host, total)
    full, rest = divmod(total, per_host)
    ranks = (per_host,) * full + ((rest,) if rest else ())
    return Placement(tuple(hosts[: len(ranks)]), ranks, why_total, why)


# Both, and what is known of these hosts: decided before any launcher is.


class Arrangement(NamedTuple):
    """Ranks on hosts, and what is known of these hosts."""

    placement: Placement
    on_this_host: bool  # whether this host alone has ranks
    source: str  # why these hosts
    cores: int  # CPU cores of each of the hosts in use; 0 where they are not known
    cores_source: str
    spares: tuple[str, ...] = ()  # hosts that are kept aside
    warning: str = ""  # what people should know of it; mostly empty


def arrange(
    topology: Topology, request: Request, *, hosts: Sequence[str], hosts_source: str,
    slots: int | Sequence[int] = 0,
) -> Arrangement:  # fmt: skip
    include, exclude, nodes = request.include, request.exclude, request.nodes or 0
    names, source = select_hosts(
        hosts, hosts_source, include=include, exclude=exclude, nodes=nodes, spares=request.spares
    )
    first_spare = len(names) - request.spares
    names, spares = names[:first_spare], names[first_spare:]
    of_each = [slots] * len(hosts) if isinstance(slots, int) else slots
    of_host = dict(zip(hosts, of_each, strict=True))
    told = [of_host[name] for name in names if of_host[name]]
    if len(told) < len(names):
        # Where some do not tell, all get the fewest.
        told = [min(told)] * len(told) if told else []
    alone = len(names) == 1 and _is_this_host(topology, names[0])
    cores = _cores(topology, here=alone)
    default, last, why = _ranks_per_host(topology, request, told, hosts_source, cores)
    if request.nodes and request.nproc:
        # So many hosts are requested, and so many are used.
        default = -(-request.nproc // request.nodes)
        why = f"-n {request.nproc} / -N {request.nodes}"
    placement = place(
        names, nproc=request.nproc, ppn=request.ppn, default_ppn=default, why_default=why
    )
    warning = ""
    if last and request.nproc is None and request.ppn is None:
        if last < default:
            ranks = (*placement.ranks[:-1], last)
            placement = placement._replace(ranks=ranks, source=f"{sum(ranks)}: {why}")
        elif len(set(told)) > 1:
            warning = (
                f"{why} are {shown([str(n) for n in told])}; {default} ranks a host are started: "
                "only the last host may have fewer than the others; expected the larger ones "
                "first; or choose by -n or --ppn"
            )
    used = placement.hosts
    here = alone or (len(used) == 1 and _is_this_host(topology, used[0]))
    if here and not alone:
        cores = _cores(topology, here=True)
    if not here:
        _check_names_of_this_host(topology, (*used, *spares), source)
    _check(topology, request, placement)
    return Arrangement(placement, here, source, *cores, spares, warning)


def _is_this_host(topology: Topology, host: str) -> bool:
    job = topology.allocation
    own = topology.hostname
    if job.scheduler != "none":
        if job.node_name is None:
            return False
        own = job.node_name
    return same_host(host, own) or same_host(host, "localhost") or is_own_address(host)


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
    own = [host for host in hosts if _is_this_host(topology, host)]
    if len(own) > 1:
        raise UsageError(
            f"{own[0]} and {own[1]} are both this host ({source}), and two ranks would have "
            "LOCAL_RANK 0 there; expected each host once; remove one of them from the hostfile"
        )


def _cores(topology: Topology, *, here: bool) -> tuple[int, str]:
    # This process's affinity holds for this host alone. A job's other nodes are taken to be as
    # this one, if this is one of them; and never to have more than the machine's file says, which
    # counts cores where the kernel counts hardware threads.
    machine = topology.machine
    if here:
        cores, source = topology.cpu_count, topology.cpu_source
    else:
        cores, source = topology.cpus_per_node, topology.cpus_per_node_source
    told = machine.cores_per_node or 0
    if told and (told < cores or not (here or topology.allocation.on_node)):
        return told, f"cores_per_node of {machine.name}.toml"
    return cores, source


def _ranks_per_host(
    topology: Topology, request: Request, slots: Sequence[int], hosts_source: str,
    known_cores: tuple[int, str],
) -> tuple[int, int, str]:  # fmt: skip
    """Return the ranks of a host, those of the last one where slots decide (else 0), and why."""
    per_host, last = (slots[0], slots[-1]) if slots else (0, 0)
    if last > per_host or any(n != per_host for n in slots[:-1]):
        # Ranks know their hosts by division: all but the last have as many.
        per_host = last = min(slots)
    if slots and hosts_source in ("argument", "HOSTFILE"):
        return per_host, last, f"slots of the hostfile ({hosts_source})"
    devices, job = topology.accelerators, topology.allocation
    # PBS has one slot where the job requested no mpiprocs.
    is_asked = job.scheduler == "pbs" and any(n > 1 for n in slots)
    if is_asked and per_host <= (devices.count or per_host):
        return per_host, last, f"mpiprocs of the job's chunks ({job.sources.get('slots')})"
    if devices.count:
        return devices.count, 0, f"one a device: {devices.source}"
    if devices.device_type != "cpu" and request.nproc is None and request.ppn is None:
        raise LaunchError(
            f"how many ranks? {devices.source}; expected -n, such as: ezpz-launch -n 4 "
            f"{request.command[0]} ..."
        )
    if slots and job.scheduler == "slurm":
        return per_host, last, f"no device; tasks of {job.sources.get('slots', hosts_source)}"
    cores, cores_source = known_cores
    number, why = 2, f"no device, and cores are {cores_source}: two"
    if cores == 1 and job.scheduler == "pbs":
        number, why = 1, f"no device; the job has one core ({cores_source})"
    elif cores:
        number = max(2, cores // 2)
        why = f"no device; one per two of {cores} cores, at least two ({cores_source})"
    return number, 0, why


def _check(topology: Topology, request: Request, placement: Placement) -> None:
    used, nodes = len(placement.hosts), request.nodes
    if request.min_nodes and request.min_nodes > used:
        raise UsageError(f"--min-nodes {request.min_nodes}: {used} hosts are used; expected fewer")
    if nodes and used < nodes:
        raise UsageError(
            f"-n {placement.nproc} on -N {nodes} hosts: {placement.ppn} ranks each "
            f"({placement.source_per_host}) fill {used} of them; expected -N {used}, or "
            f"-n from {placement.ppn * (nodes - 1) + 1} to {placement.ppn * nodes}"
        )
    devices = topology.accelerators
    if request.one_device and devices.device_type == "cpu":
        raise UsageError(f"--one-device: no device to show ({devices.source}); expected none of it")
    if request.one_device and 0 < devices.count < placement.ppn:
        raise UsageError(
            f"--one-device with {placement.ppn} ranks a host ({placement.source_per_host}): there "
            f"are {devices.count} devices ({devices.source}); expected at most one rank a device"
        )
