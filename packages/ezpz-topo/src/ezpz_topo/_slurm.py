"""Slurm: a job by its variables, and where these do not suffice, by scontrol and squeue."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from . import _commands
from ._allocation import Allocation
from ._env import EZPZ, EZPZ_LAUNCHER
from ._errors import InvalidVariableError, SchedulerError
from ._nodelist import expand_nodelist, find_host, get_hostname, get_tasks_per_node
from ._rank import Ancestor, explain_other_step, get_rank_info, is_step, launching_ancestors

# The variables.

_MAX_COMPONENTS = 128


def allocation(env: Mapping[str, str], *, commands: bool = True) -> Allocation:
    """Return the allocation that ``SLURM_JOB_ID`` names: of the step, in a step of ranks."""
    hosts, source = _read_hosts(env)
    if not hosts and not commands:
        raise SchedulerError(
            f"SLURM_JOB_ID={env['SLURM_JOB_ID'][:40]} without SLURM_JOB_NODELIST; expected Slurm "
            "to set both; unset SLURM_JOB_ID if no job is running, or let this ask scontrol"
        )
    if not hosts:
        return _find_own_node(job_by_id(env["SLURM_JOB_ID"], env), env)
    slots, slots_source = _read_slots(env, source, len(hosts))
    name_source = _find_job_variable(env, "SLURM_JOB_NAME")
    queue_source = _find_job_variable(env, "SLURM_JOB_PARTITION")
    ends_at = _read_end(env)
    sources = {
        "scheduler": "SLURM_JOB_ID",
        "job_id": "SLURM_JOB_ID",
        "hosts": source,
        "slots": slots_source,
        "name": name_source,
        "queue": queue_source,
        "ends_at": "SLURM_JOB_END_TIME" if ends_at else "",
    }
    job = Allocation(
        "slurm",
        env["SLURM_JOB_ID"],
        tuple(hosts),
        slots=slots,
        name=env.get(name_source),
        queue=env.get(queue_source),
        ends_at=ends_at,
        sources={key: variable for key, variable in sources.items() if variable},
    )
    return _find_own_node(job, env)


def _find_job_variable(env: Mapping[str, str], variable: str) -> str:
    """Return the variable, or that of a heterogeneous job's first component; empty if not set."""
    for name in (variable, f"{variable}_HET_GROUP_0"):
        if env.get(name):
            return name
    return ""


def _read_hosts(env: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the hosts of the step or job, and their variables' names; none if they are unset."""
    if _is_in_step(env):
        if not env.get("SLURM_STEP_NODELIST"):
            raise InvalidVariableError(
                f"SLURM_STEP_ID={env['SLURM_STEP_ID']} without SLURM_STEP_NODELIST; expected srun "
                "to set both; start the ranks with srun, or unset SLURM_STEP_ID"
            )
        return _read_nodelist(env, "SLURM_STEP", ""), "SLURM_STEP_NODELIST"
    suffixes = _list_component_suffixes(env)
    hosts: list[str] = []
    for suffix in suffixes:
        part = _read_nodelist(env, "SLURM_JOB", suffix)
        if not part:
            return [], ""
        hosts += part
    source = f"SLURM_JOB_NODELIST{suffixes[0]}"
    if len(suffixes) > 1:
        source += f" to {len(suffixes) - 1}"
    return list(dict.fromkeys(hosts)), source


def _read_nodelist(env: Mapping[str, str], prefix: str, suffix: str) -> list[str]:
    """Return the hosts of a nodelist's variable; their number must be that of another variable."""
    name = f"{prefix}_NODELIST{suffix}"
    count = f"{prefix}_NUM_NODES{suffix}"
    if not env.get(name):
        return []
    hosts = expand_nodelist(env[name])
    if env.get(count, "") not in ("", str(len(hosts))):
        raise InvalidVariableError(
            f"{name}={env[name][:60]!r} has {len(hosts)} nodes, {count}={env[count][:20]!r}; "
            "expected them to agree; unset the one that is a leftover of another job"
        )
    return list(dict.fromkeys(hosts))


def _list_component_suffixes(env: Mapping[str, str]) -> list[str]:
    """Return the ends of the variables' names for each component of a heterogeneous job."""
    components = env.get("SLURM_HET_SIZE", "")
    if not components:
        return [""]
    if not re.fullmatch("[0-9]{1,3}", components) or not 0 < int(components) <= _MAX_COMPONENTS:
        raise InvalidVariableError(
            f"SLURM_HET_SIZE={components[:40]!r}; expected a number of components; "
            "unset it if this is no heterogeneous job"
        )
    return [f"_HET_GROUP_{number}" for number in range(int(components))]


def _is_in_step(env: Mapping[str, str]) -> bool:
    """Return whether the step's nodes are this process's: not if it is that of MPI's proxies."""
    if not is_step(env):
        return False
    ancestors: Iterable[Ancestor] = ()
    if env is os.environ:
        ancestors = launching_ancestors()
    if explain_other_step(env, ancestors):
        return False
    rank = get_rank_info(env)
    launcher = rank.launcher
    if launcher == EZPZ.name:
        launcher = env.get(EZPZ_LAUNCHER, "")
    if launcher == "none":
        return False
    # The proxies' step may leave out the node that mpiexec itself runs on (Open MPI 5). Where all
    # ranks are on one node, mpiexec needed no proxies elsewhere, and this is the step it runs in.
    return launcher in ("slurm", "torchrun") or rank.local_world_size == rank.world_size


def _read_slots(
    env: Mapping[str, str], source: str, num_nodes: int
) -> tuple[tuple[int, ...] | None, str]:
    """Return the tasks of each node, and the variable that they were read from."""
    name = "SLURM_TASKS_PER_NODE"
    if source == "SLURM_STEP_NODELIST":
        name = "SLURM_STEP_TASKS_PER_NODE"
    elif env.get("SLURM_STEP_ID") or not env.get("SLURM_NTASKS") or env.get("SLURM_HET_SIZE"):
        # In a shell's step SLURM_TASKS_PER_NODE is that step's; without -n or
        # --ntasks-per-node it is 1, or the cores, and no tasks were requested at all.
        return None, ""
    if not env.get(name):
        return None, ""
    return get_tasks_per_node(env[name], num_nodes, variable=name), name


def _read_end(env: Mapping[str, str]) -> datetime | None:
    """Return ``SLURM_JOB_END_TIME`` (seconds since 1970), which newer Slurms have (22.05.8 not)."""
    text = env.get("SLURM_JOB_END_TIME", "")
    # Without a time limit it is 2**32 - 1 or thereabouts.
    if not re.fullmatch("[1-9][0-9]{8,9}", text) or int(text) >= 2**32 - 16:
        return None
    return datetime.fromtimestamp(int(text), tz=UTC)


def _find_own_node(job: Allocation, env: Mapping[str, str]) -> Allocation:
    """Add which node of the job this process is on: salloc's shell is on the login node."""
    # slurmd sets it for what it starts; a node's name need not be its host's.
    name = env.get("SLURMD_NODENAME")
    source = "SLURMD_NODENAME"
    if not name:
        name = find_host(get_hostname(), job.hosts)
        source = "uname, and no SLURMD_NODENAME"
    return replace(job, node_name=name, sources={**job.sources, "node_name": source})


# The controller: jobs by scontrol and squeue.

_SCONTROL = "scontrol show job"
_ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
}  # fmt: skip
"""States of a job that is over (squeue's manual page), which is still told for some minutes."""


def end_time(job_id: str, env: Mapping[str, str]) -> datetime | None:
    """Return when the job's time limit ends, by scontrol; None without a limit."""
    return job_by_id(job_id, env).ends_at


def job_of_this_host(env: Mapping[str, str], hostname: str) -> Allocation | None:
    """Return the user's running job that has this host; None without one, or without squeue."""
    if _commands.find("squeue", env) is None:
        return None
    argv = ("squeue", "--noheader", "--me", "--states=R", "--format=%A %N")
    lines = _commands.ask(argv, env=env_of_own_cluster(env)).stdout.splitlines()
    # Beside jobs there are lines such as "CLUSTER: a", and a site's own.
    here = []
    for line in lines:
        match = re.fullmatch(r"([0-9]+) (\S+)", line.strip())
        if match is not None and find_host(hostname, expand_nodelist(match[2])):
            here.append(match[1])
    if len(here) > 1:
        raise SchedulerError(
            f"host {hostname} is in {len(here)} running jobs: {', '.join(here)}; expected one; "
            f"say which: export SLURM_JOB_ID={here[0]}"
        )
    if not here:
        return None
    job = job_by_id(here[0], env)
    sources = dict.fromkeys([*job.sources, "node_name"], f"squeue, {_SCONTROL}")
    return replace(job, node_name=find_host(hostname, job.hosts), sources=sources)


def job_by_id(job_id: str, env: Mapping[str, str]) -> Allocation:
    """Return a job that runs, by scontrol: all components of a heterogeneous one."""
    if not re.fullmatch("[0-9]{1,10}(_[0-9]{1,10})?", job_id):
        raise InvalidVariableError(
            f"SLURM_JOB_ID={job_id[:40]!r}; expected a job's number; unset it if no job is running"
        )
    records = _query_records(job_id, env)
    for record in records:
        if record.het_job not in ("", job_id):
            # A component of a heterogeneous job is printed alone, its leader with all of them.
            return job_by_id(record.het_job, env)
    # The id of an array's last task is the array's too, and all its tasks are printed.
    records = [record for record in records if job_id in (record.job, record.het_job)]
    hosts: dict[str, None] = {}
    for record in records:
        if record.state not in _ENDED:
            hosts.update(dict.fromkeys(record.hosts))
    if not hosts:
        states = ", ".join(record.state for record in records) or "unknown"
        raise SchedulerError(
            f"{_SCONTROL} {job_id}: no nodes in use, state {states}; expected a job that runs; "
            "wait until it starts, or unset SLURM_JOB_ID"
        )
    first = records[0]
    facts = {"name": first.name, "queue": first.queue, "ends_at": first.ends_at}
    known = {key: fact for key, fact in facts.items() if fact}
    sources = dict.fromkeys(["scheduler", "job_id", "hosts", *known], _SCONTROL)
    return Allocation("slurm", job_id, tuple(hosts), sources=sources, **known)  # type: ignore[arg-type]


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


def _query_records(job_id: str, env: Mapping[str, str]) -> list[_Record]:
    # Its time zone is ours to choose.
    argv = (*_SCONTROL.split(), job_id)
    text = _commands.ask(argv, env={**env_of_own_cluster(env), "TZ": "UTC0"}).stdout
    begin = re.search("(?m)^JobId=", text)  # a site's lines may precede it
    if begin is None:
        return []
    records = [_parse_record(part) for part in re.split(r"\n\n(?=JobId=)", text[begin.start() :])]
    return [record for record in records if record is not None]


def _parse_record(text: str) -> _Record | None:
    # A job's name can have several lines, that look like any of these.
    head, _, body = text.rpartition("\n   UserId=")
    ids = re.match(r"JobId=([0-9]+)(?: HetJobId=([0-9]+))?.*? JobName=(.*)", head, re.DOTALL)
    if ids is None:
        return None
    nodes = _find_value("NodeList", body)
    hosts: list[str] = []
    if nodes != "(null)":
        hosts = expand_nodelist(nodes)
    return _Record(
        job=ids[1],
        het_job=ids[2] or "",
        name=ids[3],
        state=_find_value("JobState", body) or "unknown",
        queue=_find_value("Partition", body),
        hosts=tuple(hosts),
        ends_at=_parse_moment(_find_value("EndTime", body)),
    )


def _find_value(key: str, body: str) -> str:
    """Return the value of ``Key=value`` at a line's begin or after a space; empty without one."""
    match = re.search(rf"(?m)(?:^ {{3}}| ){key}=(\S+)", body)
    if match is None:
        return ""
    return match[1]


def _parse_moment(text: str) -> datetime | None:
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


def env_of_own_cluster(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which scontrol and squeue describe this job or host as expected."""
    changing = ("SLURM_TIME_FORMAT", "SQUEUE_", "SCONTROL_", "SLURM_CLUSTERS")
    plain = {name: value for name, value in env.items() if not name.startswith(changing)}
    # SLURM_CLUSTERS is where the user submits to. A job's nodes are on its own, local cluster, and
    # salloc's shell may be on a login node of another.
    cluster = env.get("SLURM_CLUSTER_NAME")
    if cluster and env.get("SLURM_CLUSTERS") and not env.get("SLURMD_NODENAME"):
        plain["SLURM_CLUSTERS"] = cluster
    return plain
