"""Topology + Request -> LaunchPlan: pure, so that every command line can be shown and tested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ezpz_topo import Topology

from ._errors import LaunchError
from ._request import Request


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What will be started.

    Attributes:
        command: The user's words, verbatim.
        nproc: Number of ranks.
        hosts: Where they run, in rank order; here always this host.
        environment: What is added to the ranks' environment.
        sources: For each decision, by name, why it is so.
    """

    command: tuple[str, ...]
    nproc: int
    hosts: tuple[str, ...]
    environment: Mapping[str, str]
    sources: Mapping[str, str] = field(default_factory=dict)


def plan(
    topology: Topology, request: Request, *, port: int, user_env: Mapping[str, str]
) -> LaunchPlan:
    """Decide how many ranks run where, and with what environment.

    Args:
        topology: Where we are.
        request: What the user asked for.
        port: A TCP port that is free on this host, for the ranks' rendezvous.
        user_env: The environment we were called with; an OMP_NUM_THREADS there is kept.

    Raises:
        LaunchError: This version cannot launch here.
    """
    _refuse_other_nodes(topology)
    nproc, why = _nproc(topology, request)
    sources = {
        "nproc": why,
        "hosts": topology.allocation.sources["hosts"],
        "MASTER_ADDR": "every rank is on this host",
        "MASTER_PORT": "a free port of this host, a new one for each launch",
    }
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if "OMP_NUM_THREADS" not in user_env:
        environment["OMP_NUM_THREADS"] = str(max(1, topology.cpu_count // nproc))
        sources["OMP_NUM_THREADS"] = f"{topology.cpu_count} cores / {nproc} ranks, at least 1"
    return LaunchPlan(request.command, nproc, (topology.hostname,), environment, sources)


def _nproc(topology: Topology, request: Request) -> tuple[int, str]:
    if request.nproc is not None:
        return request.nproc, "-n"
    devices = topology.accelerators
    if devices.count:
        return devices.count, f"one a device: {devices.source}"
    if devices.device_type != "cpu":
        raise LaunchError(
            f"how many ranks? {devices.source}; expected -n, such as: ezpz-launch -n 4 "
            f"{request.command[0]} ..."
        )
    cores = topology.cpu_count
    return max(2, cores // 2), f"no device; one per two of {cores} cores, at least two"


def _refuse_other_nodes(topology: Topology) -> None:
    job = topology.allocation
    if job.num_nodes == 1 and job.on_node:
        return
    where = f"{job.num_nodes} nodes" if job.on_node else "a shell that is not on the job's node"
    direct = "srun -n RANKS" if job.scheduler == "slurm" else "mpiexec -n RANKS --ppn PER_NODE"
    raise LaunchError(
        f"{job.scheduler} job {job.job_id}: {where} ({job.sources['hosts']}), and this version of "
        f"ezpz-launch starts ranks on the host it runs on only; expected a job of one node; "
        f"use `{direct} COMMAND` there (ezpz.setup_torch works under it)"
    )
