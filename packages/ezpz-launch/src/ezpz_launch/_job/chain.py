"""A chain of jobs: its record, what its schedulers are told and asked, and each job from inside.

Each job waits until the one before has ended, however it ended (``afterany``), so that a time
limit, a preemption or a lost node is seen through; one that begins and finds nothing to do ends at
once.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ezpz_launch._errors import LaunchError, StageError, UsageError, say
from ezpz_launch._job.queue import CLUSTERS, SCHEDULERS, env_of_cluster
from ezpz_launch._nodes.attempts import Attempts
from ezpz_launch._nodes.retries import Progress
from ezpz_launch._run.loop import REQUEUE
from ezpz_launch._run.record import (
    Stored,
    dump,
    iso_time,
    read_progress,
    read_record,
    read_records,
    records_folder,
    write,
)
from ezpz_topo import SchedulerError, TopoError, ask, get_pbs_folder

# The record of a job, or of a chain of them: one JSON file, beside the batch script.


class Chain(NamedTuple):
    """What is known of a job that was submitted, and of its successors; the fields of the file."""

    id: str  # the job's name, "-", and an id as a launch has it, which sorts by time
    name: str  # as the scheduler knows it
    kind: str  # job, until-done (each submits the next) or chain (submitted beforehand)
    command: tuple[str, ...]  # the user's, without what is secret; the script has it whole
    scheduler: str  # slurm or pbs
    script: str  # path of the batch script
    output: str  # path of a job's output, in which %j is the number of its id
    options: Mapping[str, object]  # nodes, time (seconds), queue, account: None where left out
    limit: int  # so many jobs at most
    start: str  # when it was submitted: ISO 8601, UTC
    jobs: tuple[Mapping[str, Any], ...] = ()  # in order; `job_entry` has the keys of each
    attempts: int = 0  # launches that were started, retries and requeues included
    progress_file: str = ""  # where ranks report their progress, the same for all jobs
    cluster: str = ""  # where its jobs are, if sbatch named one: an id is of one cluster
    best: int = -1  # the highest step that a job reported; -1 for none
    idle: int = 0  # jobs in a row without progress
    end: str | None = None  # when the outcome was known
    outcome: str | None = None  # done, failed, stopped or killed; None while it goes on
    why: str = ""  # of the outcome, in words for people


def job_entry(job_id: str, submitted: str) -> dict[str, Any]:
    """Return the entry of a job that was submitted; the job writes the rest as it runs."""
    return {
        "id": job_id,  # the scheduler's, whole: 12, 12.pbs-0001
        "submitted": submitted,
        "start": None,  # the last time that it began
        "end": None,  # None also where it was killed before it could write
        "exit_status": None,  # of ezpz-launch
        "launch": None,  # id of its record in launches; None where it was surplus
    }


def jobs_folder(env: Mapping[str, str]) -> str:
    """Return the folder of these records, beside that of launches; it need not exist."""
    return records_folder(env, "jobs")


def read_chain(path: str) -> Chain | None:
    """Return the record in a file; None where there is none that can be read."""
    return _chain_of(read_record(path, Chain))


def read_chains(env: Mapping[str, str], limit: int) -> list[Chain]:
    """Return the newest records, newest last."""
    found, _ = read_records(jobs_folder(env), limit, kind=Chain)
    return list(filter(None, map(_chain_of, found)))


def _chain_of(stored: Stored | None) -> Chain | None:
    keys = job_entry("", "").keys()
    if stored is None or not all(keys <= job.keys() for job in stored["jobs"]):
        return None
    fields = {name: stored[name] for name in Chain._fields}
    return Chain(**{**fields, "jobs": tuple(stored["jobs"])})


def path_of(chain: Chain) -> str:
    """Return the path of a chain's record: beside its progress."""
    return f"{chain.progress_file.removesuffix('.progress')}.json"


def output_of(chain: Chain, job_id: str) -> str:
    return chain.output.replace("%j", job_id.partition(".")[0])


def change_chain(path: str, **values: Any) -> Chain | None:
    """Read the record again, and write it with these fields changed; None where it is gone."""
    chain = read_chain(path)
    if chain is not None:
        chain = chain._replace(**values)
        write(path, dump(chain._asdict()))
    return chain


# Into the queue.


def keys_of(words: Sequence[str]) -> set[str]:
    """Return what words for a scheduler ask for, by its name: --qos, -A, "-l select"."""
    keys = set()
    for number, word in enumerate(words):
        if word == "-l":
            parts = "".join(words[number + 1 : number + 2]).split(",")
            keys |= {f"-l {part.partition('=')[0]}" for part in parts}
        elif word[:1] == "-":
            keys.add(word.partition("=")[0])
    return keys


def submit_words(chain: Chain, after: str) -> list[str]:
    """Return the words that submit one job, if any after another has ended."""
    scheduler = SCHEDULERS[chain.scheduler]({})
    words = list(scheduler.submit)
    if after and chain.cluster:
        words.append(f"--clusters={chain.cluster}")
    if after:
        words += [word.format(after) for word in scheduler.depend]
    return [*words, chain.script]


_OF_THE_CLIENT = (
    CLUSTERS, "SLURM_CONF", "SLURM_JWT", "SLURM_DEBUG_FLAGS", "SLURM_EXIT_ERROR",
    "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN", "SLURM_STEP_KILLED_MSG_NODE_ID",
    "PBS_EXEC", "PBS_CONF_FILE", "PBS_SERVER", "PBS_DEFAULT",
)  # fmt: skip
"""What users set for a scheduler's commands, and no job describes itself by (manual pages of
sbatch, squeue and jwt of Slurm 22.05.8; OpenPBS 23.06)."""

_NOT_OF_THE_JOB = (
    "SBATCH_JOB_NAME", "SBATCH_OUTPUT", "SBATCH_ARRAY_INX", "SBATCH_NO_REQUEUE", "SBATCH_WAIT",
)  # fmt: skip
"""What sbatch reads in place of the script's lines, or waits for the job's end by."""


def queue_one(chain: Chain, env: Mapping[str, str]) -> Chain:
    """Submit one more job; return the chain with it. Raises LaunchError with the site's words."""
    after = ""
    if chain.jobs:
        after = chain.jobs[-1]["id"]
    words = submit_words(chain, after)
    scheduler = SCHEDULERS[chain.scheduler](env)
    # A job's variables are not its successor's; and what sbatch reads there outranks the script.
    mine = {
        name: value
        for name, value in env.items()
        if not name.startswith(("SLURM_", "PBS_", CHAIN)) or name in _OF_THE_CLIENT
    }
    for label, variable in (
        ("time", "SBATCH_TIMELIMIT"), ("queue", "SBATCH_PARTITION"), ("account", "SBATCH_ACCOUNT")
    ):  # fmt: skip
        if chain.options[label]:
            mine.pop(variable, None)
    for variable in _NOT_OF_THE_JOB:
        mine.pop(variable, None)
    place, statuses = get_pbs_folder(env), range(-64, 256)
    try:
        told = ask(words, env=mine, attempts=1, good=statuses, place=place, time_limit=60)
    except SchedulerError as error:
        if "gave no answer" in str(error):
            raise LaunchError(f"{error}; it may be queued all the same: see ezpz jobs") from error
        raise
    if told.status:
        said = " ".join((told.stderr.strip() or told.stdout.strip() or "nothing").split())
        asked = ", ".join(f"{name} {value}" for name, value in chain.options.items() if value)
        raise LaunchError(
            f"{shlex.join(words)} was refused: {said}; asked for {asked}; expected what the site "
            f"allows (more words for {words[0]}: --submit-args)"
        )
    submitted = scheduler.find_job_id(told.stdout)
    if submitted is None:
        printed = "\n".join(filter(None, (told.stdout.strip(), told.stderr.strip())))
        raise LaunchError(
            f"{shlex.join(words)} ended well and printed {printed[:200]!r}; expected one line that "
            "is a job's id; a job may be queued all the same: ezpz jobs shows it, and ezpz kill "
            f"ends it; ask the site for a {words[0]} that prints the id"
        )
    job_id, cluster = submitted
    entry = job_entry(job_id, iso_time(time.time()))
    return chain._replace(jobs=(*chain.jobs, entry), cluster=cluster or chain.cluster)


def delete_jobs(chain: Chain, ids: Sequence[str], env: Mapping[str, str]) -> None:
    """Take jobs out of the queue; those that stay will find nothing to do."""
    if ids:
        try:
            scheduler = SCHEDULERS[chain.scheduler](env_of_cluster(chain.cluster, env))
            scheduler.end(ids[::-1], now=False)
        except TopoError as error:
            say(f"{' '.join(ids)}: still queued, to end at once when begun ({error})")


# From inside: a job of a chain, from its begin to its end.

CHAIN = "EZPZ_CHAIN"  # the variable by which a job's script names the record to ezpz-launch

_CUT_OFF = ("time limit", "preempted", "node failed", "ending")
"""States of our own job in which what becomes of its ranks is the scheduler's doing."""

_PATIENCE = 60.0  # seconds in which whoever submitted a job writes its number down


def see_through(env: Mapping[str, str], prepare: Callable[[int, str], Attempts]) -> int:
    """Run a launch that is a job of a chain, and have its successor queued; its exit status."""
    path = env[CHAIN]
    job_id = env.get("SLURM_JOB_ID") or env.get("PBS_JOBID") or ""
    chain = read_chain(path)
    if chain is None or not job_id:
        why = "is no record that can be read here" if chain is None else "is of a job"
        say(f"{CHAIN}={path} {why}; expected a job of ezpz submit; this launch counts for nothing")
        return prepare(0, "").run()
    link = _Link(path, chain, job_id, env)
    if why := link.why_over():
        say(f"job {job_id} has nothing to do: {why}")
        return 0
    try:
        attempts = prepare(link.chain.attempts, link.chain.progress_file)
        link.begin(attempts)
        status = attempts.run()
    except (LaunchError, TopoError) as error:
        if isinstance(error, StageError) and not error.is_shared:
            error.exit_status = REQUEUE  # the next job has other nodes
        link.end(getattr(error, "exit_status", UsageError.exit_status), None)
        raise
    link.end(status, attempts)
    return status


class _Link:
    """One job of a chain, seen from inside."""

    def __init__(self, path: str, chain: Chain, job_id: str, env: Mapping[str, str]) -> None:
        self._path, self._id, self._env = path, job_id, env
        self._mine = {"EZPZ_SCHEDULER_TIMEOUT": "3", **env}  # to end, there may be seconds
        until = time.monotonic() + _PATIENCE
        while job_id not in (ids := [each["id"] for each in chain.jobs]):
            # A script that the user has submitted is known to no one.
            if time.monotonic() > until or chain.id not in chain.script:
                break
            time.sleep(0.2)
            chain = read_chain(path) or chain
        self.chain = chain
        if job_id not in ids:  # submitted by hand
            self._change(jobs=(*chain.jobs, job_entry(job_id, iso_time(time.time()))))
            ids.append(job_id)
        self._number = ids.index(job_id)

    def _change(self, **values: Any) -> None:
        try:
            self.chain = change_chain(self._path, **values) or self.chain._replace(**values)
        except OSError as error:
            say(f"{self._path} cannot be written ({error.strerror}): its job is not on record")
            self.chain = self.chain._replace(**values)

    def _change_job(self, changes: Mapping[str, Any], **values: Any) -> None:
        jobs = [*(read_chain(self._path) or self.chain).jobs]
        jobs[self._number] = {**jobs[self._number], **changes}
        self._change(jobs=jobs, **values)

    def why_over(self) -> str:
        """Say why there is nothing to do; empty where there is. Settles what was cut off before."""
        jobs, number = self.chain.jobs, self._number
        if not self.chain.outcome and (jobs[number]["start"] or number):
            is_requeued = jobs[number]["start"] is not None
            before = jobs[number] if is_requeued else jobs[number - 1]
            if before["start"] and not is_requeued and self._state_of(before["id"]) == "cancelled":
                # Whatever its ranks had time for.
                self._settle("killed", f"job {before['id']} was deleted")
            elif before["start"] and before["end"] is None:
                self._count_progress()
        return f"{self.chain.outcome}: {self.chain.why}" if self.chain.outcome else ""

    def begin(self, attempts: Attempts) -> None:
        now = iso_time(time.time())
        changes = {"start": now, "end": None, "exit_status": None, "launch": attempts.launch_id}
        self._change_job(changes, attempts=attempts.count)
        if error := self._queue_next():
            say(f"no successor is queued, which is tried again at the end: {error}")

    def end(self, status: int, attempts: Attempts | None) -> None:
        """Write how it ended, and decide whether the chain goes on."""
        count = attempts.count if attempts else self.chain.attempts
        end = {"end": iso_time(time.time()), "exit_status": status}
        self._change_job(end, attempts=count)
        if self.chain.outcome:
            return
        if status == 0:
            self._settle("done", f"job {self._id} ended with 0")
            return
        how = self._state_of(self._id) if status > 128 else ""
        if how == "cancelled":
            self._settle("killed", f"job {self._id} was deleted")
        elif status in (75, 143) or how in _CUT_OFF:
            self._go_on()
        else:
            self._settle("failed", f"job {self._id} ended with exit status {status}")

    def _go_on(self) -> None:
        self._count_progress()
        if self.chain.outcome:
            return
        left = self.chain.limit - self._number - 1
        if left < 1:
            many = f"all {self.chain.limit} jobs are used" if self.chain.limit > 1 else "one job"
            self._settle("stopped", f"{many}; it can go on: submit it again")
        elif error := self._queue_next():
            self._settle("stopped", f"no successor can be queued: {error}")
        elif self._number + 1 < len(self.chain.jobs):
            following = self.chain.jobs[self._number + 1]["id"]
            say(f"job {self._number + 1} of {self.chain.limit} has ended; {following} goes on")

    def _queue_next(self) -> str:
        """Queue a successor, where there may and should be one; return what went wrong."""
        chain, number = self.chain, self._number
        if chain.kind != "until-done" or not number + 1 == len(chain.jobs) < chain.limit:
            return ""
        try:
            chain = queue_one(chain, self._env)
        except (LaunchError, TopoError) as error:
            return str(error)
        self._change(jobs=chain.jobs, cluster=chain.cluster)
        return ""

    def _count_progress(self) -> None:
        step = read_progress(self.chain.progress_file)
        progress = Progress(self.chain.best, self.chain.idle).after(step)
        self._change(best=progress.best, idle=progress.idle)
        if self.chain.limit > 1 and (why := progress.why_stop("jobs")):
            self._settle("stopped", why)

    def _state_of(self, job_id: str) -> str:
        """Return how a job ended, or that it runs; empty where it is not told."""
        env = env_of_cluster(self.chain.cluster, self._mine)
        try:
            job = SCHEDULERS[self.chain.scheduler](env).job(job_id)
        except TopoError:
            return ""  # the limit and the progress bound what follows
        return job.state if job else ""

    def _settle(self, outcome: str, why: str) -> None:
        """Write the chain's outcome, and take what is left of it out of the queue."""
        chain = read_chain(self._path) or self.chain
        if chain.outcome:
            self.chain = chain
            return
        self._change(outcome=outcome, why=why, end=iso_time(time.time()))
        if chain.limit > 1:
            say(f"{chain.name}: {outcome}: {why}")
        delete_jobs(chain, [each["id"] for each in chain.jobs[self._number + 1 :]], self._mine)
