"""PBS: a job's variables and node file, and only where these do not do, its server.

The forms are those captured from OpenPBS 23.06; not run on hardware.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from ._allocation import Allocation
from ._commands import TIME_LIMIT
from ._errors import HostfileError, SchedulerError
from ._hosts import find_host, get_hostname
from ._slots import read_slots

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import datetime


def allocation(env: Mapping[str, str], *, commands: bool = True) -> Allocation:
    """Return the allocation that ``PBS_JOBID`` names: from the node file, else from qstat.

    No command is started where the node file can be read; it lies on every node of the job
    (OpenPBS 23.06). Where it cannot, the same variables lead to qstat. Job arrays
    (``40[1].pbs-0001``) and interactive jobs are no different.

    Raises:
        HostfileError: The node file can be read, but does not parse.
        InvalidVariableError: ``PBS_JOBID`` is no job id.
        SchedulerError: The node file cannot be read, and qstat did not answer, or knows no
            such job that runs.
    """
    path = env.get("PBS_NODEFILE", "")
    why = f"PBS_NODEFILE={path!r} cannot be read here" if path else "PBS_NODEFILE is not set"
    try:
        slots = read_slots(path) if path and os.access(path, os.R_OK) else {}
    except HostfileError as error:
        raise HostfileError(
            f"PBS_NODEFILE: {error}; unset PBS_NODEFILE to ask qstat instead"
        ) from error
    variables = {"scheduler": "PBS_JOBID", "job_id": "PBS_JOBID"}
    variables |= {k: v for k, v in (("name", "PBS_JOBNAME"), ("queue", "PBS_QUEUE")) if env.get(v)}
    job = Allocation("pbs", env["PBS_JOBID"], ())
    if slots:
        # A host that is named once has one slot.
        job = replace(
            job,
            hosts=tuple(slots),
            slots=tuple(n or 1 for n in slots.values()),
            sources={"hosts": "PBS_NODEFILE", "slots": "PBS_NODEFILE"},
        )
    elif not commands:
        raise SchedulerError(
            f"{why}; expected PBS's node file; set PBS_NODEFILE to a copy of it that every node of "
            "the job can read"
        )
    else:
        from . import _pbs_jobs  # noqa: PLC0415  # 6 ms, and most jobs have their node file

        try:
            job = _pbs_jobs.job_by_id(env["PBS_JOBID"], env)
        except SchedulerError as error:
            raise SchedulerError(f"{why}, and {error}") from error
        job = replace(job, notes=(f"{why}: asked qstat",))
    name, queue = env.get("PBS_JOBNAME") or job.name, env.get("PBS_QUEUE") or job.queue
    job = replace(job, name=name, queue=queue, sources={**job.sources, **variables})
    return _placed(job, get_hostname())


def end_time(job_id: str, env: Mapping[str, str]) -> datetime | None:
    """Return when the job's walltime ends (see `_pbs_jobs.end_time`)."""
    from . import _pbs_jobs  # noqa: PLC0415

    return _pbs_jobs.end_time(job_id, env)


def job_of_this_host(env: Mapping[str, str], hostname: str) -> Allocation | None:
    """Return the user's running job that has this host (see `_pbs_jobs.job_of_this_host`)."""
    from . import _pbs_jobs  # noqa: PLC0415

    job = _pbs_jobs.job_of_this_host(env, hostname)
    return None if job is None else _placed(job, hostname)


def cpus_of_job(
    job: Allocation, env: Mapping[str, str], *, commands: bool
) -> tuple[int, int, str] | None:
    """Return the CPUs that a job has here, and on the node where it has fewest, and the source.

    ``NCPUS`` is ``ncpus`` of the first chunk, or its ``ompthreads`` where the job asked for these.
    Where this node has several slots, they share it, or have as many each: only qstat tells. None
    on no node of the job, and where nothing tells.
    """
    text = env.get("NCPUS", "")
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < 7 and int(text)):
        return None
    if job.node_name is None or job.slots is None:
        return None
    each, slots = int(text), dict(zip(job.hosts, job.slots, strict=True))
    if slots[job.node_name] == 1:
        return each, each, "NCPUS"
    if not commands:
        return None
    from . import _pbs_jobs  # noqa: PLC0415

    try:
        # It must not hold up for long what can go on without.
        told = _pbs_jobs.cpus_of_hosts(env["PBS_JOBID"], {TIME_LIMIT: "2", **env})
    except SchedulerError:
        return each, each, "NCPUS: qstat does not tell whether it is for each process"
    cpus = {
        name: min(told[known], each * slots[name])
        for name in job.hosts
        if (known := find_host(name, list(told)))
    }
    here = cpus.get(job.node_name, each)
    return here, min(cpus.values(), default=here), "exec_host and NCPUS"


def _placed(job: Allocation, hostname: str) -> Allocation:
    """Say which node of the job this process is on; PBS variables can be exported anywhere."""
    name = find_host(hostname, job.hosts)
    job = replace(job, node_name=name, sources={**job.sources, "node_name": "uname"})
    if name is not None:
        return job
    note = f"host {hostname} is no node of job {job.job_id}, whose variables are set here"
    return replace(job, notes=(*job.notes, note))
