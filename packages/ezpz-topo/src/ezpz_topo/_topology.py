"""Everything that ezpz_topo knows of this process and its surroundings, each with its source."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ._accelerators import Accelerators, get_accelerators, get_cpu_count
from ._allocation import Allocation, get_allocation
from ._hosts import get_hostname
from ._rank import RankInfo, get_rank_info


@dataclass(frozen=True, slots=True)
class Topology:
    """One look at this process: who it is, what it was given, what the host has."""

    rank: RankInfo
    allocation: Allocation
    accelerators: Accelerators
    hostname: str
    cpu_count: int

    def explain(self) -> list[tuple[str, str, str]]:
        """Return ``(name, value, source)`` rows for people, one a fact."""
        rank, sources = self.rank, self.rank.sources
        job = self.allocation
        rows = [
            ("hostname", self.hostname, "uname"),
            ("scheduler", job.scheduler, job.source),
            ("job id", job.job_id or "-", job.source),
            ("nodes", str(job.num_nodes), job.source),
            ("device type", self.accelerators.device_type, self.accelerators.source),
            ("devices per node", str(self.accelerators.count), self.accelerators.source),
            ("cpus", str(self.cpu_count), "CPU affinity of this process"),
            ("launcher", rank.launcher, sources["rank"]),
            ("rank", str(rank.rank), sources["rank"]),
            ("world size", str(rank.world_size), sources["world_size"]),
            ("local rank", str(rank.local_rank), sources["local_rank"]),
            ("local world size", _or_unknown(rank.local_world_size), sources["local_world_size"]),
            ("node rank", _or_unknown(rank.node_rank), sources["node_rank"]),
        ]
        return rows + [("note", note, "") for note in rank.notes]


def detect(env: Mapping[str, str] | None = None) -> Topology:
    """Look at this process, its job and its host. Pure: nothing is set, started or written.

    Args:
        env: The environment to read; default ``os.environ``.

    Raises:
        TopoError: What was found is half set, impossible or contradictory.
    """
    env = os.environ if env is None else env
    return Topology(
        rank=get_rank_info(env),
        allocation=get_allocation(env),
        accelerators=get_accelerators(env),
        hostname=get_hostname(),
        cpu_count=get_cpu_count(),
    )


def _or_unknown(value: int | None) -> str:
    return "unknown" if value is None else str(value)
