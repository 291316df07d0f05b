"""Plan to command line, one launcher a module; each is pure, and pinned by golden files."""

from __future__ import annotations

from collections.abc import Callable

from ezpz_launch._plan import LaunchPlan

from . import hydra, openmpi, pals, spawn, srun, torchrun

_BUILDERS: dict[str, Callable[[LaunchPlan], list[str]]] = {
    "hydra": hydra.argv,
    "openmpi": openmpi.argv,
    "pals": pals.argv,
    "spawn": spawn.argv,
    "srun": srun.argv,
    "torchrun": torchrun.argv,
}


def argv(plan: LaunchPlan) -> list[str]:
    """Return the command line that starts a plan's ranks."""
    return _BUILDERS[plan.launcher.kind](plan)


def hostfile_of(plan: LaunchPlan) -> list[str]:
    """Return the lines of the hostfile that the plan's launcher reads."""
    placement = plan.placement
    if plan.launcher.kind == "torchrun":
        return []
    if plan.launcher.kind == "srun":
        return srun.hostfile_lines(placement.hosts, placement.ranks)
    return list(placement.hosts)


def needs_hostfile(plan: LaunchPlan) -> bool:
    """Whether the plan's launcher reads a hostfile, or wants a folder in its place (torchrun)."""
    words = argv(plan)
    ours = words[: len(words) - len(plan.command)]
    names = (word.removeprefix("--nodelist=").removeprefix("--log-dir=") for word in ours)
    return plan.hostfile in names
