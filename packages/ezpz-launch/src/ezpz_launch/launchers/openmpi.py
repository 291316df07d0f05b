"""Open MPI's mpiexec."""

from __future__ import annotations

from ezpz_launch._plan import LaunchPlan, shim_argv
from ezpz_topo import family


def argv(plan: LaunchPlan) -> list[str]:
    """Return the command line that starts a plan's ranks."""
    placement = plan.placement
    words = [plan.launcher.path, "-n", str(placement.nproc)]
    if not plan.on_this_host:
        words += ["-N", str(placement.ppn), "--hostfile", plan.hostfile]
    words += anywhere(as_root=plan.as_root)
    if not plan.on_this_host:
        # Elsewhere it starts ranks with what a login there has, and what is named.
        control = ["EZPZ_CONTROL"] if plan.control else []
        for name in (*plan.exported, *control):
            if name not in plan.flags:
                words += ["-x", name]
    words += plan.flags
    return [*words, *plan.launcher_args, *shim_argv(plan, family("openmpi"), separator=":")]


def anywhere(*, as_root: bool) -> list[str]:
    """Return the words that every launch needs."""
    # More ranks than cores is what a laptop asks for; root is what a container is. Two ranks
    # or fewer it would bind to one core each, with all our threads on it.
    words = ["--oversubscribe", "--bind-to", "none"]
    return [*words, "--allow-run-as-root"] if as_root else words
