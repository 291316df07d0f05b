"""torchrun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ezpz_launch._errors import LaunchError

from . import Kind

if TYPE_CHECKING:
    from ezpz_launch._plan.placement import Placement
    from ezpz_launch._plan.plan import LaunchPlan


class Torchrun(Kind):
    """It starts ranks on this host alone."""

    name = "torchrun"
    program = "torchrun"

    def argv(self, plan: LaunchPlan) -> list[str]:
        if not plan.on_this_host:
            raise LaunchError(
                f"torchrun starts ranks on one host, not on {len(plan.placement.hosts)} from here; "
                "expected -N 1, or another --launcher"
            )
        words = [plan.launcher.path, "--standalone", f"--nproc-per-node={plan.nproc}"]
        if plan.control:
            # Otherwise it makes one in TMPDIR, and leaves it there.
            words += [f"--log-dir={plan.hostfile}"]
        return [*words, *plan.launcher_args, "--no-python", *self.shim(plan)]

    def hostfile(self, placement: Placement) -> list[str]:
        """Return no line: a folder stands in its place."""
        return []


KIND = Torchrun()
