"""Everything that ezpz_topo knows of this process and its surroundings, each with its source."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ._accelerators import Accelerators
from ._allocation import Allocation, get_allocation, scheduler_of
from ._cpus import cpu_count_with_source, cpus_per_node_with_source
from ._errors import IncompleteLauncherError, SchedulerError
from ._hosts import get_hostname
from ._machine import Machine
from ._match import get_machine_info
from ._nodelist import fold_nodelist
from ._rank import get_rank_info
from ._reading import RankInfo
from ._world import devices_here, node_index, num_nodes, world_size_total

Row = tuple[str, object, str]
"""Name, value (None: not known), source."""


@dataclass(frozen=True, slots=True)
class Topology:
    """One look at this process: who it is, what it was given, what the host has.

    Attributes:
        rank: Who this process is.
        allocation: The job, or this host.
        machine: What is known of the machine.
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
        job, machine, devices = self.allocation, self.machine, self.accelerators
        rows: list[Row] = [
            ("machine", machine.name, machine.matched_by),
            ("hostname", self.hostname, "uname"),
            ("scheduler", job.scheduler, job.sources.get("scheduler", "its job's variables")),
        ]
        if job.scheduler != "none":
            rows += self._explain_job()
        nodes, nodes_source = _or_why(num_nodes, self.rank, job)
        rows += [
            ("nodes", nodes, nodes_source),
            ("hosts", fold_nodelist(job.hosts) or None, job.sources["hosts"]),
            ("device type", devices.device_type, devices.source),
            ("devices per node", devices.count, devices.source),
            ("cpus per node", self.cpus_per_node, self.cpus_per_node_source),
            ("cpus", self.cpu_count, self.cpu_source),
        ]
        return rows + self._explain_rank()

    @property
    def notes(self) -> tuple[str, ...]:
        """What was seen and set aside, in words for people."""
        parts = (self.rank, self.allocation, self.machine, self.accelerators)
        return tuple(note for part in parts for note in part.notes)

    def _explain_job(self) -> list[Row]:
        job = self.allocation
        ends = None if job.ends_at is None else job.ends_at.isoformat()
        values = {
            "job_id": job.job_id,
            "name": job.name,
            "queue": job.queue,
            "slots": None if job.slots is None else sum(job.slots),
            "ends_at": ends,
            "node_name": job.node_name,
        }
        titles = {
            "job_id": "job id",
            "name": "job name",
            "queue": "partition" if job.scheduler == "slurm" else "queue",
            "slots": "slots",
            "ends_at": "ends at",
            "node_name": "node",
        }
        untold = f"not told by {job.scheduler}'s variables"
        return [(titles[k], value, job.sources.get(k, untold)) for k, value in values.items()]

    def _room(self, rank: RankInfo, job: Allocation) -> tuple[int, str]:
        return world_size_total(rank, job, self.accelerators)

    def _explain_rank(self) -> list[Row]:
        rank, sources = self.rank, self.rank.sources
        index, index_source = _or_why(node_index, rank, self.allocation)
        return [
            ("launcher", rank.launcher, sources["rank"]),
            ("rank", rank.rank, sources["rank"]),
            ("world size", rank.world_size, sources["world_size"]),
            ("world size total", *_or_why(self._room, rank, self.allocation)),
            ("local rank", rank.local_rank, sources["local_rank"]),
            ("local world size", rank.local_world_size, sources["local_world_size"]),
            ("node index", index, index_source),
        ]


def detect(env: Mapping[str, str] | None = None, *, ask: bool | None = None) -> Topology:
    """Look at this process, its job and its host. Pure: nothing is set or written.

    A command is started only by a process on its own, and where nothing else tells: the
    scheduler's where the job's variables name no readable hosts or not its CPUs, a vendor's tool
    where its driver is loaded. One of several ranks starts none, and may know no hosts then.

    Args:
        env: The environment to read; default ``os.environ``.
        ask: Whether the scheduler's commands may be started (see `get_allocation`).

    Raises:
        TopoError: What was found is half set, impossible or contradictory.
    """
    env = os.environ if env is None else env
    rank, machine = get_rank_info(env), get_machine_info(env)
    job = _job_of(rank, env, ask)
    cpu_count, cpu_source = cpu_count_with_source()
    cpus_per_node, cpus_per_node_source = cpus_per_node_with_source(env)
    # Of a machine that we know a job has whole nodes.
    if job.scheduler == "pbs" and not (machine.devices_per_node or machine.cores_per_node):
        from ._pbs import cpus_of_job  # noqa: PLC0415  # only a job of PBS needs it

        told = cpus_of_job(job, env, commands=rank.world_size == 1 and ask is not False)
        if told and told[0] < cpu_count:
            cpu_count, cpu_source = told[0], told[2]
        if told and told[1] < cpus_per_node:
            cpus_per_node, cpus_per_node_source = told[1], told[2]
    return Topology(
        rank=rank,
        allocation=job,
        machine=machine,
        accelerators=devices_here(env, rank, job, machine),
        hostname=get_hostname(),
        cpu_count=cpu_count,
        cpu_source=cpu_source,
        cpus_per_node=cpus_per_node,
        cpus_per_node_source=cpus_per_node_source,
    )


def _job_of(rank: RankInfo, env: Mapping[str, str], ask: bool | None) -> Allocation:
    """Return the job, without its hosts where each of many ranks would have to ask for them."""
    if ask is not None or rank.world_size == 1:
        return get_allocation(env, ask=ask)
    try:
        return get_allocation(env, ask=False)
    except SchedulerError as error:
        scheduler = scheduler_of(env)
        return Allocation(scheduler, None, (), sources={"hosts": str(error)})


def _or_why(
    ask: Callable[[RankInfo, Allocation], tuple[int, str]], rank: RankInfo, job: Allocation
) -> tuple[int | None, str]:
    """Return what is known, or None and why not: a table can live with a gap, a caller cannot."""
    try:
        return ask(rank, job)
    except IncompleteLauncherError as error:
        return None, str(error)
