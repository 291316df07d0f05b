"""Slurm's controller: what scontrol and squeue tell of jobs, as allocations.

Run on Slurm 22.05.8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from . import _commands
from ._allocation import Allocation
from ._errors import InvalidVariableError, SchedulerError
from ._hosts import find_host
from ._nodelist import expand_nodelist

_SCONTROL = "scontrol show job"

_ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
}  # fmt: skip
"""States of a job that is over (squeue's manual page), which is still told for some minutes."""


def end_time(job_id: str, env: Mapping[str, str]) -> datetime | None:
    """Return when the job's time limit ends, by scontrol; None where it has no limit.

    Raises:
        SchedulerError: scontrol did not answer, or knows no such job.
    """
    return job_by_id(job_id, env).ends_at


def job_of_this_host(env: Mapping[str, str], hostname: str) -> Allocation | None:
    """Return the user's running job that has this host: for a shell that Slurm did not start.

    None without such a job, and where there is no squeue on PATH.

    Raises:
        SchedulerError: squeue failed, or several jobs share this host.
    """
    if _commands.find("squeue", env) is None:
        return None
    argv = ("squeue", "--noheader", "--me", "--states=R", "--format=%A %N")
    lines = _commands.ask(argv, env=_plain(env)).stdout.splitlines()
    jobs = [line.split(None, 1) for line in lines if len(line.split(None, 1)) == 2]
    here = [job_id for job_id, nodes in jobs if find_host(hostname, expand_nodelist(nodes))]
    if len(here) > 1:
        raise SchedulerError(
            f"host {hostname} is in {len(here)} running jobs: {', '.join(here)}; expected one; "
            f"say which: export SLURM_JOB_ID={here[0]}"
        )
    if not here:
        return None
    job = job_by_id(here[0], env)
    return replace(
        job,
        node_name=find_host(hostname, job.hosts),
        sources=dict.fromkeys([*job.sources, "node_name"], f"squeue, {_SCONTROL}"),
    )


def _moment_of(text: str) -> datetime | None:
    # Without a limit, and where a job waits: Unknown.
    if not text or not text[0].isdigit():
        return None
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError as error:
        raise SchedulerError(
            f"{_SCONTROL}: EndTime={text}; expected such as 2026-11-21T02:00:00; ask the site "
            "what its scontrol prints"
        ) from error


def job_by_id(job_id: str, env: Mapping[str, str]) -> Allocation:
    """Return a job that runs, by scontrol: all components of a heterogeneous one.

    Raises:
        InvalidVariableError: ``job_id`` is no job's number.
        SchedulerError: scontrol did not answer, or knows no such job that runs.
    """
    if not re.fullmatch("[0-9]{1,10}(_[0-9]{1,10})?", job_id):
        raise InvalidVariableError(
            f"SLURM_JOB_ID={job_id[:40]!r}; expected a job's number; unset it if no job is running"
        )
    records = _records(job_id, env)
    for leader in {record.het_job for record in records} - {"", job_id}:
        # A component of a heterogeneous job is told alone, its leader with all of them.
        return job_by_id(leader, env)
    # Of an array's last task the id is the array's too, and all its tasks are told.
    records = [record for record in records if job_id in (record.job, record.het_job)]
    running = [record for record in records if record.state not in _ENDED]
    hosts = dict.fromkeys(host for record in running for host in record.hosts)
    if not hosts:
        states = ", ".join(record.state for record in records) or "unknown"
        raise SchedulerError(
            f"{_SCONTROL} {job_id}: no nodes in use, state {states}; expected a job that runs; "
            "wait until it starts, or unset SLURM_JOB_ID"
        )
    first = records[0]
    known = Allocation(
        "slurm",
        job_id,
        tuple(hosts),
        name=first.name or None,
        queue=first.queue or None,
        ends_at=first.ends_at,
    )
    told = [f for f in ("name", "queue", "ends_at") if getattr(known, f) is not None]
    return replace(known, sources=dict.fromkeys(["scheduler", "job_id", "hosts", *told], _SCONTROL))


@dataclass(frozen=True, slots=True)
class _Record:
    """One job, array task or component of what ``scontrol show job`` prints."""

    job: str
    het_job: str
    name: str
    state: str
    queue: str
    hosts: tuple[str, ...]
    ends_at: datetime | None


def _records(job_id: str, env: Mapping[str, str]) -> list[_Record]:
    # Its time zone is ours to choose.
    argv = (*_SCONTROL.split(), job_id)
    text = _commands.ask(argv, env={**_plain(env), "TZ": "UTC0"}).stdout
    records = []
    for part in re.split(r"\n\n(?=JobId=)", text):
        # A job's name can have lines of its own, that look like any of these.
        head, _, body = part.rpartition("\n   UserId=")
        ids = re.match(r"JobId=([0-9]+)(?: HetJobId=([0-9]+))?.*? JobName=(.*)", head, re.DOTALL)
        if ids is None:
            continue
        fields = {
            key: found[1] if (found := re.search(rf"(?m)(?:^ {{3}}| ){key}=(\S+)", body)) else ""
            for key in ("JobState", "Partition", "NodeList", "EndTime")
        }
        nodes = fields["NodeList"]
        records.append(
            _Record(
                ids[1],
                ids[2] or "",
                ids[3],
                fields["JobState"] or "unknown",
                fields["Partition"],
                () if nodes == "(null)" else tuple(expand_nodelist(nodes)),
                _moment_of(fields["EndTime"]),
            )
        )
    return records


def _plain(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which scontrol and squeue print what is expected of them."""
    changing = ("SLURM_TIME_FORMAT", "SQUEUE_", "SCONTROL_")
    return {name: value for name, value in env.items() if not name.startswith(changing)}
