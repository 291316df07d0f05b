"""Slurm's steps: whether this process is in the one that its variables name.

sbatch called from inside a step hands that step's variables on to the new job, whose batch
script overrides SLURM_PROCID, SLURM_LOCALID and SLURM_GTIDS only (Slurm 22.05.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ._env import SLURM_SHELL_STEPS
from ._errors import NodelistError
from ._nodelist import expand_nodelist

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._ancestors import Ancestor


def is_step(env: Mapping[str, str]) -> bool:
    """Whether the variables name a step of ranks, and not one that a shell runs in."""
    return env.get("SLURM_STEP_ID", "") not in ("", *SLURM_SHELL_STEPS)


def why_not_ours(env: Mapping[str, str], above: Iterable[Ancestor]) -> str:
    """Return why the step is another one than this process's; empty if nothing speaks against it.

    Args:
        env: The environment, with a step in it.
        above: The launching processes above, nearest first.
    """
    started_by = next((each for each in above if each.family == "slurm"), None)
    if started_by is not None and started_by.runs_a_shell:
        return f"{started_by.process} started this"
    step, job = env.get("SLURM_STEP_NODELIST", ""), env.get("SLURM_JOB_NODELIST", "")
    # Most steps are as wide as their job, and ten thousand names need not be made for that.
    if not step or not job or step == job:
        return ""
    try:
        others = set(expand_nodelist(step)) - set(expand_nodelist(job))
    except NodelistError:
        # Whoever needs the hosts will say so.
        return ""
    return f"its node {min(others)} is none of the job's, {job[:60]}" if others else ""
