"""PBS: what its variables and node file say of a job, and where these do not do, qstat."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from . import _commands
from ._allocation import Allocation
from ._errors import HostfileError, InvalidVariableError, SchedulerError
from ._hostfile import read_slots
from ._nodelist import find_host, get_hostname

# The variables and the node file.


def allocation(env: Mapping[str, str], *, commands: bool = True) -> Allocation:
    """Return the allocation that ``PBS_JOBID`` names: from the node file, else from qstat."""
    path = env.get("PBS_NODEFILE", "")
    why = f"PBS_NODEFILE={path!r} cannot be read here" if path else "PBS_NODEFILE is not set"
    try:
        # It lies on every node of the job (OpenPBS 23.06), but not at every site.
        slots = read_slots(path) if path and os.access(path, os.R_OK) else {}
    except HostfileError as error:
        raise HostfileError(
            f"PBS_NODEFILE: {error}; unset PBS_NODEFILE to ask qstat instead"
        ) from error
    if slots:
        counts = tuple(n or 1 for n in slots.values())  # a host that is named once has one
        sources = dict.fromkeys(("hosts", "slots"), "PBS_NODEFILE")
        job = Allocation("pbs", env["PBS_JOBID"], tuple(slots), slots=counts, sources=sources)
    elif not commands:
        raise SchedulerError(
            f"{why}; expected PBS's node file; set PBS_NODEFILE to a copy of it that every node of "
            "the job can read"
        )
    else:
        try:
            job = job_by_id(env["PBS_JOBID"], env)
        except SchedulerError as error:
            raise SchedulerError(f"{why}, and {error}") from error
        job = replace(job, notes=(f"{why}: asked qstat",))
    variables = {"scheduler": "PBS_JOBID", "job_id": "PBS_JOBID"}
    variables |= {k: v for k, v in (("name", "PBS_JOBNAME"), ("queue", "PBS_QUEUE")) if env.get(v)}
    name, queue = env.get("PBS_JOBNAME") or job.name, env.get("PBS_QUEUE") or job.queue
    job = replace(job, name=name, queue=queue, sources={**job.sources, **variables})
    return _placed(job, get_hostname())


def cpus_of_job(
    job: Allocation, env: Mapping[str, str], *, commands: bool
) -> tuple[int, int, str] | None:
    """Return the job's CPUs here, those on the node where it has fewest, and the source."""
    # ncpus of the first chunk, or its ompthreads where the job requested these.
    text = env.get("NCPUS", "")
    if not re.fullmatch("[0-9]{1,6}", text) or not int(text):
        return None
    if job.node_name is None or job.slots is None:
        return None
    each, slots = int(text), dict(zip(job.hosts, job.slots, strict=True))
    if slots[job.node_name] == 1:
        return each, each, "NCPUS"
    # Several slots of a node share the CPUs, or have as many each: only qstat tells.
    if not commands:
        return None
    try:
        # It must not hold up for long what can go on without.
        job_id, brief = env["PBS_JOBID"], {_commands.TIME_LIMIT: "2", **env}
        chunks = _chunks(job_id, _job(job_id, brief))
    except SchedulerError:
        return each, each, "NCPUS: qstat does not tell whether it is for each process"
    told: dict[str, int] = {}
    for name, count in chunks:
        told[name] = told.get(name, 0) + count
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


# The server: what qstat and qselect tell of jobs.

# Not its JSON, which tells only the first of several, and is none where a variable holds a quote.
# -E: one question for all jobs; without it each takes a connection of its own, 20 ms and more.
QSTAT = "qstat -E -fw"
_UNKNOWN, _FINISHED = 153, 35

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
    """Return what qstat tells of jobs, by full id.

    Args:
        job_ids: As qselect or qsub prints them; of those that are over PBS tells where it has a
            history.
        env: The environment to ask in; default ``os.environ``.

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
    return _jobs(job_ids, env, "-x", attempts=1)[1] if job_ids else {}


def _jobs(
    job_ids: Sequence[str], env: Mapping[str, str], *more: str, attempts: int = 2
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return qstat's exit status, and the jobs that it tells of."""
    for job_id in job_ids:
        if not _JOB_ID.fullmatch(job_id):
            raise InvalidVariableError(
                f"PBS job id {job_id[:80]!r}; expected one such as 1.pbs-0001 or 40[1].pbs-0001; "
                "unset PBS_JOBID, or give it as qstat prints it"
            )
    # qstat itself makes text of times, with ctime (OpenPBS, qstat.c): the zone is ours to choose.
    answer = _commands.ask(
        (*QSTAT.split(), *more, *job_ids), env={**env, "TZ": "UTC0"},
        good=(0, _UNKNOWN, _FINISHED), attempts=attempts, place=get_pbs_folder(env),
    )  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    before, *parts = re.split(r"(?m)^Job Id: ", answer.stdout)
    # A site's lines may stand before the jobs, or alone where there is none.
    if before.strip() and not parts and not answer.status:
        raise SchedulerError(
            f"{QSTAT} printed {before[:60]!r}; expected 'Job Id: 1.pbs-0001' and lines of its "
            "attributes; run it by hand, and ask the site which qstat this is"
        )
    for part in parts:
        job_id, _, lines = part.partition("\n")
        job = found.setdefault(job_id.strip(), {})
        for name, text in re.findall(r"(?m)^ {4}([\w.]+) = (.*)", lines):
            group, _, key = name.rpartition(".")
            place = job.setdefault(group, {}) if group else job
            # What a value's own lines say comes later.
            place.setdefault(key, _number_of(text, _READ[key]) if key in _READ else text)
    return answer.status, found


def _number_of(text: str, read: Callable[[str], float]) -> str | float:
    try:
        return read(text)
    except (ValueError, OverflowError):
        return text


def _moment(text: str) -> float:
    """Read "Sat Nov 21 02:10:43 2026", always in English, in the zone that `_jobs` chose."""
    _, month, day, clock, year = text.split()
    hour, minute, second = clock.split(":")
    date = (int(year), _MONTHS.index(month) + 1, int(day))
    return datetime(*date, int(hour), int(minute), int(second), tzinfo=UTC).timestamp()


def _walltime(text: str) -> float:
    """Read ``DD:HH:MM:SS``, of which any left part may be missing, in seconds."""
    if not _WALLTIME.fullmatch(text):
        raise ValueError(text)
    parts = reversed(text.partition(".")[0].split(":"))
    return float(sum(unit * int(part) for unit, part in zip(_UNITS, parts, strict=False)))


_UNITS = (1, 60, 3600, 86400)
_READ = {
    **dict.fromkeys(("qtime", "stime", "mtime", "obittime", "start_time"), _moment),
    "walltime": _walltime,
}
"""What is text to qstat, and a number here."""


def job_by_id(job_id: str, env: Mapping[str, str]) -> Allocation:
    return _allocation_of(job_id, _job(job_id, env))


def end_time(job_id: str, env: Mapping[str, str]) -> datetime | None:
    """Return when the job's walltime ends, by qstat; None before it starts or without a limit."""
    return _end(job_id, _job(job_id, env))


def job_of_this_host(env: Mapping[str, str], hostname: str) -> Allocation | None:
    """Return the user's running job that has this host; None without one, or without qselect."""
    if _commands.find("qselect", env, get_pbs_folder(env)) is None:
        return None
    # -T: the subjobs of an array, which itself never runs (manual page of 23.06; not captured).
    argv = ("qselect", "-T", "-u", _user(env), "-s", "R")
    lines = _commands.ask(argv, env=env, place=get_pbs_folder(env)).stdout.splitlines()
    job_ids = [line for line in lines if _JOB_ID.fullmatch(line)]  # others are a site's own
    if not job_ids:
        return None
    # A job that ended since qselect has no exec_host, or is not told at all.
    jobs = _jobs(job_ids, env)[1]
    found = [_allocation_of(key, job) for key, job in jobs.items() if "exec_host" in job]
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
    return _placed(replace(here[0], sources=dict.fromkeys(here[0].sources, source)), hostname)


def _user(env: Mapping[str, str]) -> str:
    user = env.get("USER") or env.get("LOGNAME") or ""
    if not user:
        with contextlib.suppress(KeyError):
            user = pwd.getpwuid(os.getuid()).pw_name
    if not _USER.fullmatch(user):
        raise InvalidVariableError(
            f"USER={user[:40]!r}; expected the user whose jobs qselect shall list; set USER"
        )
    return user


def _job(job_id: str, env: Mapping[str, str]) -> Attributes:
    status, jobs = _jobs([job_id], env)
    # The server's name may be left out of an id, and is told in full.
    number = re.split("[.@]", job_id)[0]
    named = [job for key, job in jobs.items() if key.partition(".")[0] == number]
    if len(named) == 1:
        return named[0]
    what = {_FINISHED: "has finished", _UNKNOWN: "is unknown to the server"}
    raise SchedulerError(
        f"{QSTAT}: job {job_id} {what.get(status, 'is not in the answer')}; expected one that "
        "runs; unset PBS_JOBID where it is left over from an earlier job"
    )


def _allocation_of(job_id: str, job: Attributes) -> Allocation:
    names = [name for name, _ in _chunks(job_id, job)]
    facts: dict[str, object] = {
        "slots": _slots(names, job.get("Resource_List", {})),
        "name": job.get("Job_Name"),
        "queue": job.get("queue"),
    }
    with contextlib.suppress(SchedulerError):  # the hosts are known without it
        facts["ends_at"] = _end(job_id, job)
    told = {key: fact for key, fact in facts.items() if fact}
    sources = dict.fromkeys(("scheduler", "job_id", "hosts", *told), QSTAT)
    return Allocation("pbs", job_id, tuple(dict.fromkeys(names)), sources=sources, **told)  # type: ignore[arg-type]


def _chunks(job_id: str, job: Attributes) -> list[tuple[str, int]]:
    exec_host, state = job.get("exec_host", ""), job.get("job_state", "unknown")
    if not exec_host:
        raise SchedulerError(
            f"{QSTAT}: job {job_id} has no exec_host and is in state {state!r}; "
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


def _slots(names: Sequence[str], resources: Attributes) -> tuple[int, ...] | None:
    """Return the MPI slots of each host, where ``select`` and ``mpiprocs`` leave no doubt."""
    # The numbers of exec_host are CPUs. It has one entry a chunk of ``select``, in its order,
    # and a chunk has one slot unless it says ``mpiprocs``.
    each: list[int] = []
    for part in resources.get("select", "").split("+"):
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
    if len(each) != len(names) or resources.get("mpiprocs", "") not in ("", str(sum(each))):
        return None
    slots = dict.fromkeys(names, 0)
    for name, procs_here in zip(names, each, strict=True):
        slots[name] += procs_here
    return tuple(slots.values())


def _end(job_id: str, job: Attributes) -> datetime | None:
    start, limit = job.get("stime"), job.get("Resource_List", {}).get("walltime")
    if not start or not limit:
        return None
    try:
        return datetime.fromtimestamp(start + limit, UTC)
    except (TypeError, ValueError, OverflowError) as error:
        raise SchedulerError(
            f"{QSTAT}: job {job_id} has stime {start!r} and walltime {limit!r}; expected 'Sat Nov "
            "21 02:10:43 2026' and '00:05:00'; ask the site which qstat this is"
        ) from error
