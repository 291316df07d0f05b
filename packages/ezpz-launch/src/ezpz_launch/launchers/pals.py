"""PALS' mpiexec, on HPE Cray."""

from __future__ import annotations

from ezpz_launch._plan import LaunchPlan, shim_argv
from ezpz_topo import family


def argv(plan: LaunchPlan) -> list[str]:
    """Return the command line that starts a plan's ranks."""
    placement = plan.placement
    words = [plan.launcher.path, "-n", str(placement.nproc), "--ppn", str(placement.ppn)]
    words += ["--hostfile", plan.hostfile]
    words += plan.flags or ["--envall"]
    if plan.unbound:
        words += ["--cpu-bind=none"]
    elif plan.cpu_bind:
        words += [f"--cpu-bind=list:{':'.join(plan.cpu_bind)}"]
    elif plan.depth:
        words += [f"--depth={plan.depth}"]
    return [*words, *plan.launcher_args, *shim_argv(plan, family("pals"), separator=":")]
