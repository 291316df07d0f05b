"""MPICH's Hydra. Flags as of MPICH 5.0.2, which refuses those of PALS."""

from __future__ import annotations

from ezpz_launch._plan import LaunchPlan

from .shim import shim_argv


def argv(plan: LaunchPlan) -> list[str]:
    """Return the command line that starts a plan's ranks."""
    placement = plan.placement
    words = [plan.launcher.path, "-n", str(placement.nproc)]
    if plan.on_this_host:
        # Inside a Slurm step Hydra would start its proxy by another srun, which waits for
        # cores that the step holds, and would take its hosts from the job (MPICH 5.0.2).
        words += ["-launcher", "fork", "-rmk", "user", "-host", "localhost"]
    else:
        words += ["-ppn", str(placement.ppn), "-rmk", "user", "-hostfile", plan.hostfile]
    return [*words, *plan.launcher_args, *shim_argv(plan, "pmi", separator=":")]
