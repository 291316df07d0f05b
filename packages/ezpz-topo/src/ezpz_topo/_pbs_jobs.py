"""PBS's server: what qstat and qselect tell of jobs, as allocations.

The forms are those captured from OpenPBS 23.06; not run on hardware.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from . import _commands
from ._allocation import Allocation
from ._errors import InvalidVariableError, SchedulerError
from ._hosts import find_host
from ._qstat import QSTAT, Attributes, ask_for_job, ask_for_jobs, get_pbs_folder, text_of

_HOST = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,252}")
_CHUNK = re.compile(rf"({_HOST.pattern})/[0-9]+(?:\*([0-9]{{1,6}}))?")
_USER = re.compile(r"[0-9A-Za-z_.][0-9A-Za-z_.$-]*")
_COUNT = re.compile(r"[1-9][0-9]{0,5}")
_WALLTIME = re.compile(r"[0-9]{1,9}(?::[0-9]{1,9}){0,3}(?:\.[0-9]+)?")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def job_by_id(job_id: str, env: Mapping[str, str]) -> Allocation:
    """Return a job that runs, by qstat.

    Raises:
        InvalidVariableError: ``job_id`` is no job id.
        SchedulerError: qstat did not answer, or knows no such job that runs.
    """
    return _from_qstat(job_id, ask_for_job(job_id, env))


def end_time(job_id: str, env: Mapping[str, str]) -> datetime | None:
    """Return when the job's walltime ends, by qstat; None before it starts or without a limit.

    Raises:
        InvalidVariableError: ``job_id`` is no job id.
        SchedulerError: qstat did not answer, or knows no such job.
    """
    return _end(job_id, ask_for_job(job_id, env))


def job_of_this_host(env: Mapping[str, str], hostname: str) -> Allocation | None:
    """Return the user's running job that has this host: for a shell that PBS did not start.

    None without such a job, and where there is no qselect: then this is no host of a PBS system.

    Raises:
        SchedulerError: A command failed, or several jobs share this host.
    """
    if _commands.find("qselect", env, get_pbs_folder(env)) is None:
        return None
    # -T: the subjobs of an array, which itself never runs (manual page of 23.06; not captured).
    argv = ("qselect", "-T", "-u", _user(env), "-s", "R")
    job_ids = _commands.ask(argv, env=env, place=get_pbs_folder(env)).stdout.split()
    if not job_ids:
        return None
    _, jobs = ask_for_jobs(job_ids, env)
    for job_id in [job_id for job_id in job_ids if job_id not in jobs]:
        # Some builds tell only the first of several jobs (openpbs issue 2672).
        jobs.update(ask_for_jobs([job_id], env)[1])
    # A job that ended since qselect has no exec_host, or is not told at all.
    found = [_from_qstat(key, job) for key, job in jobs.items() if text_of(job, "exec_host")]
    here = [job for job in found if find_host(hostname, job.hosts)]
    if len(here) > 1:
        ids = ", ".join(str(job.job_id) for job in here)
        raise SchedulerError(
            f"host {hostname} is in {len(here)} running jobs: {ids}; expected one; "
            f"say which: export PBS_JOBID={here[0].job_id}"
        )
    if not here:
        return None
    source = f"qselect, {QSTAT}"
    return replace(here[0], sources=dict.fromkeys(here[0].sources, source))


def cpus_of_hosts(job_id: str, env: Mapping[str, str]) -> dict[str, int]:
    """Return the CPUs that a job has on each of its hosts, by qstat.

    Raises:
        InvalidVariableError: ``job_id`` is no job id.
        SchedulerError: qstat did not answer, or knows no such job that runs.
    """
    cpus: dict[str, int] = {}
    for name, count in _chunks(job_id, ask_for_job(job_id, env)):
        cpus[name] = cpus.get(name, 0) + count
    return cpus


def _chunks(job_id: str, job: Attributes) -> list[tuple[str, int]]:
    """Return host and CPUs of each chunk."""
    exec_host, state = text_of(job, "exec_host"), text_of(job, "job_state")
    if not exec_host:
        raise SchedulerError(
            f"{QSTAT}: job {job_id} has no exec_host and is in state {state or 'unknown'!r}; "
            "expected a job that runs; wait until it starts"
        )
    chunks = [_CHUNK.fullmatch(part) for part in exec_host.split("+")]
    found = [(match[1], int(match[2] or 1)) for match in chunks if match]
    if len(found) < len(chunks):
        raise SchedulerError(
            f"{QSTAT}: job {job_id} has exec_host {exec_host[:80]!r}; expected a form such as "
            "x1n0/0*2+x1n1/0*2; set PBS_NODEFILE to a file with one host a line"
        )
    return found


def _from_qstat(job_id: str, job: Attributes) -> Allocation:
    names = [name for name, _ in _chunks(job_id, job)]
    ends_at = None
    with contextlib.suppress(SchedulerError):  # the hosts are known without it
        ends_at = _end(job_id, job)
    known = Allocation(
        scheduler="pbs",
        job_id=job_id,
        hosts=tuple(dict.fromkeys(names)),
        slots=_slots(names, job.get("Resource_List")),
        name=text_of(job, "Job_Name") or None,
        queue=text_of(job, "queue") or None,
        ends_at=ends_at,
    )
    fields = ("scheduler", "job_id", "hosts", "slots", "name", "queue", "ends_at")
    told = [field for field in fields if getattr(known, field) is not None]
    return replace(known, sources=dict.fromkeys(told, QSTAT))


def _slots(names: Sequence[str], resources: object) -> tuple[int, ...] | None:
    """Return the MPI slots of each host, where ``select`` and ``mpiprocs`` leave no doubt.

    ``/0*2`` of exec_host are CPUs. It has one entry a chunk of ``select``, in its order, and
    a chunk has one slot unless it says ``mpiprocs``.
    """
    if not isinstance(resources, dict):
        return None
    each: list[int] = []
    for part in text_of(resources, "select").split("+"):
        number, *items = part.split(":")
        if "=" in number:
            number, items = "1", [number, *items]
        wanted = dict(item.partition("=")[::2] for item in items)
        procs = wanted.get("mpiprocs", "1")
        if not _COUNT.fullmatch(number) or not _COUNT.fullmatch(procs):
            return None
        if wanted.get("ncpus") == "0" or len(each) + int(number) > len(names):
            return None
        each += [int(procs)] * int(number)
    if len(each) != len(names) or text_of(resources, "mpiprocs") not in ("", str(sum(each))):
        return None
    slots = dict.fromkeys(names, 0)
    for name, procs_here in zip(names, each, strict=True):
        slots[name] += procs_here
    return tuple(slots.values())


def _end(job_id: str, job: Attributes) -> datetime | None:
    resources = job.get("Resource_List")
    limit = text_of(resources, "walltime") if isinstance(resources, dict) else ""
    start = text_of(job, "stime")
    if not start or not limit:
        return None
    try:
        # "Sat Nov 21 02:10:43 2026", always in English, in the zone that _ask chose.
        _, month, day, clock, year = start.split()
        hour, minute, second = clock.split(":")
        date = (int(year), _MONTHS.index(month) + 1, int(day))
        began = datetime(*date, int(hour), int(minute), int(second), tzinfo=UTC)
        return began + _walltime(limit)
    except (ValueError, OverflowError) as error:
        raise SchedulerError(
            f"{QSTAT}: job {job_id} has stime {start[:40]!r} and walltime {limit[:40]!r}; "
            "expected 'Sat Nov 21 02:10:43 2026' and '00:05:00'; ask the site which qstat this is"
        ) from error


def _walltime(text: str) -> timedelta:
    """Read ``DD:HH:MM:SS``, of which any left part may be missing."""
    if not _WALLTIME.fullmatch(text):
        raise ValueError(text)
    parts = [int(part) for part in reversed(text.partition(".")[0].split(":"))]
    units = ("seconds", "minutes", "hours", "days")
    return timedelta(**dict(zip(units, parts, strict=False)))


def _user(env: Mapping[str, str]) -> str:
    user = env.get("USER") or env.get("LOGNAME")
    if not user:
        import pwd  # noqa: PLC0415

        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            user = ""
    if not _USER.fullmatch(user):
        raise InvalidVariableError(
            f"USER={user[:40]!r}; expected the user whose jobs qselect shall list; set USER"
        )
    return user
