"""torchrun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ezpz_launch._errors import LaunchError
from ezpz_launch._plan.kind import Kind
from ezpz_launch._plan.placement import Placement

if TYPE_CHECKING:
    from ezpz_launch._plan.plan import LaunchPlan


class Torchrun(Kind):
    """It starts ranks on this host alone."""

    name = "torchrun"
    program = "torchrun"

    def build_argv(self, plan: LaunchPlan) -> list[str]:
        if not plan.on_this_host:
            raise LaunchError(
                f"torchrun starts ranks on one host, not on {len(plan.placement.hosts)} from here; "
                "expected -N 1, or another --launcher"
            )
        words = [plan.launcher.path, "--standalone", f"--nproc-per-node={plan.nproc}"]
        if plan.control:
            # Otherwise it makes one in TMPDIR, and leaves it there.
            words.append(f"--log-dir={plan.hostfile}")
        words += plan.launcher_args
        words.append("--no-python")
        words += self.build_rank_command(plan)
        return words

    def build_hostfile(self, placement: Placement) -> list[str]:
        """Return no line: the path is that of a folder for its logs."""
        return []


KIND = Torchrun()
