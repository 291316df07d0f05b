"""PBS: what its variables, its node file and qstat say of a job."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from . import _commands
from ._allocation import Allocation
from ._commands import TIME_LIMIT
from ._errors import HostfileError, InvalidVariableError, SchedulerError
from ._hostfile import read_slots
from ._nodelist import find_host, get_hostname

# qstat's JSON: asked for, mended where it is not quite JSON, and parsed.

QSTAT = "qstat -f -F json"
_UNKNOWN, _FINISHED = 153, 35

_JOB_ID = re.compile(r"[0-9]+(?:\[[0-9]*\])?(?:[.@][0-9A-Za-z_.@-]+)?")

Attributes = Mapping[str, object]
"""One job of qstat's JSON."""


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


def ask_for_job(job_id: str, env: Mapping[str, str]) -> Attributes:
    status, jobs = ask_for_jobs([job_id], env)
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


def ask_for_jobs(
    job_ids: Sequence[str], env: Mapping[str, str]
) -> tuple[int, dict[str, Attributes]]:
    """Return qstat's exit status and the jobs that it told."""
    for job_id in job_ids:
        if not _JOB_ID.fullmatch(job_id):
            raise InvalidVariableError(
                f"PBS job id {job_id[:80]!r}; expected one such as 1.pbs-0001 or 40[1].pbs-0001; "
                "unset PBS_JOBID, or give it as qstat prints it"
            )
    # qstat itself makes text of times, with ctime (OpenPBS, qstat.c): the zone is ours to choose.
    answer = _commands.ask(
        (*QSTAT.split(), *job_ids),
        env={**env, "TZ": "UTC0"},
        good=(0, _UNKNOWN, _FINISHED),
        place=get_pbs_folder(env),
    )
    if answer.status and not answer.stdout.strip():
        return answer.status, {}
    told = _parse(answer.stdout).get("Jobs", {})
    jobs = told if isinstance(told, dict) else {}
    return answer.status, {key: job for key, job in jobs.items() if isinstance(job, dict)}


def _parse(text: str) -> Attributes:
    """Parse qstat's JSON, which is not always JSON; numbers stay the text that they were."""
    import json  # noqa: PLC0415

    problem = ""
    for mend in (str, _mended):
        try:
            # A job called 1e5 is told as a number: as text it keeps its name.
            told = json.loads(
                mend(text), strict=False, parse_int=str, parse_float=str, parse_constant=str
            )
        except (ValueError, RecursionError) as error:
            problem = problem or str(error)
            continue
        if isinstance(told, dict):
            return told
        problem = f"a JSON {type(told).__name__}"
    raise SchedulerError(
        f"{QSTAT} printed what is no JSON object ({problem}), {text[:60]!r}; expected one with "
        "Jobs; run it by hand: this PBS is older than its JSON, or a job's name or arguments "
        "hold quotes or backslashes that it does not escape"
    )


def _mended(text: str) -> str:
    """Mend what OpenPBS is known to print: its own escapes, and bare words and 007 for numbers.

    Most of it is the user's environment, which nobody here needs.
    """
    text = re.sub(
        r'(?ms)^([ \t]*)"Variable_List":\s*\{$.*?(?:^\1\}|\Z)', r'\1"Variable_List":{}', text
    )
    text = re.sub(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?', lambda m: m[0] if m[1] else r"\\", text)
    return re.sub(r'(?m)^([ \t]*"[^"\n]*":[ \t]*)([^\s"{}\[\],]+)(,?)$', r'\1"\2"\3', text)


def text_of(attributes: Attributes, key: str) -> str:
    value = attributes.get(key)
    return value if isinstance(value, str) else ""


# PBS's server: what qstat and qselect tell of jobs, as allocations.

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


def _job_of_this_host(env: Mapping[str, str], hostname: str) -> Allocation | None:
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


# PBS: a job's variables and node file, and only where these do not do, its server.


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
        # MERGED  # 6 ms, and most jobs have their node file

        try:
            job = job_by_id(env["PBS_JOBID"], env)
        except SchedulerError as error:
            raise SchedulerError(f"{why}, and {error}") from error
        job = replace(job, notes=(f"{why}: asked qstat",))
    name, queue = env.get("PBS_JOBNAME") or job.name, env.get("PBS_QUEUE") or job.queue
    job = replace(job, name=name, queue=queue, sources={**job.sources, **variables})
    return _placed(job, get_hostname())


def job_of_this_host(env: Mapping[str, str], hostname: str) -> Allocation | None:
    """Return the user's running job that has this host (see `_pbs_jobs.job_of_this_host`)."""
    # MERGED

    job = _job_of_this_host(env, hostname)
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
    # MERGED

    try:
        # It must not hold up for long what can go on without.
        told = cpus_of_hosts(env["PBS_JOBID"], {TIME_LIMIT: "2", **env})
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
