"""The nodes we were given: by Slurm, by PBS, or just this host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ._errors import InvalidVariableError
from ._hosts import get_hostname, hosts_of_node_file

_INTERACTIVE_STEP = "4294967290"
"""SLURM_STEP_ID of the step that salloc or ``srun --interactive`` opens a shell in: one
task on one node, in which the whole job is meant (slurm.h, SLURM_INTERACTIVE_STEP)."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes that a scheduler gave us, or this host.

    Attributes:
        scheduler: ``"slurm"``, ``"pbs"`` or ``"none"``: decided by job variables, never by
            the host's name or by which commands are installed.
        job_id: The scheduler's id of the job; None without a scheduler.
        num_nodes: Number of nodes in the job (the step, within a Slurm step).
        on_node: Whether this process runs on a node of the job, not on a login node.
        source: Where ``num_nodes`` comes from.
    """

    scheduler: str
    job_id: str | None
    num_nodes: int
    on_node: bool
    source: str


def get_allocation(env: Mapping[str, str] | None = None) -> Allocation:
    """Read the allocation from the job's variables; no scheduler command is called.

    Args:
        env: The environment to read; default ``os.environ``.

    Raises:
        InvalidVariableError: The job's variables are there, but do not tell its nodes.
    """
    env = os.environ if env is None else env
    if job_id := env.get("SLURM_JOB_ID"):
        return _slurm(job_id, env)
    if job_id := env.get("PBS_JOBID"):
        return _pbs(job_id, env)
    return Allocation(
        "none", None, 1, True, f"no job variables are set: this host, {get_hostname()}"
    )


def _slurm(job_id: str, env: Mapping[str, str]) -> Allocation:
    # SLURM_NNODES is the older spelling; both give the job's nodes, not the step's.
    names = ["SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"]
    if env.get("SLURM_STEP_ID") == _INTERACTIVE_STEP:
        names.remove("SLURM_STEP_NUM_NODES")
    for name in names:
        text = env.get(name, "")
        if text.isascii() and text.isdigit() and int(text) > 0:
            # slurmd sets SLURMD_NODENAME for what it starts; a salloc shell lacks it.
            return Allocation("slurm", job_id, int(text), "SLURMD_NODENAME" in env, name)
        if text:
            raise InvalidVariableError(f"{name}={text[:40]!r}; expected a number of nodes")
    raise InvalidVariableError(
        f"SLURM_JOB_ID={job_id} without SLURM_JOB_NUM_NODES; expected Slurm to set both; "
        "unset SLURM_JOB_ID if no job is running"
    )


def _pbs(job_id: str, env: Mapping[str, str]) -> Allocation:
    path = env.get("PBS_NODEFILE")
    if not path:
        raise InvalidVariableError(
            f"PBS_JOBID={job_id} without PBS_NODEFILE; expected PBS to set both; "
            "unset PBS_JOBID if no job is running"
        )
    return Allocation("pbs", job_id, len(hosts_of_node_file(path)), True, "PBS_NODEFILE")
