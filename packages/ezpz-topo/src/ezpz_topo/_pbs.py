"""PBS: a job by its variables and node file, and where these do not suffice, by qstat."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from . import _commands
from ._allocation import Allocation
from ._errors import HostfileError, InvalidVariableError, SchedulerError
from ._hostfile import read_slots
from ._nodelist import find_host, get_hostname

# The variables and the node file.


def allocation(env: Mapping[str, str], *, commands: bool = True) -> Allocation:
    """Return the allocation that ``PBS_JOBID`` names: from the node file, else from qstat."""
    job = _read_node_file(env)
    if job is None:
        job = _ask_for_hosts(env, commands=commands)
    sources = {**job.sources, "scheduler": "PBS_JOBID", "job_id": "PBS_JOBID"}
    if env.get("PBS_JOBNAME"):
        job = replace(job, name=env["PBS_JOBNAME"])
        sources["name"] = "PBS_JOBNAME"
    if env.get("PBS_QUEUE"):
        job = replace(job, queue=env["PBS_QUEUE"])
        sources["queue"] = "PBS_QUEUE"
    return _find_own_node(replace(job, sources=sources), get_hostname())


def _read_node_file(env: Mapping[str, str]) -> Allocation | None:
    """Return the job's hosts and slots by its node file; None if it cannot be read here."""
    path = env.get("PBS_NODEFILE", "")
    # It lies on every node of the job (OpenPBS 23.06), but not at every site.
    if not path or not os.access(path, os.R_OK):
        return None
    try:
        slots = read_slots(path)
    except HostfileError as error:
        raise HostfileError(
            f"PBS_NODEFILE: {error}; unset PBS_NODEFILE to ask qstat instead"
        ) from error
    counts = tuple(n or 1 for n in slots.values())  # a host that is named once has one
    sources = dict.fromkeys(("hosts", "slots"), "PBS_NODEFILE")
    return Allocation("pbs", env["PBS_JOBID"], tuple(slots), slots=counts, sources=sources)


def _ask_for_hosts(env: Mapping[str, str], *, commands: bool) -> Allocation:
    reason = "PBS_NODEFILE is not set"
    if env.get("PBS_NODEFILE"):
        reason = f"PBS_NODEFILE={env['PBS_NODEFILE']!r} cannot be read here"
    if not commands:
        raise SchedulerError(
            f"{reason}; expected PBS's node file; set PBS_NODEFILE to a copy of it that every node "
            "of the job can read"
        )
    try:
        job = job_by_id(env["PBS_JOBID"], env)
    except SchedulerError as error:
        raise SchedulerError(f"{reason}, and {error}") from error
    return replace(job, notes=(f"{reason}: asked qstat",))


class JobCpus(NamedTuple):
    """CPUs that a job was given on a node."""

    here: int
    fewest: int  # on the node where it has fewest
    source: str


def cpus_of_job(job: Allocation, env: Mapping[str, str], *, commands: bool) -> JobCpus | None:
    """Return the job's CPUs, by ``NCPUS`` and qstat; None if neither is conclusive."""
    # ncpus of the first chunk, or its ompthreads where the job requested these.
    text = env.get("NCPUS", "")
    if not re.fullmatch("[0-9]{1,6}", text) or not int(text):
        return None
    if job.node_name is None or job.slots is None:
        return None
    each = int(text)
    slots = dict(zip(job.hosts, job.slots, strict=True))
    if slots[job.node_name] == 1:
        return JobCpus(each, each, "NCPUS")
    # Several slots of a node share the CPUs, or have as many each: only qstat knows.
    if not commands:
        return None
    try:
        # It must not hold up for long what can go on without.
        job_id = env["PBS_JOBID"]
        chunks = _parse_exec_host(job_id, _query_job(job_id, {_commands.TIME_LIMIT: "2", **env}))
    except SchedulerError:
        source = "NCPUS: qstat does not tell whether it is for each process"
        return JobCpus(each, each, source)
    chunk_cpus: dict[str, int] = {}
    for name, count in chunks:
        chunk_cpus[name] = chunk_cpus.get(name, 0) + count
    cpus: dict[str, int] = {}
    for name in job.hosts:
        known = find_host(name, list(chunk_cpus))
        if known is not None:
            cpus[name] = min(chunk_cpus[known], each * slots[name])
    here = cpus.get(job.node_name, each)
    return JobCpus(here, min(cpus.values(), default=here), "exec_host and NCPUS")


def _find_own_node(job: Allocation, hostname: str) -> Allocation:
    """Add which node of the job this process is on; PBS variables can be exported anywhere."""
    name = find_host(hostname, job.hosts)
    job = replace(job, node_name=name, sources={**job.sources, "node_name": "uname"})
    if name is not None:
        return job
    note = f"host {hostname} is no node of job {job.job_id}, whose variables are set here"
    return replace(job, notes=(*job.notes, note))


# The server: jobs by qstat and qselect.

# Not its JSON, which has only the first of several, and is invalid if a variable holds a quote.
# -E: one query for all jobs; without it each takes another connection, 20 ms and more.
QSTAT = "qstat -E -fw"
_UNKNOWN = 153
_FINISHED = 35

_JOB_ID = re.compile(r"[0-9]+(?:\[[0-9]*\])?(?:[.@][0-9A-Za-z_.@-]+)?")
_CHUNK = re.compile(r"([0-9A-Za-z_][0-9A-Za-z_.-]{0,252})/[0-9]+(?:\*([0-9]{1,6}))?")
_USER = re.compile(r"[0-9A-Za-z_.][0-9A-Za-z_.$-]*")
_COUNT = re.compile(r"[1-9][0-9]{0,5}")
_WALLTIME = re.compile(r"[0-9]{1,9}(?::[0-9]{1,9}){0,3}(?:\.[0-9]+)?")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

Attributes = Mapping[str, Any]  # one job, as `get_pbs_jobs` returns it


def get_pbs_folder(env: Mapping[str, str] | None = None) -> str:
    """Return where PBS's commands are, as PBS itself knows it; a shell may not have it on PATH."""
    env = os.environ if env is None else env
    prefix = env.get("PBS_EXEC", "")
    if not prefix:
        with contextlib.suppress(OSError):
            conf = env.get("PBS_CONF_FILE") or "/etc/pbs.conf"
            with open(conf, encoding="utf-8", errors="replace") as file:
                for line in file:
                    if line.startswith("PBS_EXEC="):
                        prefix = line.partition("=")[2].strip().strip("\"'")
    return os.path.join(prefix or "/opt/pbs", "bin")


def get_pbs_jobs(
    job_ids: Sequence[str], env: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the attributes that qstat prints of jobs, by full id.

    Args:
        job_ids: As qselect or qsub prints them; those that are over are found if PBS keeps a
            history.
        env: The environment of qstat; default ``os.environ``.

    Returns:
        The attributes by the names that qstat gives them: moments (``qtime``, ``stime``, ``mtime``,
        ``obittime``, ``estimated.start_time``) as seconds since 1970, ``Resource_List.walltime`` in
        seconds, all else as text; ``Resource_List`` and its like hold more of such. Jobs that the
        server does not know are left out.

    Raises:
        InvalidVariableError: A job id is none.
        SchedulerError: qstat is missing, failed, or did not answer in time.
    """
    env = os.environ if env is None else env
    if not job_ids:
        return {}
    return _query_jobs(job_ids, env, "-x", attempts=1)[1]


def _query_jobs(
    job_ids: Sequence[str], env: Mapping[str, str], *more: str, attempts: int = 2
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return qstat's exit status, and the attributes of each job."""
    for job_id in job_ids:
        if not _JOB_ID.fullmatch(job_id):
            raise InvalidVariableError(
                f"PBS job id {job_id[:80]!r}; expected one such as 1.pbs-0001 or 40[1].pbs-0001; "
                "unset PBS_JOBID, or give it as qstat prints it"
            )
    # qstat itself makes text of times, with ctime (OpenPBS, qstat.c): the zone is ours to choose.
    reply = _commands.ask(
        (*QSTAT.split(), *more, *job_ids), env={**env, "TZ": "UTC0"},
        good=(0, _UNKNOWN, _FINISHED), attempts=attempts, place=get_pbs_folder(env),
    )  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    before, *parts = re.split(r"(?m)^Job Id: ", reply.stdout)
    # A site's lines may precede the jobs, or be alone.
    if before.strip() and not parts and not reply.status:
        raise SchedulerError(
            f"{QSTAT} printed {before[:60]!r}; expected 'Job Id: 1.pbs-0001' and lines of its "
            "attributes; run it by hand, and ask the site which qstat this is"
        )
    for part in parts:
        job_id, _, lines = part.partition("\n")
        job = found.setdefault(job_id.strip(), {})
        for name, text in re.findall(r"(?m)^ {4}([\w.]+) = (.*)", lines):
            group, _, key = name.rpartition(".")
            attributes = job
            if group:
                attributes = job.setdefault(group, {})
            # What looks like an attribute inside another's value comes later.
            attributes.setdefault(key, _parse_value(key, text))
    return reply.status, found


def _parse_value(key: str, text: str) -> str | float:
    """Return a moment or a length of time as a number, all else as it is."""
    parse = _PARSERS.get(key)
    if parse is None:
        return text
    try:
        return parse(text)
    except (ValueError, OverflowError):
        return text


def _parse_moment(text: str) -> float:
    """Read "Sat Nov 21 02:10:43 2026", always in English, in the zone that `_query_jobs` chose."""
    _, month, day, clock, year = text.split()
    hour, minute, second = clock.split(":")
    moment = datetime(
        int(year), _MONTHS.index(month) + 1, int(day), int(hour), int(minute), int(second),
        tzinfo=UTC,
    )  # fmt: skip
    return moment.timestamp()


def _parse_walltime(text: str) -> float:
    """Read ``DD:HH:MM:SS``, in seconds; any left part may be missing."""
    if not _WALLTIME.fullmatch(text):
        raise ValueError(text)
    parts = text.partition(".")[0].split(":")
    seconds = 0
    for part, unit in zip(reversed(parts), _UNITS, strict=False):
        seconds += int(part) * unit
    return float(seconds)


_UNITS = (1, 60, 3600, 86400)
_PARSERS = {
    "qtime": _parse_moment,
    "stime": _parse_moment,
    "mtime": _parse_moment,
    "obittime": _parse_moment,
    "start_time": _parse_moment,
    "walltime": _parse_walltime,
}
"""What is text to qstat, and a number here."""


def job_by_id(job_id: str, env: Mapping[str, str]) -> Allocation:
    """Return a running job, by qstat."""
    return _build_allocation(job_id, _query_job(job_id, env))


def end_time(job_id: str, env: Mapping[str, str]) -> datetime | None:
    """Return when the job's walltime ends, by qstat; None before it starts or without a limit."""
    return _compute_end(job_id, _query_job(job_id, env))


def job_of_this_host(env: Mapping[str, str], hostname: str) -> Allocation | None:
    """Return the user's running job that has this host; None without one, or without qselect."""
    if _commands.find("qselect", env, get_pbs_folder(env)) is None:
        return None
    # -T: the subjobs of an array, which itself never runs (manual page of 23.06; not captured).
    argv = ("qselect", "-T", "-u", _get_user(env), "-s", "R")
    lines = _commands.ask(argv, env=env, place=get_pbs_folder(env)).stdout.splitlines()
    job_ids = [line for line in lines if _JOB_ID.fullmatch(line)]  # others are a site's own
    if not job_ids:
        return None
    # A job that ended since qselect has no exec_host, or is not printed at all.
    _, jobs = _query_jobs(job_ids, env)
    here = []
    for job_id, attributes in jobs.items():
        if "exec_host" in attributes:
            job = _build_allocation(job_id, attributes)
            if find_host(hostname, job.hosts):
                here.append(job)
    if len(here) > 1:
        ids = ", ".join(str(job.job_id) for job in here)
        raise SchedulerError(
            f"host {hostname} is in {len(here)} running jobs: {ids}; expected one; "
            f"say which: export PBS_JOBID={here[0].job_id}"
        )
    if not here:
        return None
    sources = dict.fromkeys(here[0].sources, f"qselect, {QSTAT}")
    return _find_own_node(replace(here[0], sources=sources), hostname)


def _get_user(env: Mapping[str, str]) -> str:
    user = env.get("USER") or env.get("LOGNAME") or ""
    if not user:
        with contextlib.suppress(KeyError):
            user = pwd.getpwuid(os.getuid()).pw_name
    if not _USER.fullmatch(user):
        raise InvalidVariableError(
            f"USER={user[:40]!r}; expected the user whose jobs qselect shall list; set USER"
        )
    return user


def _query_job(job_id: str, env: Mapping[str, str]) -> Attributes:
    status, jobs = _query_jobs([job_id], env)
    # The server's name may be left out of an id, and is printed in full.
    number = re.split("[.@]", job_id)[0]
    named = [job for key, job in jobs.items() if key.partition(".")[0] == number]
    if len(named) == 1:
        return named[0]
    problems = {_FINISHED: "has finished", _UNKNOWN: "is unknown to the server"}
    problem = problems.get(status, "is not in the answer")
    raise SchedulerError(
        f"{QSTAT}: job {job_id} {problem}; expected one that runs; unset PBS_JOBID where it is "
        "left over from an earlier job"
    )


def _build_allocation(job_id: str, job: Attributes) -> Allocation:
    names = [name for name, _ in _parse_exec_host(job_id, job)]
    facts: dict[str, object] = {
        "slots": _count_slots(names, job.get("Resource_List", {})),
        "name": job.get("Job_Name"),
        "queue": job.get("queue"),
    }
    with contextlib.suppress(SchedulerError):  # the hosts are known without it
        facts["ends_at"] = _compute_end(job_id, job)
    known = {key: fact for key, fact in facts.items() if fact}
    sources = dict.fromkeys(("scheduler", "job_id", "hosts", *known), QSTAT)
    return Allocation("pbs", job_id, tuple(dict.fromkeys(names)), sources=sources, **known)  # type: ignore[arg-type]


def _parse_exec_host(job_id: str, job: Attributes) -> list[tuple[str, int]]:
    """Return host and CPUs of each chunk of a job."""
    exec_host = job.get("exec_host", "")
    if not exec_host:
        raise SchedulerError(
            f"{QSTAT}: job {job_id} has no exec_host and is in state "
            f"{job.get('job_state', 'unknown')!r}; expected a job that runs; wait until it starts"
        )
    chunks = []
    for part in exec_host.split("+"):
        match = _CHUNK.fullmatch(part)
        if match is None:
            raise SchedulerError(
                f"{QSTAT}: job {job_id} has exec_host {exec_host[:80]!r}; expected a form such as "
                "x1n0/0*2+x1n1/0*2; set PBS_NODEFILE to a file with one host a line"
            )
        chunks.append((match[1], int(match[2] or 1)))
    return chunks


def _count_slots(names: Sequence[str], resources: Attributes) -> tuple[int, ...] | None:
    """Return the MPI slots of each host, where ``select`` and ``mpiprocs`` leave no doubt."""
    # The numbers of exec_host are CPUs. It has one entry a chunk of ``select``, in its order,
    # and a chunk has one slot unless it has ``mpiprocs``.
    chunk_slots: list[int] = []
    for part in resources.get("select", "").split("+"):
        number, *items = part.split(":")
        if "=" in number:
            items.insert(0, number)
            number = "1"
        requested = dict(item.partition("=")[::2] for item in items)
        slots = requested.get("mpiprocs", "1")
        if not _COUNT.fullmatch(number) or not _COUNT.fullmatch(slots):
            return None
        if requested.get("ncpus") == "0" or len(chunk_slots) + int(number) > len(names):
            return None
        chunk_slots += [int(slots)] * int(number)
    if len(chunk_slots) != len(names):
        return None
    if resources.get("mpiprocs", "") not in ("", str(sum(chunk_slots))):
        return None
    host_slots = dict.fromkeys(names, 0)
    for name, count in zip(names, chunk_slots, strict=True):
        host_slots[name] += count
    return tuple(host_slots.values())


def _compute_end(job_id: str, job: Attributes) -> datetime | None:
    start = job.get("stime")
    limit = job.get("Resource_List", {}).get("walltime")
    if not start or not limit:
        return None
    try:
        return datetime.fromtimestamp(start + limit, UTC)
    except (TypeError, ValueError, OverflowError) as error:
        raise SchedulerError(
            f"{QSTAT}: job {job_id} has stime {start!r} and walltime {limit!r}; expected 'Sat Nov "
            "21 02:10:43 2026' and '00:05:00'; ask the site which qstat this is"
        ) from error
