"""The nodes that a scheduler allocated, and the job that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ._errors import InvalidVariableError

if TYPE_CHECKING:
    from datetime import datetime

_HALVES = ("SLURM_JOBID", "SLURM_JOB_NODELIST", "PBS_ENVIRONMENT")
"""What a job sets beside SLURM_JOB_ID or PBS_JOBID, and nothing else does."""

UNREADABLE = {"FLUX_JOB_ID": "flux", "LSB_JOBID": "lsf", "COBALT_JOBID": "cobalt"}
"""Jobs of schedulers whose hosts we cannot read: this host alone would be wrong there."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes that a scheduler gave us, or this host.

    Attributes:
        scheduler: ``"slurm"``, ``"pbs"`` or ``"none"``: decided by job variables, never by
            the host's name or by which commands are installed.
        job_id: The scheduler's id of the job; None without a scheduler.
        hosts: The nodes of the job (of the step, for ranks that srun started), each once, in
            the scheduler's order. Empty in a `Topology` where only a command knows them,
            and every rank would start one.
        slots: Ranks that the scheduler foresees on each of ``hosts``, where known.
        name: The job's name, where it is known.
        queue: PBS's queue or Slurm's partition, where it is known.
        ends_at: End of the walltime (aware), where it is known.
        node_name: The one of ``hosts`` that this process runs on; None on a login node.
        sources: For each field the variable, file or command that it was read from.
        notes: What was found and ignored, in plain text.
    """

    scheduler: str
    job_id: str | None
    hosts: tuple[str, ...]
    slots: tuple[int, ...] | None = None
    name: str | None = None
    queue: str | None = None
    ends_at: datetime | None = None
    node_name: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def on_node(self) -> bool:
        """Whether this process runs on a node of the job, not on a login node."""
        return self.node_name is not None

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.hosts)


def detect_scheduler(env: Mapping[str, str]) -> str:
    """Return the job's scheduler, by its variables: slurm, pbs, none, or one of `UNREADABLE`."""
    slurm = env.get("SLURM_JOB_ID")
    pbs = env.get("PBS_JOBID")
    if slurm and pbs:
        raise InvalidVariableError(
            f"SLURM_JOB_ID={slurm[:40]} and PBS_JOBID={pbs[:40]}; expected one job; unset the one "
            "that is left over from another shell"
        )
    if slurm:
        return "slurm"
    if pbs:
        return "pbs"
    for name in _HALVES:
        if env.get(name):
            other = "SLURM_JOB_ID"
            if name.startswith("PBS"):
                other = "PBS_JOBID"
            raise InvalidVariableError(
                f"{name}={env[name][:40]} without {other}; expected a job to set both; "
                f"set {other}, or unset {name}"
            )
    for name, scheduler in UNREADABLE.items():
        if env.get(name):
            return scheduler
    return "none"
