"""This user's jobs, of scheduler and records together: shown, followed, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ezpz_launch._errors import LaunchError, UsageError, discard, say
from ezpz_launch._job.chain import Chain, change_chain, output_of, path_of, read_chain, read_chains
from ezpz_launch._job.queue import (
    CLUSTERS,
    RUNNING,
    SCHEDULERS,
    WAITING,
    Job,
    Scheduler,
    require_one_cluster,
    schedulers,
)
from ezpz_launch._plan.options import Option, parse_number, split
from ezpz_launch._run.loop import REQUESTS
from ezpz_launch._run.processes import send
from ezpz_launch._run.record import (
    ID,
    KEPT,
    Stored,
    aligned,
    duration,
    iso_time,
    last_record,
    moment,
    name_of,
    read_progress,
    read_record,
    read_records,
    records_folder,
    shortened,
    state_of,
    write,
)
from ezpz_topo import NoSchedulerError, SchedulerError, find_schedulers, get_hostname, same_host

# A job, its chain and its launches together.

_LATELY = 24 * 3600.0  # seconds for which a job that is over is shown without --all


class Entry(NamedTuple):
    """One thing that a user submitted: a job, or a chain of them in the job that it has come to."""

    job: Job
    chain: Chain | None = None
    launches: tuple[Stored, ...] = ()  # of all its jobs, the newest last

    @property
    def first_failure(self) -> Mapping[str, Any] | None:
        return self.launches[-1]["first_failure"] if self.launches else None

    @property
    def failed_rank(self) -> str:
        its = self.first_failure
        return f"rank {its['rank']} on {its['host']} {its['how']}" if its else ""

    @property
    def left(self) -> str:
        """The time until its limit, while it runs."""
        its = self.job
        return duration(its.end - time.time()) if its.state in RUNNING and its.end else ""


def survey(env: Mapping[str, str], since: float) -> list[Entry]:
    """Return what waits or runs, and what ended since then, as it was submitted."""
    chains = read_chains(env, KEPT)
    listed = _list_jobs(chains, env, since)
    begun = min([since, *(job.start or since for job in listed if job.state in RUNNING)])
    oldest = time.strftime("%Y%m%dT%H%M%S", time.gmtime(begun))
    records, _ = read_records(records_folder(env), KEPT, oldest)
    launches: dict[str, list[Stored]] = {}
    for stored in records:
        launches.setdefault(_of_array(stored["job_id"] or ""), []).append(stored)
    jobs_of_ids: dict[str, dict[str, Job]] = {}  # by id, then by cluster
    for job in listed:
        jobs_of_ids.setdefault(job.id, {})[job.cluster] = job
    entries: list[Entry] = []
    # A scheduler that was installed again has the numbers of old jobs for new ones.
    for chain in reversed(chains):
        ids = [job["id"] for job in chain.jobs]
        jobs = []
        for job_id in ids:
            found = jobs_of_ids.get(job_id, {})
            # Where sbatch named none it was the local one, which was asked first.
            cluster = chain.cluster or next(iter(found), "")
            if cluster in found:
                jobs.append(found.pop(cluster))
        if jobs or moment(chain.end or chain.start) >= since:
            keys = dict.fromkeys([*ids, *(job.key for job in jobs)])
            its = [each for key in keys for each in launches.pop(key, [])]
            entries.insert(0, Entry(_current(chain, jobs), chain, tuple(its)))
    for found in jobs_of_ids.values():
        entries += [Entry(job, None, tuple(launches.pop(job.key, []))) for job in found.values()]
    launches.pop("", None)
    entries += [Entry(_recorded(its[-1]), None, tuple(its)) for its in launches.values()]
    return sorted(entries, key=lambda entry: entry.job.submitted or 0.0)


def _list_jobs(chains: Sequence[Chain], env: Mapping[str, str], since: float) -> list[Job]:
    """Return each job that schedulers tell of, here and on clusters that sbatch named."""
    listed: dict[tuple[str, str], Job] = {}
    for scheduler in schedulers(env).values():
        with contextlib.suppress(NoSchedulerError):
            listed.update(((job.cluster, job.key), job) for job in scheduler.jobs(since))
    for cluster, scheduler in _other_clusters(chains, env).items():
        try:
            remote = scheduler.jobs(since)
        except SchedulerError as error:
            say(f"{error}; jobs on cluster {cluster} are not shown")
            continue
        for job in remote:
            listed.setdefault((job.cluster, job.key), job)
    return list(listed.values())


def _other_clusters(chains: Sequence[Chain], env: Mapping[str, str]) -> dict[str, Scheduler]:
    """Return what asks clusters that sbatch named, of jobs that may not be over, by their names."""
    asked = env.get(CLUSTERS, "").split(",")
    names = [chain.cluster for chain in chains if chain.cluster and chain.outcome is None]
    if "all" in asked or "slurm" not in find_schedulers(env):
        return {}
    return {name: SCHEDULERS["slurm"]({**env, CLUSTERS: name}) for name in names
            if name not in asked}  # fmt: skip


def _scheduler_of(job: Job, env: Mapping[str, str]) -> Scheduler | None:
    """Return what asks a job's scheduler, and no other cluster's; None without its commands."""
    if job.is_remote:
        env = {**env, CLUSTERS: job.cluster}
    return schedulers(env).get(job.scheduler)


def _of_array(job_id: str) -> str:
    """Return the id of the array that a task of PBS is of: 40[].srv of 40[1].srv."""
    return re.sub(r"\[[0-9]+\]", "[]", job_id)


def _current(chain: Chain, jobs: Sequence[Job]) -> Job:
    """Return the job that a chain has come to; where the scheduler tells of none, as recorded."""
    alive = sorted((job for job in jobs if not job.is_over), key=lambda job: job.state in WAITING)
    if alive and chain.outcome is None:
        return alive[0]
    begun = [job for job in chain.jobs if job["start"]] or list(chain.jobs)
    last: Mapping[str, Any] = begun[-1] if begun else {"id": "", "exit_status": None, "end": None}
    job = next((job for job in jobs if job.id == last["id"]), None)
    if alive:  # it is being ended, or its surplus goes
        return (job if job and not job.is_over else alive[0])._replace(why=chain.why)
    if job is None:
        end = moment(last["end"] or chain.end or chain.start)
        job = Job(
            chain.scheduler, last["id"], last["id"], chain.name, "unknown", end=end,
            cluster=chain.cluster, is_remote=bool(chain.cluster),
        )  # fmt: skip
    state = _OUTCOMES.get(chain.outcome or "", job.state)
    ended = chain.outcome is not None or chain.limit == 1
    why = chain.why or (job.why if ended else "no job of the chain is left")
    status = job.exit_status if last["exit_status"] is None else last["exit_status"]
    return job._replace(state=state, why=why, exit_status=status)


_OUTCOMES = {"done": "completed", "failed": "failed", "killed": "cancelled"}


def _recorded(stored: Stored) -> Job:
    """Return a job that no scheduler tells of, by its last launch."""
    status = stored["exit_status"]
    ended = "failed" if status else "completed"
    state = {"ended": ended, "running": "running"}.get(state_of(stored), "unknown")
    why = "" if state != "unknown" else "no scheduler tells of it, and its launch not how it ended"
    start, end = moment(stored["start"]), stored["end"] and moment(stored["end"])
    job_id = stored["job_id"]
    return Job(
        stored["scheduler"], job_id, job_id, name_of(stored["command"]), state, why=why,
        hosts=stored["hosts"], submitted=start, start=start, end=end, exit_status=status,
    )  # fmt: skip


def progress_of(entry: Entry, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the last step, and loss, that the newest launch's History wrote, and when."""
    for stored in reversed(entry.launches):
        beside = os.path.join(records_folder(env), stored["id"])
        with contextlib.suppress(OSError, ValueError), open(f"{beside}.run", "rb") as file:
            return last_record(os.fsdecode(file.read()).rstrip("\n"))
        if (step := read_progress(f"{beside}.progress")) is not None:
            return {"step": step}
    if entry.chain and (step := read_progress(entry.chain.progress_file)) is not None:
        return {"step": step}
    return {}


# `ezpz-launch jobs`.

JOBS_PAGE = """\
usage: ezpz jobs [NAME|ID] [--all] [--json]

Your jobs, from the scheduler and from ezpz's records: those that wait or run,
and those that ended within a day. With a name or an id: one of them whole.

  --all     all that is known, however old
  --json    for programs

examples:
  ezpz jobs               a table: state, time left, last step and loss
  ezpz jobs train         everything about the newest job of that name"""


def jobs(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the table of this user's jobs, or one of them whole."""
    options, words = _parse("jobs", argv, ("--all", "--json"), JOBS_PAGE)
    if "--help" in options:
        return JOBS_PAGE
    entries = survey(env, 0.0 if "--all" in options else time.time() - _LATELY)
    if words:
        entries = [pick(entries, words[0], env)]
    if "--json" in options:
        told = [_as_json(entry, env) for entry in entries]
        return json.dumps(told[0] if words else told, indent=1)
    if words:
        return _whole(entries[0], env)
    if not entries:
        where = ", ".join(find_schedulers(env)) or "no scheduler's commands are on this host"
        return f"no jobs ({where}); --all shows those that ended more than a day ago"
    titles = ("job", "name", "state", "nodes", "left", "step", "loss", "why")
    return "\n".join(aligned([titles, *(_row(entry, env) for entry in entries)]))


def _parse(
    name: str, argv: Sequence[str], known: Sequence[str], page: str
) -> tuple[set[str], list[str]]:
    options = {"--help" if word == "-h" else word for word in argv if word.startswith("-")}
    words = [word for word in argv if not word.startswith("-")]
    if unknown := sorted(options - {*known, "--help"}):
        usage = page.partition("\n")[0]
        raise UsageError(f"{name}: {unknown[0]!r} is not known here; expected {usage}")
    if len(words) > 1:
        raise UsageError(f"{name}: {words[1]!r}; expected one name or id at most")
    return options, words


def _ids_of(entry: Entry) -> list[str]:
    """Return the ids of an entry's jobs, whole and as numbers."""
    ids: list[str] = [entry.job.id]
    # The last task of a Slurm array has the array's own number, which is not the task's.
    if entry.job.id.partition("_")[0] != entry.job.key:
        ids.append(entry.job.key)
    if entry.chain:
        ids += [job["id"] for job in entry.chain.jobs]
    return [*ids, *(each.partition(".")[0] for each in ids)]


def pick(entries: Sequence[Entry], word: str, env: Mapping[str, str]) -> Entry:
    """Return what is meant by a name or an id: of several of a name the newest."""
    of_id = [entry for entry in entries if word in _ids_of(entry)]
    require_one_cluster(word, [entry.job for entry in of_id])
    for entry in entries[::-1]:
        if entry in of_id or word == entry.job.name:
            return entry
        if entry.chain and word == entry.chain.id:
            return entry
    if re.fullmatch(r"[0-9]+[0-9_\[\]]*([.@].*)?", word):
        chains = [entry.chain for entry in entries if entry.chain]
        everywhere = [*schedulers(env).values(), *_other_clusters(chains, env).values()]
        for scheduler in everywhere:  # a task of an array; older than what it lists
            with contextlib.suppress(NoSchedulerError):
                if (found := scheduler.job(word)) is not None:
                    return Entry(found)
    names = ", ".join(dict.fromkeys(f"{e.job.name} ({e.job.id})" for e in entries[-8:])) or "none"
    raise LaunchError(f"no job {word!r}; expected a name or an id of yours, such as {names}")


def state_in_words(job: Job) -> str:
    if job.state == "failed" and job.exit_status is not None:
        return f"failed with status {job.exit_status}"
    if job.state in ("time limit", "deadline"):
        return f"ended by its {job.state}"
    return job.state


def _when(moment: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if moment else ""


def _row(entry: Entry, env: Mapping[str, str]) -> tuple[str, ...]:
    job, chain, progress = entry.job, entry.chain, progress_of(entry, env)
    why = (job.state == "failed" and entry.failed_rank) or job.why
    if job.state in WAITING and job.start:
        why = f"starts about {_when(job.start)}; {why}"
    begun = sum(1 for each in chain.jobs if each["start"]) if chain else 0
    name = f"{job.name} ({begun} of {chain.limit})" if chain and chain.limit > 1 else job.name
    loss = progress.get("loss", "")
    return (
        job.id, shortened(name, 30), state_in_words(job), str(job.nodes or ""), entry.left,
        str(progress.get("step", "")), f"{loss:.4g}" if isinstance(loss, float) else str(loss),
        shortened(why, 60),
    )  # fmt: skip


def _as_json(entry: Entry, env: Mapping[str, str]) -> dict[str, Any]:
    job = entry.job._asdict()
    del job["is_remote"]
    for key in ("submitted", "start", "end"):
        job[key] = job[key] and iso_time(job[key])
    chain = entry.chain._asdict() if entry.chain else None
    return {
        **job, "progress": progress_of(entry, env), "first_failure": entry.first_failure,
        "chain": chain, "launches": [stored["id"] for stored in entry.launches],
    }  # fmt: skip


def _whole(entry: Entry, env: Mapping[str, str]) -> str:
    job, chain, progress = entry.job, entry.chain, progress_of(entry, env)
    left = f" ({entry.left} left)" if entry.left else ""
    rows = [
        ("job", f"{job.id} of {job.scheduler}"), ("cluster", job.cluster), ("name", job.name),
        ("state", state_in_words(job)), ("why", job.why), ("queue", job.queue),
        ("nodes", f"{job.nodes or ''} {job.hosts}".strip()), ("submitted", _when(job.submitted)),
        ("starts about" if job.state in WAITING else "started", _when(job.start)),
        ("ended" if job.is_over else "time limit", _when(job.end) + left),
        ("restarts", str(job.restarts or "")),
        ("output", _output(entry)[0]), ("step", str(progress.get("step", ""))),
        ("loss", str(progress.get("loss", ""))), ("recorded", _when(progress.get("time"))),
        ("metrics", progress.get("run", "")),
        ("first failure", entry.failed_rank),
        ("chain", f"{chain.id}, {chain.kind}, {len(chain.jobs)} of {chain.limit} jobs: "
         + ", ".join(each["id"] for each in chain.jobs) if chain and chain.limit > 1 else ""),
        ("outcome", f"{chain.outcome}: {chain.why}" if chain and chain.outcome else ""),
        *(("launch", f"{each['id']} on {each['hosts']}: {state_of(each)}")
          for each in entry.launches),
    ]  # fmt: skip
    return "\n".join(aligned([(name, shortened(text, 200)) for name, text in rows if text]))


def _output(entry: Entry) -> tuple[str, str]:
    """Return the paths of a job's output and errors; of a job of ours its record tells them."""
    job, chain = entry.job, entry.chain
    if chain:
        return (output_of(chain, job.id),) * 2
    return job.stdout, job.stderr


# `ezpz-launch launches`: past launches, in a job or without.

LAUNCHES_PAGE = """\
usage: ezpz launches [-n N] [--json]

The newest N launches, by default 20, the newest last.

examples:
  ezpz launches            a table: when, how long, exit status, ranks, command
  ezpz launches -n 3       the last three
  ezpz launches --json     as they were recorded, for programs"""

_LAUNCHES = (
    Option("limit", "", "N", "n", parse=parse_number),
    Option("json", ""),
    Option("help", "", short="h"),
)


def launches(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the table of this user's launches."""
    options, words = split(argv, _LAUNCHES)
    if "help" in options:
        return LAUNCHES_PAGE
    limit = parse_number("-n", str(options.get("limit", 20)))
    if words or limit < 1:
        wrong = repr(words[0]) if words else f"-n {limit}"
        usage = LAUNCHES_PAGE.partition("\n")[0]
        raise UsageError(f"launches: {wrong}: expected {usage}, of 1 launch at least")
    folder = records_folder(env)
    found, damaged = read_records(folder, limit)
    for stored in found:
        stored["state"] = state_of(stored)
    if unknown := [stored for stored in found if stored["state"] == "unknown"]:
        _look_for_jobs(unknown, env)
    if "json" in options:
        return json.dumps(found, indent=1)
    titles = ("when", "took", "exit", "ranks", "hosts", "job", "command")
    none = f"no launches so far; they are recorded in {folder}"
    lines = aligned([titles, *map(_launch_row, found)]) if found else [none]
    if damaged:
        what = f"{damaged} file{'s' * (damaged > 1)} in {folder}"
        lines.append(f"left out, no record that can be read: {what}")
    return "\n".join(lines)


def _look_for_jobs(unknown: Sequence[Stored], env: Mapping[str, str]) -> None:
    """Put ``ended by the scheduler`` on launches, killed on other hosts, whose jobs are over."""
    brief = {"EZPZ_SCHEDULER_TIMEOUT": "3", **env}
    remote = _other_clusters(read_chains(env, KEPT), brief).values()
    running: dict[str, set[str]] = {}
    silent: set[str] = set()
    for name, scheduler in [*schedulers(brief).items(), *(("slurm", each) for each in remote)]:
        try:
            jobs = [job for job in scheduler.jobs(time.time()) if job.state in RUNNING]
        except SchedulerError:
            silent.add(name)
            continue
        running.setdefault(name, set()).update(each for job in jobs for each in (job.id, job.key))
    for stored in unknown:
        name = stored["scheduler"]
        job_id = stored["job_id"]
        if job_id and name in running.keys() - silent and _of_array(job_id) not in running[name]:
            stored["state"] = "ended by the scheduler"


def _launch_row(stored: Stored) -> tuple[str, ...]:
    start, end = moment(stored["start"]), stored["end"]
    status = str(stored["exit_status"]) if stored["state"] == "ended" else stored["state"]
    if stored["attempt"]:
        status += f", attempt {stored['attempt'] + 1}"
    of_nodes = [each for each in stored["attempts"] if each.get("whose") == "node"]
    if bad := list(dict.fromkeys(host for each in of_nodes for host in each["bad"])):
        status += f", without {', '.join(bad)}"
    job = " ".join(filter(None, (stored["machine"], stored["job_id"])))
    return (
        _when(start), duration(moment(end) - start) if end else "", status, str(stored["nproc"]),
        shortened(stored["hosts"], 24), shortened(job, 30),
        shortened(shlex.join(stored["command"]), 60),
    )  # fmt: skip


# `ezpz-launch follow`.

FOLLOW_PAGE = """\
usage: ezpz follow [NAME|ID]

Print a job's output as it comes: through the queue, saying what it waits for,
across requeues and all jobs of a chain, until the end. Without a name: your
only job that is not over. Ctrl-C leaves the job alone.

exit status: the job's own; 143 where it was cancelled, preempted, or ended by
its time limit; 137 where a node failed or memory was out; 130 Ctrl-C

examples:
  ezpz follow
  ezpz follow train && ezpz report outputs/train"""

_LOOK = 0.3  # seconds between two looks at the files
_ASKED = (2.0, 20.0)  # seconds between two questions to the scheduler, at first and later
_LATE = 10.0  # seconds that a file has to appear after its job's end (NFS, PBS's staging)
_STATUS = {"completed": 0, "failed": 1, "unknown": 1, "node failed": 137, "out of memory": 137}
"""What is returned of a job that has no exit status of its own; of all others 143."""

_BEFORE = 64  # bytes by which a file is known to be the one that was read
_FROM = 1 << 16  # bytes: of a longer file only the end is printed at first


def follow(argv: Sequence[str], env: Mapping[str, str]) -> str | int:
    """Print a job's output until it ends; return its exit status."""
    options, words = _parse("follow", argv, (), FOLLOW_PAGE)
    if "--help" in options:
        return FOLLOW_PAGE
    entry = _meant(words, env)
    try:
        while True:
            job = _Follower(entry, env).run()
            if (following := _successor(entry)) is None:
                return _ended(entry._replace(job=job))
            entry = following
    except BrokenPipeError:
        discard(1)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        say(f"job {entry.job.id} goes on without us; ezpz kill {entry.job.id} ends it")
        return 130


def _meant(words: Sequence[str], env: Mapping[str, str]) -> Entry:
    entries = survey(env, time.time() - _LATELY)
    if words:
        return pick(entries, words[0], env)
    alive = [entry for entry in entries if not entry.job.is_over]
    if len(alive) != 1:
        ids = ", ".join(f"{entry.job.id} ({entry.job.name})" for entry in alive[-8:])
        raise UsageError(
            f"{len(alive)} jobs wait or run{': ' * bool(alive)}{ids}; expected one; give a name or "
            "an id, as ezpz jobs shows them"
        )
    return alive[0]


def _successor(entry: Entry) -> Entry | None:
    """Return the entry of the chain's next job, where it goes on with one."""
    if entry.chain is None or entry.chain.limit == 1:
        return None
    if (chain := read_chain(path_of(entry.chain))) is None:
        return None
    ids = [job["id"] for job in chain.jobs if job["start"] or chain.outcome is None]
    later = ids[ids.index(entry.job.id) + 1 :] if entry.job.id in ids else []
    if not later:
        return None
    say(f"job {entry.job.id} is over; the chain goes on with job {later[0]}")
    job = entry.job._replace(id=later[0], key=later[0], state="queued", why="", exit_status=None)
    return entry._replace(job=job, chain=chain)


def _ended(entry: Entry) -> int:
    job = entry.job
    why = f" ({job.why})" if job.why else ""
    say(f"job {job.id} ({job.name}): {state_in_words(job)}{why}")
    if job.exit_status is not None and job.state in ("failed", "completed"):
        return job.exit_status
    return _STATUS.get(job.state, 143)


class _Follower:
    """Follows one job to its end."""

    def __init__(self, entry: Entry, env: Mapping[str, str]) -> None:
        self._entry, self._job, self._env = entry, entry.job, env
        self._scheduler = _scheduler_of(entry.job, env)
        self._tails: list[Tail] = []
        self._said, self._silent = "", False

    def run(self) -> Job:
        """Copy what the job writes until it is over, and return what it has come to."""
        begun, due = time.monotonic(), 0.0
        while True:
            now = time.monotonic()
            if now >= due:
                self._look()
                if self._job.is_over:
                    break
                due = now + min(_ASKED[1], max(_ASKED[0], (now - begun) / 20))
            self._copy()
            time.sleep(_LOOK)
        until = time.monotonic() + _LATE
        while (self._copy() or self._lacks_output()) and time.monotonic() <= until:
            time.sleep(_LOOK)
        if self._lacks_output():
            path = self._tails[0].path
            say(f"job {self._job.id}: {path} is not on this host; see {self._job.hosts}")
        return self._job

    def _lacks_output(self) -> bool:
        return bool(self._job.hosts and self._tails) and not any(t.found for t in self._tails)

    def _look(self) -> None:
        """Ask the scheduler how it stands, and say what is new."""
        try:
            job = self._scheduler.job(self._job.id) if self._scheduler else None
            self._job = job = job or self._recorded()
            self._silent = False
        except SchedulerError as error:
            if not self._silent:
                say(f"{error}; following goes on")
            self._silent = True
            return
        entry = self._entry._replace(job=job)
        if not self._tails and any(paths := _output(entry)):
            out, err = paths
            self._tails = [Tail(out, 1)] if out else []
            self._tails += [Tail(err, 2)] if err and err != out else []
        if (text := self._in_words(job)) != self._said and not job.is_over:
            say(text)
        self._said = text

    def _recorded(self) -> Job:
        """Return what our records tell of a job that its scheduler tells no more of."""
        if self._job.is_over:
            return self._job
        with contextlib.suppress(LaunchError):
            found = pick(survey(self._env, time.time() - _LATELY), self._job.id, self._env).job
            if found.is_over:
                return found
        return self._job._replace(state="unknown", why="its scheduler tells no more of it")

    def _in_words(self, job: Job) -> str:
        text = f"job {job.id} ({job.name}): {state_in_words(job)}"
        if job.state in WAITING:
            starts = f", starts about {_when(job.start)}" if job.start else ""
            return text + f" ({job.why})" * bool(job.why) + starts
        kept = (
            f"; PBS keeps its output on {job.keeper} until it ends (qsub -koed writes it at once)"
        )
        return text + f" on {job.hosts}" * bool(job.hosts) + kept * bool(job.keeper)

    def _copy(self) -> bool:
        return bool([None for tail in self._tails if tail.copy()])


class Tail:
    """Copies what is written to a file to one of our own streams, as it comes."""

    def __init__(self, path: str, fd: int) -> None:
        self.path, self._fd = path, fd
        self.found, self._at = False, 0
        self._last = b""  # what stood right before there

    def copy(self) -> bool:
        """Copy what is new; return whether there was anything."""
        if not os.path.isfile(self.path):  # a FIFO would wait for its writer
            return False
        try:
            # Opened again each time: NFS tells a file's new length to who opens it.
            opened = open(self.path, "rb")  # noqa: SIM115 - closed below
        except OSError:
            return False
        with opened:
            return self._copy(opened.fileno())

    def _copy(self, file: int) -> bool:
        size, copied = os.fstat(file).st_size, False
        if not self.found and size > _FROM:
            self._at = size - _FROM
            say(f"the end of {self.path}, of which {self._at} bytes stand before this:")
        self.found = True
        if os.pread(file, len(self._last), self._at - len(self._last)) != self._last:
            self._at, self._last = 0, b""  # a requeued job has begun it again
        while chunk := os.pread(file, 1 << 16, self._at):
            self._at += len(chunk)
            copied, self._last = True, (self._last + chunk)[-_BEFORE:]
            while chunk:
                chunk = chunk[os.write(self._fd, chunk) :]
        return copied


# `ezpz-launch kill`.

KILL_PAGE = """\
usage: ezpz kill [NAME|ID|LAUNCH] [--now]

End a job, a chain of jobs, or one launch inside a job. Ranks have their grace
to save a checkpoint; then the job goes, and no successor of a chain starts.
Without a name: your only job that is not over; inside a job its only launch.

  --now     without grace

examples:
  ezpz kill train        the job, or all of the chain
  ezpz kill LAUNCH       one launch, by its id in ezpz launches --json"""

_HEARD = 20.0  # seconds that ezpz-launch on another host has to hear us: it looks every 2
_LONGEST = 900.0  # seconds that ranks may take to save what they have
_GONE = 120.0  # seconds that a scheduler has to end a job


def kill(argv: Sequence[str], env: Mapping[str, str]) -> str | int:
    """End a job, a chain, or a launch; return 0 once it is gone."""
    options, words = _parse("kill", argv, ("--now",), KILL_PAGE)
    if "--help" in options:
        return KILL_PAGE
    now, inside = "--now" in options, env.get("SLURM_JOB_ID") or env.get("PBS_JOBID")
    meant = [
        stored for stored in read_records(records_folder(env), KEPT)[0]
        if state_of(stored) in ("running", "unknown")
        and (stored["id"] == words[0] if words else inside and stored["job_id"] == inside)
    ]  # fmt: skip
    if words and not meant and re.fullmatch(ID, words[0]):
        raise LaunchError(f"launch {words[0]} does not run; expected one that does: ezpz launches")
    if not words and inside and len(meant) != 1:
        ids = ", ".join(stored["id"] for stored in meant) or "none"
        raise UsageError(f"launches that run in job {inside}: {ids}; expected one; give its id")
    if not meant:
        return _end_job(_meant(words, env), env, now=now)
    one = meant[0]
    if (ended := _end_launches(meant, env, "now" if now else "with grace")) is None:
        raise LaunchError(
            f"launch {one['id']} goes on; expected ezpz-launch, process {one['pid']} on "
            f"{one['host']}, to end it; end its job: ezpz kill {one['job_id'] or ''}"
        )
    say(f"launch {one['id']} has ended, exit status {ended['exit_status']}")
    return 0


def _end_launches(launches: Sequence[Stored], env: Mapping[str, str], how: str) -> Stored | None:
    """Have launches end on all of their nodes; return the last one's record, once it has."""
    folder, asked, ended = records_folder(env), list[str](), None
    for one in launches:
        beside = os.path.join(folder, one["id"])
        if same_host(one["host"], get_hostname()) and how != "with the job":
            for _ in range(REQUESTS[how]):  # the second means: now
                send(one["pid"], signal.SIGTERM)
                time.sleep(_LOOK)
        else:
            try:
                write(f"{beside}.end", f"{how}\n")
            except OSError as error:
                say(f"{folder} cannot be written ({error.strerror}): {one['id']} is not asked")
                continue
        asked.append(beside)
    began = time.monotonic()
    for beside in asked:
        ended = _ended_record(beside, began)
    return ended


def _ended_record(beside: str, began: float) -> Stored | None:
    """Wait until a launch has ended, as long as ezpz-launch has heard of it."""
    while time.monotonic() < began + _LONGEST:
        its = read_record(f"{beside}.json")
        if its is None or its["end"] is not None:
            return its
        is_deaf = time.monotonic() > began + _HEARD and os.path.exists(f"{beside}.end")
        if is_deaf or state_of(its) == "never ended":
            break
        time.sleep(_LOOK)
    with contextlib.suppress(OSError):
        os.unlink(f"{beside}.end")
    return None


def _end_job(entry: Entry, env: Mapping[str, str], *, now: bool) -> int:
    job, chain = entry.job, entry.chain
    if job.is_over:
        raise LaunchError(
            f"job {job.id} ({job.name}) is over: {state_in_words(job)}; expected one that waits "
            "or runs"
        )
    scheduler = _scheduler_of(job, env)
    if scheduler is None:
        raise LaunchError(f"no commands of {job.scheduler} on this host; expected them on PATH")
    ids = [job.id]
    if chain is not None:
        path, end = path_of(chain), iso_time(time.time())
        try:
            chain = change_chain(path, outcome="killed", why="ezpz kill", end=end) or chain
        except OSError as error:
            say(f"{path} cannot be written ({error.strerror}); jobs that follow may start")
        # The last first: no successor begins meanwhile.
        ids = [each["id"] for each in reversed(chain.jobs)]
    launches = [] if now else [one for one in entry.launches if one["end"] is None]
    what = "its ranks save what they have, and then it goes" if launches else "ending it"
    say(f"job {', '.join(ids)}: {what}")
    # Ranks have the grace of their launch, which may be longer than the scheduler's.
    _end_launches(launches, env, "with the job")
    scheduler.end(ids, now=now)
    until = time.monotonic() + _GONE
    while time.monotonic() < until:
        found = scheduler.job(job.id)
        if found is None or found.is_over:
            say(f"job {job.id}: {state_in_words(found) if found else 'is gone'}")
            return 0
        time.sleep(1.0)
    raise LaunchError(
        f"job {job.id} has not ended within {_GONE:g} s; expected {job.scheduler} to end it; "
        f"ezpz kill --now {job.id} ends it without grace"
    )
