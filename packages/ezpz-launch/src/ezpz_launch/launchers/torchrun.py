"""torchrun."""

from __future__ import annotations

from ezpz_launch._errors import LaunchError
from ezpz_launch._plan import LaunchPlan, shim_argv
from ezpz_topo import family


def argv(plan: LaunchPlan) -> list[str]:
    """Return the command line that starts a plan's ranks."""
    if not plan.on_this_host:
        raise LaunchError(
            f"torchrun starts ranks on one host, not on {len(plan.placement.hosts)} from here; "
            "expected -N 1, or another --launcher"
        )
    words = [plan.launcher.path, "--standalone", f"--nproc-per-node={plan.placement.nproc}"]
    if plan.control:
        # Otherwise it makes one in TMPDIR, and leaves it there.
        words += [f"--log-dir={plan.hostfile}"]
    return [*words, *plan.launcher_args, "--no-python", *shim_argv(plan, family("torchrun"))]
