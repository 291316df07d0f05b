"""Slurm: what its variables and scontrol say of a job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from . import _commands
from ._allocation import Allocation
from ._env import STAMP, STAMP_LAUNCHER
from ._errors import InvalidVariableError, SchedulerError
from ._nodelist import expand_nodelist, find_host, get_hostname, tasks_of_nodes
from ._rank import get_rank_info, is_step, why_not_ours

# Slurm's controller: what scontrol and squeue tell of jobs, as allocations.

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


# Slurm: a job's variables, and only where these do not do, scontrol and squeue.

_MAX_COMPONENTS = 128


def allocation(env: Mapping[str, str], *, commands: bool = True) -> Allocation:
    """Return the allocation that ``SLURM_JOB_ID`` names: of the step, within a step.

    The steps that a shell runs in (batch script, salloc's interactive step) and those of MPI's
    proxies are not meant: there it is the job's. scontrol is asked only where the variables
    have no nodelist.

    Raises:
        InvalidVariableError: The variables contradict each other.
        NodelistError: The nodelist does not parse.
        SchedulerError: There is no nodelist, and scontrol did not answer.
    """
    hosts, source = _hosts(env)
    if not hosts and not commands:
        raise SchedulerError(
            f"SLURM_JOB_ID={env['SLURM_JOB_ID'][:40]} without SLURM_JOB_NODELIST; expected Slurm "
            "to set both; unset SLURM_JOB_ID if no job is running, or let this ask scontrol"
        )
    if not hosts:
        # MERGED  # 6 ms, and every job has its nodelist

        return _placed(job_by_id(env["SLURM_JOB_ID"], env), env)
    sources = {"scheduler": "SLURM_JOB_ID", "job_id": "SLURM_JOB_ID", "hosts": source}
    slots = _slots(env, source, len(hosts))
    if slots:
        sources["slots"] = slots[1]
    # A heterogeneous job has these for each of its components only.
    told: dict[str, str | None] = {}
    for field, variable in (("name", "SLURM_JOB_NAME"), ("queue", "SLURM_JOB_PARTITION")):
        found = next((v for v in (variable, f"{variable}_HET_GROUP_0") if env.get(v)), None)
        told[field] = None if found is None else env[found]
        if found:
            sources[field] = found
    ends_at = _end_from_variable(env)
    if ends_at:
        sources["ends_at"] = "SLURM_JOB_END_TIME"
    return _placed(
        Allocation(
            "slurm",
            env["SLURM_JOB_ID"],
            tuple(hosts),
            slots=slots[0] if slots else None,
            name=told["name"],
            queue=told["queue"],
            ends_at=ends_at,
            sources=sources,
        ),
        env,
    )


def _hosts(env: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the hosts that are meant, and the variables that tell them; none where none do."""
    if _is_in_step(env):
        if not env.get("SLURM_STEP_NODELIST"):
            raise InvalidVariableError(
                f"SLURM_STEP_ID={env['SLURM_STEP_ID']} without SLURM_STEP_NODELIST; expected srun "
                "to set both; start the ranks with srun, or unset SLURM_STEP_ID"
            )
        lists, counts = ["SLURM_STEP_NODELIST"], ["SLURM_STEP_NUM_NODES"]
    else:
        lists, counts = ["SLURM_JOB_NODELIST"], ["SLURM_JOB_NUM_NODES"]
        components = env.get("SLURM_HET_SIZE", "")
        if components:
            if not re.fullmatch("[0-9]{1,3}", components) or int(components) > _MAX_COMPONENTS:
                raise InvalidVariableError(
                    f"SLURM_HET_SIZE={components[:40]!r}; expected a number of components; "
                    "unset it if this is no heterogeneous job"
                )
            groups = [f"_HET_GROUP_{k}" for k in range(int(components))]
            lists = [lists[0] + group for group in groups]
            counts = [counts[0] + group for group in groups]
    hosts: list[str] = []
    for name, count in zip(lists, counts, strict=True):
        if not env.get(name):
            return [], ""
        part = expand_nodelist(env[name])
        told = env.get(count, "")
        if told and told != str(len(part)):
            raise InvalidVariableError(
                f"{name}={env[name][:60]!r} has {len(part)} nodes, {count}={told[:20]!r}; expected "
                "them to agree; unset the one that is a leftover of another job"
            )
        hosts += part
    source = lists[0] if len(lists) == 1 else f"{lists[0]} to {lists[-1].rpartition('_')[2]}"
    return list(dict.fromkeys(hosts)), source


def _is_in_step(env: Mapping[str, str]) -> bool:
    """Whether the step's nodes are this process's: not if it is the step of MPI's proxies.

    That one may leave out the node that mpiexec itself runs on (Open MPI 5). Where all ranks are
    on one node, mpiexec needed no proxies elsewhere, and this is the step that it runs in.
    """
    if not is_step(env):
        return False
    from ._rank import launching_ancestors  # noqa: PLC0415

    if why_not_ours(env, launching_ancestors() if env is os.environ else ()):
        return False
    rank = get_rank_info(env)
    launcher = env.get(STAMP_LAUNCHER, "") if rank.launcher == STAMP.name else rank.launcher
    if launcher == "none":
        return False
    return launcher in ("slurm", "torchrun") or rank.local_world_size == rank.world_size


def _slots(
    env: Mapping[str, str], source: str, num_nodes: int
) -> tuple[tuple[int, ...], str] | None:
    if source == "SLURM_STEP_NODELIST":
        name = "SLURM_STEP_TASKS_PER_NODE"
    elif env.get("SLURM_STEP_ID") or not env.get("SLURM_NTASKS") or env.get("SLURM_HET_SIZE"):
        # In a shell's step SLURM_TASKS_PER_NODE is that step's; without -n or
        # --ntasks-per-node it says 1, or the cores, and nobody asked for tasks at all.
        return None
    else:
        name = "SLURM_TASKS_PER_NODE"
    return (tasks_of_nodes(env[name], num_nodes, variable=name), name) if env.get(name) else None


def _end_from_variable(env: Mapping[str, str]) -> datetime | None:
    """Return ``SLURM_JOB_END_TIME`` (seconds since 1970), which newer Slurms have (22.05.8 not)."""
    text = env.get("SLURM_JOB_END_TIME", "")
    # Without a time limit it is 2**32 - 1 or thereabouts.
    if not re.fullmatch("[1-9][0-9]{8,9}", text) or int(text) >= 2**32 - 16:
        return None

    return datetime.fromtimestamp(int(text), tz=UTC)


def _placed(job: Allocation, env: Mapping[str, str]) -> Allocation:
    """Say which node of the job this process is on: salloc's shell is on the login node."""
    # slurmd sets it for what it starts; a node's name need not be its host's.
    name, source = env.get("SLURMD_NODENAME"), "SLURMD_NODENAME"
    if not name:
        name, source = find_host(get_hostname(), job.hosts), "uname, and no SLURMD_NODENAME"
    return replace(job, node_name=name, sources={**job.sources, "node_name": source})
