"""Jobs as Slurm and PBS tell of them, in the same words for both; and their end."""

from __future__ import annotations

import getpass
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ezpz_launch._errors import UsageError, say
from ezpz_launch._run.record import moment
from ezpz_topo import (
    Answer,
    InvalidVariableError,
    SchedulerError,
    ask,
    find_schedulers,
    fold_nodelist,
    get_pbs_folder,
    get_pbs_jobs,
)

# One job, as its scheduler tells of it.

WAITING = ("queued", "requeued", "held", "cannot start")
RUNNING = ("running", "suspended", "ending")


class Job(NamedTuple):
    """What a scheduler tells of a job, in the same words for all of them; times since 1970."""

    scheduler: str
    id: str  # as people give it: 12, 12_3, 12.pbs-0001
    key: str  # as its own variables tell it: of Slurm's array tasks another number
    name: str
    state: str  # one of WAITING or RUNNING; else how it ended
    why: str = ""  # the scheduler's own words
    queue: str = ""
    nodes: int = 0
    hosts: str = ""
    submitted: float | None = None
    start: float | None = None  # while it waits: expected
    end: float | None = None  # while it runs: that of its time limit
    exit_status: int | None = None
    restarts: int = 0
    stdout: str = ""
    stderr: str = ""
    keeper: str = ""  # the host on whose disk its output lies until it ends
    cluster: str = ""  # Slurm's name of where it is; an id is of one cluster
    is_remote: bool = False  # whether SLURM_CLUSTERS has to name its cluster

    @property
    def is_over(self) -> bool:
        return self.state not in (*WAITING, *RUNNING)


def _number(text: object) -> int:
    found = re.match("[0-9]{1,9}", str(text))
    return int(found[0]) if found else 0


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class Scheduler(ABC):
    """What is asked of a scheduler, in the same words for all; each has its own answers."""

    name: str
    directive: str
    submit: Sequence[str]  # words that submit a script
    depend: Sequence[str]  # those that have it wait for the end of another
    array: Sequence[str]  # options of `submit` that make many tasks of one script
    words: Mapping[str, str]  # of the batch script, by what they ask for
    job_line: str  # matches the line in which `submit` prints a job's id: groups id and cluster

    def __init__(self, env: Mapping[str, str]) -> None:
        # The times that it prints, and reads, are of the zone in which it runs.
        self._env = {**env, "TZ": "UTC0"}

    @abstractmethod
    def jobs(self, since: float) -> list[Job]:
        """Return the user's jobs that wait or run, and those that ended since, as it tells."""

    @abstractmethod
    def job(self, job_id: str) -> Job | None:
        """Return a job with the paths of its output; None where it tells no more of it."""

    @abstractmethod
    def end(self, job_ids: Sequence[str], *, now: bool) -> None:
        """End jobs, each in the order given: with the grace that the scheduler has, or without."""

    def find_job_id(self, text: str) -> tuple[str, str] | None:
        """Return the id that `submit` printed, and Slurm's cluster; None unless one line has it."""
        # Sites have lines of their own before and after it, such as an account's balance.
        matches = [re.fullmatch(self.job_line, line.strip()) for line in text.splitlines()]
        ids = {(match["id"], match["cluster"] or "") for match in matches if match}
        return ids.pop() if len(ids) == 1 else None

    def chunk(self, _count: int) -> tuple[str, str]:
        """Return what asks for all of each of so many nodes, beside their number, and why."""
        return "", ""

    def _ask(self, *argv: str, good: tuple[int, ...] = (0,)) -> Answer:
        return ask(argv, env=self._env, attempts=1, good=good, place=get_pbs_folder(self._env))


# Slurm.

CLUSTERS = "SLURM_CLUSTERS"
"""The variable by which users say which clusters Slurm's commands ask, and submit to."""


def env_of_cluster(cluster: str, env: Mapping[str, str]) -> Mapping[str, str]:
    """Return an environment in which Slurm's commands ask the cluster that sbatch named, if any."""
    if env.get("SLURMD_NODENAME") and cluster in ("", env.get("SLURM_CLUSTER_NAME")):
        return {name: value for name, value in env.items() if name != CLUSTERS}  # it is this one
    return {**env, CLUSTERS: cluster} if cluster else env


def require_one_cluster(job_id: str, jobs: Iterable[Job]) -> None:
    """Raise UsageError if jobs of this id are on several clusters."""
    clusters = sorted({job.cluster for job in jobs if job.cluster})
    if len(clusters) > 1:
        raise UsageError(
            f"job {job_id} is on clusters {', '.join(clusters)}; expected one; say which: "
            f"export {CLUSTERS}={clusters[0]}"
        )


_SEPARATOR, _RECORD = "\x1f", "\x1e"
_COLUMNS = {
    "id": "JobArrayID:128", "key": "JobID:16", "state": "State:24", "why": "Reason:128",
    "queue": "Partition:128", "nodes": "NumNodes:16", "submitted": "SubmitTime:24",
    "start": "StartTime:24", "end": "EndTime:24", "status": "exit_code:16",
    "restarts": "RestartCnt:8", "cluster": "Cluster:128",
}  # fmt: skip
_HOSTS = {"hosts": "NodeList:65536"}  # of 10,000 nodes; too long for each of a thousand jobs
_NAME = {"name": "Name:1024"}  # the last, as it may hold anything

_SLURM_STATES = {
    "PENDING": "queued", "REQUEUED": "requeued", "REQUEUE_FED": "requeued",
    "REQUEUE_HOLD": "held", "SPECIAL_EXIT": "held", "RESV_DEL_HOLD": "held",
    "RUNNING": "running", "CONFIGURING": "running", "RESIZING": "running", "SIGNALING": "running",
    "SUSPENDED": "suspended", "STOPPED": "suspended",
    "COMPLETING": "ending", "STAGE_OUT": "ending",
    "COMPLETED": "completed", "FAILED": "failed", "TIMEOUT": "time limit",
    "CANCELLED": "cancelled", "PREEMPTED": "preempted", "NODE_FAIL": "node failed",
    "OUT_OF_MEMORY": "out of memory", "DEADLINE": "deadline", "BOOT_FAIL": "node failed",
    "REVOKED": "cancelled",
}  # fmt: skip
_NEVER = (
    "DependencyNeverSatisfied", "BadConstraints", "PartitionNodeLimit", "PartitionTimeLimit",
    "InvalidAccount", "InvalidQOS", "AccountNotAllowed", "QOSNotAllowed",
)  # fmt: skip
"""Reasons for which a job waits that no waiting changes (squeue's manual page)."""

_NO_REASON = ("completed", "cancelled", "preempted", "time limit")
"""States of which the reason is an old one, or says the same again."""


class _Slurm(Scheduler):
    name, directive = "slurm", "#SBATCH"
    submit: Sequence[str] = ("sbatch", "--parsable")
    depend: Sequence[str] = ("--dependency=afterany:{}",)
    array: Sequence[str] = ("--array", "-a")
    # --parsable prints 12, or 12;cluster; a site's own sbatch may print as it does without.
    job_line = "(?:Submitted batch job )?(?P<id>[0-9]+)(?:(?:;| on cluster )(?P<cluster>[^ ;]+))?"
    # By the labels of a dry run.
    words: Mapping[str, str] = {
        "name": "--job-name={}", "nodes": "--nodes={}", "sharing": "--exclusive",
        "devices": "--gpus-per-node={}", "time": "--time={}", "queue": "--partition={}",
        "account": "--account={}", "after": "--dependency=afterok:{}",
        "output": "--output={}", "requeue": "--requeue --open-mode=append",
        "lost nodes": "--no-kill",
    }  # fmt: skip

    def __init__(self, env: Mapping[str, str]) -> None:
        changing = ("SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN", "SQUEUE_", "SACCT_", "SCANCEL_")
        super().__init__({k: value for k, value in env.items() if not k.startswith(changing)})
        self._clusters = env.get(CLUSTERS, "")

    def _ask_on(self, cluster: str, *argv: str, good: tuple[int, ...] = (0,)) -> Answer:
        """Ask one of several clusters alone: scontrol takes no more than one."""
        env = {**self._env, CLUSTERS: cluster} if self._clusters and cluster else self._env
        return ask(argv, env=env, attempts=1, good=good)

    def jobs(self, since: float) -> list[Job]:
        found = self._squeue("--me", columns=_COLUMNS)
        known = {(job.cluster, job.id) for job in found}
        found += [job for job in self._sacct(since) if (job.cluster, job.id) not in known]
        return found

    def job(self, job_id: str) -> Job | None:
        found = self._squeue(f"--jobs={job_id}", columns={**_COLUMNS, **_HOSTS})
        found = found or self._sacct(0.0, job_id)
        found = [job for job in found if job.id == job_id]
        if not found:
            return None
        require_one_cluster(job_id, found)
        # squeue tells other files of an array's tasks than there are (22.05.8).
        show = ("scontrol", "show", "job", job_id)
        told = self._ask_on(found[0].cluster, *show, good=(0, 1)).stdout
        paths = [re.search(rf"(?m)^ {{3}}{key}=(.*)", told) for key in ("StdOut", "StdErr")]
        stdout, stderr = (path[1] if path else "" for path in paths)
        return found[0]._replace(stdout=stdout, stderr=stderr)

    def end(self, job_ids: Sequence[str], *, now: bool) -> None:
        for words in (["--full", "--signal=KILL"], []) if now else ([],):
            self._ask("scancel", *words, *job_ids, good=(0, 1))

    def _squeue(self, whose: str, columns: Mapping[str, str]) -> list[Job]:
        columns = {**columns, **_NAME}
        form = ",".join(f"{column}{_SEPARATOR}" for column in columns.values())
        words = ("--noheader", "--states=all", whose, f"--Format={form[:-1]}{_RECORD}")
        answer = self._ask("squeue", *words, good=(0, 1))
        # Of several clusters one may know the id.
        if answer.status and "Invalid job id" not in answer.stderr:
            answer = self._ask("squeue", *words)  # once more: it says what is wrong
        records = _read_records(answer.stdout, tuple(columns))
        return [_slurm_job(record, is_remote=bool(self._clusters)) for record in records]

    def _sacct(self, since: float, job_id: str = "") -> list[Job]:
        """Return jobs that squeue tells no more of, where there is accounting."""
        fields = {
            "id": "JobID", "key": "JobIDRaw", "state": "State", "status": "ExitCode",
            "queue": "Partition", "nodes": "NNodes", "hosts": "NodeList", "submitted": "Submit",
            "start": "Start", "end": "End", "cluster": "Cluster", "name": "JobName",
        }  # fmt: skip
        which = [f"--jobs={job_id}"] if job_id else [f"--starttime=now-{int(time.time() - since)}"]
        if self._clusters:  # of the variable sacct takes no notice (22.05.8)
            which.append(f"--clusters={self._clusters}")
        words = ("-X", "--noheader", "--parsable2", f"--delimiter={_SEPARATOR}", *which)
        answer = self._ask("sacct", *words, f"--format={','.join(fields.values())}", good=(0, 1))
        if answer.status and "disabled" not in answer.stderr:
            say(f"sacct: {answer.stderr.strip()}; jobs that ended some minutes ago are not shown")
        rows = [line.split(_SEPARATOR) for line in answer.stdout.splitlines()]
        return [
            _slurm_job(dict(zip(fields, row, strict=True)), is_remote=bool(self._clusters))
            for row in rows
            if len(row) == len(fields)
        ]


def _read_records(text: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the records that squeue printed, by column; other lines stand between them."""
    records = []
    for record in text.split(_RECORD)[:-1]:
        first, *others = record.split(_SEPARATOR, len(columns) - 1)
        # The last is the name, which may hold anything. Before the first there may be lines such
        # as "CLUSTER: a", and a site's own.
        cells = [first.rpartition("\n")[2], *others]
        if len(cells) == len(columns):
            records.append(dict(zip(columns, map(str.strip, cells), strict=True)))
    return records


def _slurm_job(told: Mapping[str, str], *, is_remote: bool = False) -> Job:
    word, why = told["state"].partition(" ")[0], told.get("why", "")
    state, restarts = _SLURM_STATES.get(word, word.lower()), _number(told.get("restarts", ""))
    if state == "queued":
        if "held" in why.lower():
            state = "held"
        elif why.startswith(_NEVER):
            state = "cannot start"
        elif restarts:
            state = "requeued"
    status = None if state in (*WAITING, *RUNNING) else _slurm_status(told["status"])
    if status and state == "failed" and told["status"].endswith(":0"):
        # sacct takes 128 from a status above it (22.05.8; its JSON says 0).
        why = f"or with status {status + 128}: sacct tells both alike"
    hosts = told.get("hosts", "")
    return Job(
        "slurm", told["id"], told["key"], told["name"], state,
        why="" if why == "None" or state in _NO_REASON else why, queue=told["queue"],
        nodes=_number(told["nodes"]), hosts="" if hosts == "None assigned" else hosts,
        submitted=_slurm_moment(told["submitted"]), start=_slurm_moment(told["start"]),
        end=None if state in WAITING else _slurm_moment(told["end"]), restarts=restarts,
        # Slurm tells 0 also of what ended without an exit status: cancelled, its node lost.
        exit_status=status if state == "completed" else status or None,
        cluster=told.get("cluster", ""), is_remote=is_remote,
    )  # fmt: skip


_LAST_SIGNAL = 64


def _slurm_status(text: str) -> int | None:
    """Read an exit status: sacct's ``status:signal``, or squeue's, which is what wait(2) gives."""
    if ":" in text:
        status, number = map(_number, text.split(":")[:2])
    elif text.isdecimal():
        told = os.waitstatus_to_exitcode(int(text) & 0xFFFF)
        status, number = max(told, 0), max(-told, 0)
    else:
        return None
    # 125 is no signal: memory was out.
    return None if number > _LAST_SIGNAL else 128 + number if number else status


def _slurm_moment(text: str) -> float | None:
    return moment(f"{text}+00:00") if text[:1].isdigit() else None  # N/A, Unknown


# PBS.

_PBS_STATES = {
    "Q": "queued", "T": "queued", "W": "queued", "H": "held", "R": "running", "B": "running",
    "S": "suspended", "U": "suspended", "E": "ending",
}  # fmt: skip
_PBS_ENDS = {
    -11: "requeued", -14: "node failed", -20: "node failed", -24: "too many CPUs",
    -25: "too many CPUs", -26: "out of memory", -27: "out of memory", -28: "too much CPU time",
    -29: "time limit",
}  # fmt: skip
"""By Exit_status (OpenPBS 23.06, job.h); other negative ones: it could not be started."""

_PBS_ID = r"[0-9]+(?:\[[0-9]*\])?(?:[.@][0-9A-Za-z_.@-]+)?"  # 12.srv, 40[].srv, 40[1].srv
_GONE = (0, 35, 153)  # exit statuses of qdel: done, has finished, is unknown
_PBS_HISTORY = 1000  # so many jobs that are over are asked for, the newest


class _Pbs(Scheduler):
    name, directive = "pbs", "#PBS"
    # -f: without a helper in the background, which would hold our pipe open.
    submit: Sequence[str] = ("qsub", "-f")
    depend: Sequence[str] = ("-W", "depend=afterany:{}")
    array: Sequence[str] = ("-J",)
    # 12.server; a number such as 12.50 is none.
    job_line = r"(?P<id>[0-9]+\.(?=.*[A-Za-z])[0-9A-Za-z_.-]+)(?P<cluster>)"
    words: Mapping[str, str] = {
        "name": "-N {}", "nodes": "-l select={}", "sharing": "-l place=scatter",
        "time": "-l walltime={}", "queue": "-q {}", "account": "-A {}",
        "after": "-W depend=afterok:{}", "output": "-j oe -k doe", "requeue": "-r y",
        "lost nodes": "-W tolerate_node_failures=all",
    }  # fmt: skip

    def jobs(self, since: float) -> list[Job]:
        # Not all that qstat would tell: others may have thousands.
        mine = ("qselect", "-u", getpass.getuser())
        ids = _read_ids(self._ask(*mine).stdout)
        after = time.strftime("%Y%m%d%H%M", time.gmtime(since))
        try:
            over = self._ask(*mine, "-x", "-s", "FMX", f"-tm.gt.{after}").stdout
            ids += _read_ids(over)[-_PBS_HISTORY:]
        except SchedulerError as error:
            say(f"{error}; jobs that are over are not shown")
        return [_pbs_job(job_id, job) for job_id, job in get_pbs_jobs(ids, self._env).items()]

    def job(self, job_id: str) -> Job | None:
        try:
            told = get_pbs_jobs((job_id,), self._env)
        except InvalidVariableError:  # it has another scheduler's form, such as 12_3
            return None
        return next((_pbs_job(key, job) for key, job in told.items()), None)

    def end(self, job_ids: Sequence[str], *, now: bool) -> None:
        self._ask("qdel", *["-W", "force"] * now, *job_ids, good=_GONE)

    def chunk(self, count: int) -> tuple[str, str]:
        nodes = self._ask_json("nodes", "pbsnodes", "-a", "-F", "json")
        has = [node.get("resources_available", {}) for node in nodes.values()]
        kinds = {(int(each.get("ncpus", 0)), int(each.get("ngpus", 0))) for each in has}
        if len(kinds) != 1:
            listed = "; ".join(f"{cpus} CPUs, {gpus} GPUs" for cpus, gpus in sorted(kinds))
            raise UsageError(
                f"the nodes here differ ({listed or 'pbsnodes tells of none'}); expected to be "
                'told which are meant: --submit-args "-l select=2:ncpus=64:ngpus=4"'
            )
        if count > len(has):
            raise UsageError(
                f"-N {count}: there are {len(has)} nodes here; expected at most so many"
            )
        ((cpus, gpus),) = kinds
        return f":ncpus={cpus}" + (f":ngpus={gpus}" if gpus else ""), "pbsnodes: all are alike"

    def _ask_json(self, key: str, *argv: str) -> dict[str, Any]:
        """Return what stands under a key of the JSON that a command prints."""
        told = self._ask(*argv).stdout
        # A site's lines may stand before and after it.
        text = told[told.find("{") : told.rfind("}") + 1]
        try:
            return dict(json.loads(text, strict=False)[key])
        except (ValueError, KeyError, TypeError) as error:
            printed = f"{' '.join(argv)} printed {told[:60]!r}"
            expected = f"expected JSON with {key!r}; run it by hand"
            raise SchedulerError(f"{printed}; {expected}") from error


def _read_ids(text: str) -> list[str]:
    """Return the ids that qselect printed, one a line; other lines are a site's own."""
    return [line for line in text.splitlines() if re.fullmatch(_PBS_ID, line)]


def _pbs_job(job_id: str, told: Mapping[str, Any]) -> Job:
    resources = told.get("Resource_List") or {}
    letter, comment = told.get("job_state", ""), told.get("comment", "").strip()
    state, why = _PBS_STATES.get(letter, "completed"), comment if letter in "QHWT" else ""
    status: int | None = None
    runs = _number(told.get("run_count", 0))
    start = told.get("stime")
    end = start + resources["walltime"] if start and "walltime" in resources else None
    if state == "held" and (depends := told.get("depend")) and told.get("Hold_Types") == "s":
        state, why = "queued", f"depends on {depends}"
    elif state == "queued" and comment.startswith("Can Never Run"):
        state = "cannot start"
    elif state == "queued" and runs:
        state = "requeued"
    elif letter not in _PBS_STATES:
        state, status = _pbs_end(told, comment)
        # "Job run at ... and exceeded resource mem"; what else there is the state says.
        _, exceeded, what = comment.rpartition(" exceeded resource ")
        why = f"exceeded {what}" if exceeded and state not in _NO_REASON else ""
        end = told.get("obittime") or told.get("mtime")
    if state in WAITING:
        start, end = (told.get("estimated") or {}).get("start_time"), None
    hosts = re.findall(r"(?:^|\+)([^/+]+)/", told.get("exec_host", ""))
    stdout, stderr, keeper = _pbs_files(job_id, told, hosts)
    return Job(
        "pbs", job_id, job_id, told.get("Job_Name", ""), state, why=why,
        queue=told.get("queue", ""), nodes=_number(resources.get("nodect", 0)),
        hosts=fold_nodelist(list(dict.fromkeys(hosts))), submitted=told.get("qtime"), start=start,
        end=end, exit_status=status, restarts=max(0, runs - 1), stdout=stdout, stderr=stderr,
        keeper=keeper,
    )  # fmt: skip


def _pbs_end(told: Mapping[str, Any], comment: str) -> tuple[str, int | None]:
    text = told.get("Exit_status", "")
    status = int(text) if re.fullmatch("-?[0-9]{1,6}", text) else None
    # An Exit_status above 255 is 256 and the signal that killed the script.
    shown = status if status is None or status < 256 else 128 + status - 256
    if status is not None and status < 0:
        return _PBS_ENDS.get(status, "could not start"), None
    if "terminated by Scheduler" in comment:
        return "preempted", shown
    if "terminated" in comment or told.get("substate") == "91" or status is None:
        return "cancelled", shown
    return "failed" if status else "completed", shown


def _pbs_files(job_id: str, told: Mapping[str, Any], hosts: Sequence[str]) -> tuple[str, str, str]:
    """Return the paths of a job's output, and the host that keeps it until the end."""
    kept, joined = told.get("Keep_Files", "n"), told.get("Join_Path", "n")
    number = job_id.partition(".")[0]
    paths = {}
    for stream, key, ending in (("o", "Output_Path", "OU"), ("e", "Error_Path", "ER")):
        path = re.sub("^[^:/]*:", "", told.get(key, ""))
        if stream in kept and "d" not in kept:
            name = f"{told.get('Job_Name', '')}.{stream}{number.partition('[')[0]}"
            path = os.path.join(os.path.expanduser("~"), name)
        elif path.endswith("/") or os.path.isdir(path):
            path = os.path.join(path, f"{job_id}.{ending}")
        index = re.search(r"\[([0-9]+)\]", job_id)
        paths[stream] = path.replace("^array_index^", index[1] if index else "")
    if joined in ("oe", "eo"):
        paths = dict.fromkeys("oe", paths[joined[0]])
    spooled = not any(stream in kept for stream in "oe")
    return paths["o"], paths["e"], hosts[0] if spooled and hosts else ""


SCHEDULERS: Mapping[str, Callable[[Mapping[str, str]], Scheduler]] = {"slurm": _Slurm, "pbs": _Pbs}
"""By name, to be given the environment."""


def schedulers(env: Mapping[str, str]) -> dict[str, Scheduler]:
    """Return those whose commands are on this host, by name."""
    return {name: SCHEDULERS[name](env) for name in find_schedulers(env)}
