"""Slurm: a job's variables, and only where these do not do, scontrol and squeue.

Run on Slurm 22.05.8.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from ._allocation import Allocation
from ._env import STAMP, STAMP_LAUNCHER
from ._errors import InvalidVariableError, SchedulerError
from ._hosts import find_host, get_hostname
from ._nodelist import expand_nodelist
from ._rank import get_rank_info
from ._steps import is_step, why_not_ours
from ._tasks import tasks_of_nodes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import datetime

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
        from . import _scontrol  # noqa: PLC0415  # 6 ms, and every job has its nodelist

        return _placed(_scontrol.job_by_id(env["SLURM_JOB_ID"], env), env)
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


def end_time(job_id: str, env: Mapping[str, str]) -> datetime | None:
    """Return when the job's time limit ends (see `_scontrol.end_time`)."""
    from . import _scontrol  # noqa: PLC0415

    return _scontrol.end_time(job_id, env)


def job_of_this_host(env: Mapping[str, str], hostname: str) -> Allocation | None:
    """Return the user's running job that has this host (see `_scontrol.job_of_this_host`)."""
    from . import _scontrol  # noqa: PLC0415

    return _scontrol.job_of_this_host(env, hostname)


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
    from ._ancestors import launching_ancestors  # noqa: PLC0415

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
    from datetime import UTC, datetime  # noqa: PLC0415

    return datetime.fromtimestamp(int(text), tz=UTC)


def _placed(job: Allocation, env: Mapping[str, str]) -> Allocation:
    """Say which node of the job this process is on: salloc's shell is on the login node."""
    # slurmd sets it for what it starts; a node's name need not be its host's.
    name, source = env.get("SLURMD_NODENAME"), "SLURMD_NODENAME"
    if not name:
        name, source = find_host(get_hostname(), job.hosts), "uname, and no SLURMD_NODENAME"
    return replace(job, node_name=name, sources={**job.sources, "node_name": source})
