"""Open MPI 4 and 5 (PRRTE). Tried with 5.0.11.

5 calls --oversubscribe and -N deprecated and takes them for what it has instead (--map-by
:OVERSUBSCRIBE, ppr:N:node); 4 knows only these. It warns of ``-x`` and a name that is not set.
"""

from __future__ import annotations

from ezpz_launch._planning.plan import LaunchPlan
from ezpz_topo import family

from .shim import shim_argv


def argv(plan: LaunchPlan) -> list[str]:
    """Return the command line that starts a plan's ranks."""
    placement = plan.placement
    words = [plan.launcher.path, "-n", str(placement.nproc)]
    if not plan.on_this_host:
        words += ["-N", str(placement.ppn), "--hostfile", plan.hostfile]
    # More ranks than cores is what a laptop asks for; root is what a container is.
    words += ["--oversubscribe"]
    # Two ranks or fewer it would bind to one core each, with all our threads on it.
    words += ["--bind-to", "none"]
    if plan.as_root:
        words += ["--allow-run-as-root"]
    if not plan.on_this_host:
        # Elsewhere it starts ranks with what a login there has, and what is named.
        control = ["EZPZ_CONTROL"] if plan.control else []
        for name in (*plan.exported, *control):
            if name not in plan.flags:
                words += ["-x", name]
    words += plan.flags
    return [*words, *plan.launcher_args, *shim_argv(plan, family("openmpi"), separator=":")]
