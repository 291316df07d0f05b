"""Everything that is known of this process and its job, each value with its source."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ._allocation import Allocation, detect_scheduler
from ._cpus import cpu_count_with_source, cpus_per_node_with_source, parse_cores
from ._devices import Accelerators, get_accelerators
from ._errors import IncompleteLauncherError, MachineError, SchedulerError
from ._hosts import get_allocation
from ._machine import Machine, get_machine_info
from ._nodelist import MAX_HOSTS, fold_nodelist, get_hostname
from ._rank import ONE_PROCESS, RankInfo, get_rank_info

Row = tuple[str, object, str]  # name, value (None: not known), source


@dataclass(frozen=True, slots=True)
class Topology:
    """The facts on this process: its rank, its allocation, its host.

    Attributes:
        rank: Its rank.
        allocation: The job, or this host.
        machine: The facts on the machine.
        accelerators: The devices of this node that this process can use.
        hostname: This host's name.
        cpu_count: CPUs that this process may use.
        cpu_source: Where that comes from.
        cpus_per_node: CPUs of this node that the job may use.
        cpus_per_node_source: Where that comes from.
    """

    rank: RankInfo
    allocation: Allocation
    machine: Machine
    accelerators: Accelerators
    hostname: str
    cpu_count: int
    cpu_source: str
    cpus_per_node: int
    cpus_per_node_source: str

    def explain(self) -> list[Row]:
        """Return ``(name, value, source)`` rows, one a fact; a value of None is not known."""
        job = self.allocation
        devices = self.accelerators
        rank = self.rank
        sources = rank.sources
        return [
            ("machine", self.machine.name, self.machine.matched_by),
            ("hostname", self.hostname, "uname"),
            ("scheduler", job.scheduler, job.sources.get("scheduler", "its job's variables")),
            *_explain_job(job),
            ("nodes", *_call_or_explain(count_nodes, rank, job)),
            ("hosts", fold_nodelist(job.hosts) or None, job.sources["hosts"]),
            ("device type", devices.device_type, devices.source),
            ("devices per node", devices.count, devices.source),
            ("cpus per node", self.cpus_per_node, self.cpus_per_node_source),
            ("cpus", self.cpu_count, self.cpu_source),
            ("launcher", rank.launcher, sources["rank"]),
            ("rank", rank.rank, sources["rank"]),
            ("world size", rank.world_size, sources["world_size"]),
            ("world size total", *_call_or_explain(_count_places, rank, job, devices)),
            ("local rank", rank.local_rank, sources["local_rank"]),
            ("local world size", rank.local_world_size, sources["local_world_size"]),
            ("node index", *_call_or_explain(_find_node_index, rank, job)),
        ]

    def _repr_html_(self) -> str:
        from html import escape  # noqa: PLC0415 - only a notebook needs it

        table = ""
        for row in self.explain():
            cells = "".join(f"<td>{escape(str(cell))}</td>" for cell in row)
            table += f"<tr>{cells}</tr>"
        return f"<table>{table}</table>"

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found and ignored, in plain text."""
        return (
            *self.rank.notes, *self.allocation.notes, *self.machine.notes,
            *self.accelerators.notes,
        )  # fmt: skip


def detect(env: Mapping[str, str] | None = None, *, ask: bool | None = None) -> Topology:
    """Look at this process, its job and its host. Pure: nothing is set or written.

    Only a process on its own starts a command, and only without another source. It starts the
    scheduler's where the job's variables name no readable hosts or not its CPUs, and a vendor's
    tool where its driver is loaded. One of several ranks starts none, and may know no hosts then.

    Args:
        env: The environment to read; default ``os.environ``.
        ask: Whether the scheduler's commands may be started (see `get_allocation`).

    Raises:
        TopoError: What was found is half set, impossible or contradictory.
    """
    env = os.environ if env is None else env
    rank = get_rank_info(env)
    machine = get_machine_info(env)
    may_ask = ask
    if ask is None and rank.world_size > 1:
        may_ask = False  # not a command a rank
    try:
        job = get_allocation(env, ask=may_ask)
    except SchedulerError as error:
        if may_ask == ask:
            raise
        job = Allocation(detect_scheduler(env), None, (), sources={"hosts": str(error)})
    cpu_count, cpu_source = cpu_count_with_source()
    cpus_per_node, cpus_per_node_source = cpus_per_node_with_source(env)
    # Of a machine that we know a job has whole nodes.
    if job.scheduler == "pbs" and not (machine.devices_per_node or machine.cores_per_node):
        from ._pbs import cpus_of_job  # noqa: PLC0415 - only in a job of PBS

        commands = rank.world_size == 1 and ask is not False
        granted = cpus_of_job(job, env, commands=commands)
        if granted is not None and granted.here < cpu_count:
            cpu_count = granted.here
            cpu_source = granted.source
        if granted is not None and granted.fewest < cpus_per_node:
            cpus_per_node = granted.fewest
            cpus_per_node_source = granted.source
    return Topology(
        rank=rank,
        allocation=job,
        machine=machine,
        accelerators=_count_devices(env, rank, job, machine),
        hostname=get_hostname(),
        cpu_count=cpu_count,
        cpu_source=cpu_source,
        cpus_per_node=cpus_per_node,
        cpus_per_node_source=cpus_per_node_source,
    )


def imagine(machine: str, nodes: int = 1, env: Mapping[str, str] | None = None) -> Topology:
    """Return the result of `detect` in a hypothetical job of that many nodes of a machine.

    For planning from elsewhere: nothing is looked at. Numbers that the machine's file does not
    have are 0.

    Args:
        machine: A name of `known_machines`.
        nodes: Number of nodes; their names are made up.
        env: The environment that names the user's folders of machines; default ``os.environ``.

    Raises:
        MachineError: No machine has that name, its file is wrong, or ``nodes`` is impossible.
    """
    env = os.environ if env is None else env
    if not 1 <= nodes <= MAX_HOSTS:
        raise MachineError(f"{nodes} nodes; expected from 1 to {MAX_HOSTS}; name another number")
    # Only where its machines are: the job and the host of this environment are not meant.
    folders = ("EZPZ_MACHINES", "XDG_CONFIG_HOME", "HOME")
    machine_env = {name: env[name] for name in folders if name in env}
    machine_env["EZPZ_MACHINE"] = machine
    known = get_machine_info(machine_env, hostname="hypothetical")
    source = f"hypothetical: {nodes} nodes of {known.name}"
    width = max(4, len(str(nodes)))
    hosts = tuple(f"node{number:0{width}d}" for number in range(1, nodes + 1))
    file = f"{known.name}.toml"
    cores = known.cores_per_node or _count_bound_cores(known)
    cores_source = file if cores else f"not told by {file}"
    job_id = None if known.scheduler == "none" else "hypothetical"
    sources = dict.fromkeys(("scheduler", "job_id", "hosts", "node_name"), source)
    job = Allocation(known.scheduler, job_id, hosts, node_name=hosts[0], sources=sources)
    devices = Accelerators(
        known.device_type or "cpu", known.devices_per_node or 0, f"devices_per_node of {file}"
    )
    return Topology(
        rank=ONE_PROCESS,
        allocation=job,
        machine=known,
        accelerators=devices,
        hostname=hosts[0],
        cpu_count=cores,
        cpu_source=cores_source,
        cpus_per_node=cores,
        cpus_per_node_source=cores_source,
    )


def _count_bound_cores(machine: Machine) -> int:
    """Return the number of cores up to the highest that a machine's bind lists name."""
    count = 0
    for ranges in machine.cpu_bind.values():
        for text in ranges:
            count = max(count, max(parse_cores(text)) + 1)
    return count


def _explain_job(job: Allocation) -> list[Row]:
    if job.scheduler == "none":
        return []
    slots = None if job.slots is None else sum(job.slots)
    ends_at = None if job.ends_at is None else job.ends_at.isoformat()
    queue = "partition" if job.scheduler == "slurm" else "queue"
    values = {
        "job_id": ("job id", job.job_id),
        "name": ("job name", job.name),
        "queue": (queue, job.queue),
        "slots": ("slots", slots),
        "ends_at": ("ends at", ends_at),
        "node_name": ("node", job.node_name),
    }
    unknown = f"not told by {job.scheduler}'s variables"
    return [(*row, job.sources.get(key, unknown)) for key, row in values.items()]


def _call_or_explain(
    count: Callable[..., tuple[int, str]], *facts: object
) -> tuple[int | None, str]:
    """Return the number and its source, or None and why: a table can have a gap, a caller not."""
    try:
        return count(*facts)
    except IncompleteLauncherError as error:
        return None, str(error)


# How large the world is: nodes, devices, and the ranks that run or could run on them.


def get_world_size(
    env: Mapping[str, str] | None = None, *, total: bool = False, in_use: bool = False
) -> int:
    """Return the number of ranks; 1 for one process without a launcher.

    Args:
        env: The environment to read; default ``os.environ``.
        total: Instead of the ranks that run, those that the allocation has devices for:
            `get_world_size_total`.
        in_use: The ranks that run, which is the default.

    Raises:
        ValueError: Both are requested.
        TopoError: The environment is half set or contradicts itself (see `get_rank_info`).
    """
    if total and in_use:
        raise ValueError("get_world_size(total=True, in_use=True); expected one of them")
    if total:
        return get_world_size_total(env)
    return get_world_size_in_use(env)


def get_world_size_in_use(env: Mapping[str, str] | None = None) -> int:
    """Return the number of ranks that run; 1 for one process without a launcher.

    Raises:
        TopoError: The environment is half set or contradicts itself (see `get_rank_info`).
    """
    return get_rank_info(env).world_size


def get_world_size_total(env: Mapping[str, str] | None = None) -> int:
    """Return the number of ranks that all nodes together have room for.

    One a device; where there are no devices, the ranks that the scheduler foresees, else one
    a node. Never less than the ranks that run.

    Raises:
        TopoError: Ranks, job or devices cannot be known.
    """
    rank = get_rank_info(env)
    job = _get_job(rank, env)
    devices = _count_devices(env, rank, job, get_machine_info(env))
    return _count_places(rank, job, devices)[0]


def get_gpus_per_node(env: Mapping[str, str] | None = None) -> int:
    """Return the number of devices of this node that this process may use; 0 without any.

    Tiles count where the driver shows them as devices (Aurora: 12). A launcher that hides all
    devices but one from each rank makes this 1.

    Raises:
        TopoError: A variable that selects devices or the machine is wrong.
    """
    rank = get_rank_info(env)
    return _count_devices(env, rank, _get_job(rank, env), get_machine_info(env)).count


def get_num_nodes(env: Mapping[str, str] | None = None) -> int:
    """Return the number of nodes: of the job (the step, in a Slurm step), else that ranks run on.

    Ranks may be on fewer nodes than their job has; `get_node_index` counts those with ranks.

    Raises:
        TopoError: The job cannot be read, or the number of nodes cannot be known.
    """
    rank = get_rank_info(env)
    return count_nodes(rank, _get_job(rank, env))[0]


def get_node_index(env: Mapping[str, str] | None = None) -> int:
    """Return the index of this node among those that ranks are on; 0 for one process.

    Raises:
        TopoError: The environment is half set or contradicts itself, or nothing gives the index.
    """
    rank = get_rank_info(env)
    if rank.node_rank is not None:
        return rank.node_rank
    return _find_node_index(rank, _get_job(rank, env))[0]


def _get_job(rank: RankInfo, env: Mapping[str, str] | None) -> Allocation | None:
    """Return the job; None where only a command knows it, and every rank would start one."""
    if rank.world_size == 1:
        return get_allocation(env)
    try:
        return get_allocation(env, ask=False)
    except SchedulerError:
        return None


def _count_devices(
    env: Mapping[str, str] | None, rank: RankInfo, job: Allocation | None, machine: Machine
) -> Accelerators:
    """Return this node's accelerators; on a login node those that the machine's nodes have."""
    # On a node of the job the host itself is believed: a machine's CPU nodes have its name too.
    on_node = job is None or (job.scheduler != "none" and job.on_node)
    fallback = None
    if machine.devices_per_node and not on_node:
        source = f"devices_per_node of {machine.name}.toml"
        fallback = (machine.device_type, machine.devices_per_node, source)
    # What every rank calls starts no command.
    return get_accelerators(env, fallback=fallback, tools=rank.world_size == 1)


def count_nodes(rank: RankInfo, job: Allocation | None) -> tuple[int, str]:
    """Return the number of nodes of the job, else of the ranks, and its source."""
    if job is not None and job.scheduler != "none" and job.hosts:
        return job.num_nodes, job.sources["hosts"]
    if rank.num_nodes is not None:
        return rank.num_nodes, rank.sources["num_nodes"]
    # World size over local world size is a guess: 1 + 2 + 3 ranks would give 6, 3 and 2.
    per_node = rank.local_world_size
    raise IncompleteLauncherError(
        f"{rank.launcher}: {rank.world_size} ranks, {per_node or 'an unknown number'} of them on "
        "this node, and no job whose hosts can be read; expected to be told the number of nodes; "
        "start the ranks with ezpz-launch",
    )


def _count_places(rank: RankInfo, job: Allocation | None, devices: Accelerators) -> tuple[int, str]:
    """Return the number of ranks that the nodes have room for, and its source."""
    nodes, _ = count_nodes(rank, job)
    if devices.count:
        places = nodes * devices.count
        source = f"{nodes} nodes x {devices.count} devices"
    elif job is not None and job.slots:
        places = sum(job.slots)
        source = job.sources["slots"]
    else:
        places = nodes
        source = f"{nodes} nodes without devices"
    if places < rank.world_size:
        return rank.world_size, "the ranks that run"
    return places, source


def _find_node_index(rank: RankInfo, job: Allocation | None) -> tuple[int, str]:
    if rank.node_rank is not None:
        return rank.node_rank, rank.sources["node_rank"]
    per_node = rank.local_world_size or 0
    if job is not None and job.scheduler != "none" and job.node_name in job.hosts:
        index = job.hosts.index(job.node_name)
        # Only where every node of the job has as many ranks, and this one those of its place, is
        # the order of the ranks' nodes surely the job's.
        in_blocks = index * per_node + rank.local_rank == rank.rank
        in_turn = rank.local_rank * job.num_nodes + index == rank.rank
        if per_node * job.num_nodes == rank.world_size and (in_blocks or in_turn):
            return index, f"{job.node_name} in {job.sources['hosts']}"
    raise IncompleteLauncherError(
        f"{rank.launcher} does not tell which node this is ({rank.world_size} ranks, "
        f"{per_node or 'an unknown number'} of them here); expected NODE_RANK; start the ranks "
        "with ezpz-launch",
    )


def get_staged_path(path: str | os.PathLike[str], env: Mapping[str, str] | None = None) -> str:
    """Return where a file or folder is on this node's own disk; the path itself where it is not.

    ``ezpz-launch --stage`` brings the environment there, and ``--stage-data`` what it names.

    Args:
        path: As it is on the shared file system; a relative one is of the working directory.
        env: The environment to read; default ``os.environ``.
    """
    env = os.environ if env is None else env
    tree = env.get("EZPZ_STAGED", "")
    staged = tree + os.path.realpath(path)
    if tree and os.path.lexists(staged):
        return staged
    return os.fspath(path)
