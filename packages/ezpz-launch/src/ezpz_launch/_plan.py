"""Topology + Request -> LaunchPlan: pure, so that every command line can be shown and tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ezpz_topo import Machine, Topology, same_host

from ._cores import count_cores, read_cores
from ._errors import LaunchError, UsageError
from ._identify import Launcher
from ._place import Placement, place
from ._request import Request
from ._select import select_hosts


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What will be started.

    Attributes:
        command: The user's words, verbatim.
        launcher: What starts the ranks.
        placement: How many ranks on which hosts.
        machine: The machine's flags and options.
        on_this_host: Whether this host alone has ranks.
        hosts_of_job: Number of hosts that there are to choose from.
        hostfile: Path of the file that names the hosts, where the launcher reads one.
        devices: Devices to ask the scheduler for on each host; 0 for none.
        flags: The machine's flags for this launcher.
        unbound: Whether the user wants no binding, and the launcher is to be told so.
        cpu_bind: Cores of each rank of a host; empty for no list.
        depth: Cores for each rank where the machine binds in order; 0 where it does not.
        launcher_args: The user's words for the launcher.
        environment: What is added to the ranks' environment.
        as_root: Whether we are root.
        sources: For each decision, by name, why it is so.
        notes: What people should know.
    """

    command: tuple[str, ...]
    launcher: Launcher
    placement: Placement
    machine: Machine
    on_this_host: bool
    hosts_of_job: int
    hostfile: str
    devices: int
    flags: tuple[str, ...]
    unbound: bool
    cpu_bind: tuple[str, ...]
    depth: int
    launcher_args: tuple[str, ...]
    environment: Mapping[str, str]
    as_root: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def nproc(self) -> int:
        """Number of ranks in all."""
        return self.placement.nproc


def plan(
    topology: Topology,
    request: Request,
    launcher: Launcher,
    *,
    hosts: Sequence[str],
    hosts_source: str,
    slots: int = 0,
    hostfile: str,
    port: int,
    user_env: Mapping[str, str],
    as_root: bool = False,
) -> LaunchPlan:
    """Decide how many ranks run where, and with what environment.

    Args:
        topology: Where we are.
        request: What the user asked for.
        launcher: What starts the ranks.
        hosts: The hosts that there are.
        hosts_source: Where they come from.
        slots: The ranks foreseen on each host, as the one with the fewest has; 0 if not told.
        hostfile: Where a file with the hosts in use will be, if the launcher needs one.
        port: A TCP port for the ranks' rendezvous.
        user_env: The environment we were called with; an OMP_NUM_THREADS there is kept.
        as_root: Whether we are root.

    Raises:
        LaunchError: What was asked for contradicts itself, or cannot be done here.
    """
    names, why_hosts = select_hosts(
        hosts,
        hosts_source,
        include=request.include,
        exclude=request.exclude,
        nodes=request.nodes or 0,
    )
    default, why_default = _ranks_per_host(topology, request, slots, hosts_source)
    if request.nodes and request.nproc:
        # So many hosts are asked for, and so many are used.
        default = -(-request.nproc // request.nodes)
        why_default = f"-n {request.nproc} / -N {request.nodes}"
    placement = place(
        names, nproc=request.nproc, ppn=request.ppn, default_ppn=default, why_default=why_default
    )
    here = len(placement.hosts) == 1 and _is_this_host(topology, placement.hosts[0])
    if not here and any(same_host(host, "localhost") for host in placement.hosts):
        raise UsageError(
            f"localhost among several hosts ({why_hosts}): the others would not find it; expected "
            "this host's own name; correct the hostfile"
        )
    sources = {
        "nproc": placement.source,
        "ppn": placement.source_per_host,
        "hosts": why_hosts,
        "launcher": launcher.source,
    }
    cpu_bind, sources["cpu_bind"] = _cpu_bind(topology.machine, request, placement, launcher)
    environment, why = _environment(
        topology, request, placement, cpu_bind, port=port, user_env=user_env, here=here
    )
    sources |= why
    devices = 0 if topology.accelerators.device_type == "cpu" else topology.accelerators.count
    flags = topology.machine.launcher_flags if launcher.kind == topology.machine.launcher else ()
    if request.cpu_bind:
        flags = tuple(flag for flag in flags if not flag.startswith("--cpu-bind"))
    bound_in_order = "--cpu-bind=depth" in flags
    depth = max(1, topology.cpus_per_node // placement.ppn) if bound_in_order else 0
    if bound_in_order:
        sources["cpu_bind"] = f"launcher_flags of {topology.machine.name}.toml"
    return LaunchPlan(
        command=request.command,
        launcher=launcher,
        placement=placement,
        machine=topology.machine,
        on_this_host=here,
        hosts_of_job=topology.allocation.num_nodes,
        hostfile=hostfile,
        devices=devices if topology.machine.devices_per_node else 0,
        flags=flags,
        unbound=request.cpu_bind == "none",
        cpu_bind=cpu_bind,
        depth=depth,
        launcher_args=request.launcher_args,
        environment=environment,
        as_root=as_root,
        sources=sources,
        notes=launcher.notes,
    )


def _is_this_host(topology: Topology, host: str) -> bool:
    job = topology.allocation
    if job.scheduler != "none":
        return job.node_name is not None and same_host(host, job.node_name)
    return any(same_host(host, name) for name in (topology.hostname, "localhost", "127.0.0.1"))


def _ranks_per_host(
    topology: Topology, request: Request, slots: int, hosts_source: str
) -> tuple[int, str]:
    if slots and hosts_source in ("argument", "HOSTFILE"):
        return slots, f"slots of the hostfile ({hosts_source})"
    devices = topology.accelerators
    if devices.count:
        return devices.count, f"one a device: {devices.source}"
    if devices.device_type != "cpu" and request.nproc is None and request.ppn is None:
        raise LaunchError(
            f"how many ranks? {devices.source}; expected -n, such as: ezpz-launch -n 4 "
            f"{request.command[0]} ..."
        )
    if slots and topology.allocation.scheduler == "slurm":
        return (
            slots,
            f"no device; tasks of {topology.allocation.sources.get('slots', hosts_source)}",
        )
    cores = topology.cpu_count
    return max(2, cores // 2), f"no device; one per two of {cores} cores, at least two"


def _cpu_bind(
    machine: Machine, request: Request, placement: Placement, launcher: Launcher
) -> tuple[tuple[str, ...], str]:
    name, why = request.cpu_bind, "--cpu-bind"
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
    if placement.ppn > len(listed):
        if request.cpu_bind:
            raise UsageError(
                f"--cpu-bind {name}: {len(listed)} ranges for {placement.ppn} ranks a host; "
                "expected one a rank"
            )
        return (), f"{placement.ppn} ranks a host are more than the {len(listed)} ranges of {name}"
    return listed[: placement.ppn], f"{name}: {why}"


def _environment(
    topology: Topology,
    request: Request,
    placement: Placement,
    cpu_bind: Sequence[str],
    *,
    port: int,
    user_env: Mapping[str, str],
    here: bool,
) -> tuple[dict[str, str], dict[str, str]]:
    """Return what is added to the ranks' environment, and for each variable why."""
    machine = topology.machine
    first = placement.hosts[0]
    address, why = "127.0.0.1", "every rank is on this host"
    if not here:
        address, why = first, "the first host"
        if machine.hsn_suffix and not first.replace(".", "").isdigit() and ":" not in first:
            address = first.partition(".")[0] + machine.hsn_suffix
            why += f", on the fast network ({machine.name}.toml)"
    environment = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    sources = {"MASTER_ADDR": why}
    sources["MASTER_PORT"] = "a free port of this host, a new one for each launch"
    if not here:
        sources["MASTER_PORT"] = "a port below the ephemeral ones, a new one for each launch"
    threads, why = _threads(topology, placement, cpu_bind)
    if threads and "OMP_NUM_THREADS" not in user_env:
        environment["OMP_NUM_THREADS"], sources["OMP_NUM_THREADS"] = str(threads), why
    for name, value in machine.environment.items():
        if name not in user_env:
            environment[name], sources[name] = value, f"{machine.name}.toml"
    if request.machine:
        # The ranks are on the machine that the user named, whatever their host looks like.
        environment["EZPZ_MACHINE"], sources["EZPZ_MACHINE"] = request.machine, "--machine"
    for pair in request.env:
        name, _, value = pair.partition("=")
        environment[name], sources[name] = value, "--env"
    return environment, sources


def _threads(topology: Topology, placement: Placement, cpu_bind: Sequence[str]) -> tuple[int, str]:
    """Return the threads of a rank, 0 where the cores are not known, and why so many."""
    if cpu_bind:
        return min(map(count_cores, cpu_bind)), "the cores that each rank is bound to"
    cores, ranks = topology.cpu_count, placement.ppn
    return cores and max(1, cores // ranks), f"{cores} cores / {ranks} ranks, at least 1"
