"""The nodes we were given: by Slurm, by PBS, or just this host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ._errors import InvalidVariableError, SchedulerError, TopoError
from ._nodelist import get_hostname

TYPE_CHECKING = False  # typing and datetime would cost 3 ms, and nothing here runs them
if TYPE_CHECKING:
    from datetime import datetime
    from typing import Protocol

    class _Scheduler(Protocol):
        def allocation(self, env: Mapping[str, str], *, commands: bool) -> Allocation: ...
        def end_time(self, job_id: str, env: Mapping[str, str]) -> datetime | None: ...
        def job_of_this_host(self, env: Mapping[str, str], hostname: str) -> Allocation | None: ...


_HALVES = ("SLURM_JOBID", "SLURM_JOB_NODELIST", "PBS_ENVIRONMENT")
"""What a job sets beside SLURM_JOB_ID or PBS_JOBID, and nobody else does."""

_UNREADABLE = {"FLUX_JOB_ID": "flux", "LSB_JOBID": "lsf", "COBALT_JOBID": "cobalt"}
"""Jobs of schedulers whose hosts we cannot read: this host alone would be wrong there."""


_NOT_SET_UP = ("Could not establish a configuration source", "cannot connect to server  (errno")
"""What squeue and qselect say where a client is installed, and knows no server (Slurm 22.05.8,
OpenPBS 23.06): none of its jobs is on this host."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes that a scheduler gave us, or this host.

    Attributes:
        scheduler: ``"slurm"``, ``"pbs"`` or ``"none"``: decided by job variables, never by
            the host's name or by which commands are installed.
        job_id: The scheduler's id of the job; None without a scheduler.
        hosts: The nodes of the job (of the step, for ranks that srun started), each once, in
            the scheduler's order; empty in a `Topology` where only a command could tell them,
            and every rank would start one.
        slots: Ranks that the scheduler foresees on each of ``hosts``, where it tells.
        name: The job's name, where it is known.
        queue: PBS's queue or Slurm's partition, where it is known.
        ends_at: End of the walltime (aware), where it is known.
        node_name: The one of ``hosts`` that this process runs on; None on a login node.
        sources: For each field the variable, file or command that it was read from.
        notes: What was seen and set aside, in words for people.
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


def get_allocation(env: Mapping[str, str] | None = None, *, ask: bool | None = None) -> Allocation:
    """Read the allocation from the job's variables and files.

    Args:
        env: The environment to read; default ``os.environ``.
        ask: Whether the scheduler's own commands may be started. None: where the variables do
            not tell the hosts (PBS's node file is missing on some nodes of some sites). True:
            also for what is good to know, the end of the walltime and, without job variables,
            the job that this host is a node of (a shell opened with ssh). False: never, for
            what every rank calls: ten thousand qstats at once take a server down.

    Raises:
        InvalidVariableError: The job's variables contradict each other.
        HostfileError: The job's node file does not parse.
        NodelistError: The job's nodelist does not parse.
        SchedulerError: Only the scheduler knows the hosts, and it did not answer or may not
            be asked; or several jobs share this host.
    """
    env = os.environ if env is None else env
    scheduler = scheduler_of(env)
    if scheduler == "none":
        found = _job_of_this_host(env) if ask else None
        return found or _this_host(asked=bool(ask))
    if scheduler in _UNREADABLE.values():
        raise SchedulerError(
            f"a job of {scheduler}, whose hosts cannot be read here; expected Slurm or PBS; write "
            "the hosts into a file, one a line, and name it in HOSTFILE, or pass it"
        )
    job = _module(scheduler).allocation(env, commands=ask is not False)
    return _with_end(job, env) if ask and job.ends_at is None else job


def scheduler_of(env: Mapping[str, str]) -> str:
    """Return whose job this is, by its variables: ``"slurm"``, ``"pbs"``, ``"none"`` or another's.

    Raises:
        InvalidVariableError: Two jobs at once, or half of a job's variables.
    """
    slurm, pbs = env.get("SLURM_JOB_ID"), env.get("PBS_JOBID")
    if slurm and pbs:
        raise InvalidVariableError(
            f"SLURM_JOB_ID={slurm[:40]} and PBS_JOBID={pbs[:40]}; expected one job; unset the one "
            "that is left over from another shell"
        )
    if slurm or pbs:
        return "slurm" if slurm else "pbs"
    for name in _HALVES:
        if env.get(name):
            whole = "PBS_JOBID" if name.startswith("PBS") else "SLURM_JOB_ID"
            raise InvalidVariableError(
                f"{name}={env[name][:40]} without {whole}; expected a job to set both; "
                f"set {whole}, or unset {name}"
            )
    return next((who for name, who in _UNREADABLE.items() if env.get(name)), "none")


def _module(scheduler: str) -> _Scheduler:
    # Only a job pays for its scheduler's module.
    if scheduler == "slurm":
        from . import _slurm  # noqa: PLC0415

        return _slurm
    from . import _pbs  # noqa: PLC0415

    return _pbs


def _job_of_this_host(env: Mapping[str, str]) -> Allocation | None:
    hostname = get_hostname()
    for scheduler in ("pbs", "slurm"):
        try:
            job = _module(scheduler).job_of_this_host(env, hostname)
        except SchedulerError as error:
            if not any(words in str(error) for words in _NOT_SET_UP):
                raise
            continue
        if job is not None:
            return job
    return None


def _with_end(job: Allocation, env: Mapping[str, str]) -> Allocation:
    try:
        ends_at = _module(job.scheduler).end_time(job.job_id or "", env)
    except TopoError as error:
        # It is good to know, and no more: hosts and ranks are known without it.
        return replace(job, notes=(*job.notes, f"end of the walltime: {error}"))
    source = "qstat -f -F json" if job.scheduler == "pbs" else "scontrol show job"
    return replace(job, ends_at=ends_at, sources={**job.sources, "ends_at": source})


def _this_host(*, asked: bool) -> Allocation:
    why = "no job variables are set"
    if asked:
        why += ", and no scheduler here has a running job of yours on this host"
    return Allocation(
        "none",
        None,
        (get_hostname(),),
        node_name=get_hostname(),
        sources={"scheduler": why, "hosts": f"uname: {why}"},
    )
