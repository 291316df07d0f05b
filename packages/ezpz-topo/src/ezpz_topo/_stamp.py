"""The stamp of ezpz-launch: of which job it is, and which device it gave to a rank."""

from __future__ import annotations

from collections.abc import Mapping

from ._env import FAMILIES, STAMP, STAMP_DEVICE, STAMP_JOB, STAMP_LAUNCHER, TORCHRUN, family
from ._reading import claim

_JOB_IDS = ("SLURM_JOB_ID", "SLURM_HET_JOB_ID", "PBS_JOBID")


def without_a_stamp_of_another_job(env: Mapping[str, str]) -> tuple[Mapping[str, str], str]:
    """Set a stamp aside that was made in another job, and what was exported with it.

    A rank that submits a job hands its environment on: the new job's script would take itself for
    that rank.

    Returns:
        The environment to read, and a note; empty where nothing was set aside.
    """
    theirs = env.get(STAMP_JOB, "")
    ours = [env[name] for name in _JOB_IDS if env.get(name)]
    if not theirs or not ours or theirs in ours:
        return env, ""
    stamp = claim(STAMP, env) or {}
    left_over = {*_names(STAMP.name), STAMP_JOB, STAMP_DEVICE, STAMP_LAUNCHER}
    for name in {TORCHRUN.name, env.get(STAMP_LAUNCHER, "")} & {known.name for known in FAMILIES}:
        # What the shim exported beside the stamp, or read it from; Slurm's own are of this job.
        told = claim(family(name), env) or {}
        same = all(
            told.get(key, stamp.get(key)) == stamp.get(key) for key in ("rank", "world_size")
        )
        if name != "slurm" and same:
            left_over |= _names(name)
    note = f"the stamp of ezpz-launch is of job {theirs}, and this is {ours[0]}: set aside"
    return {name: value for name, value in env.items() if name not in left_over}, note


def _names(name: str) -> set[str]:
    of = family(name)
    fields = (of.rank, of.world_size, of.local_rank, of.local_world_size, of.node_rank)
    return {variable for field in (*fields, of.num_nodes) for variable in field}
