"""No launcher: ranks on this host alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ezpz_launch._errors import LaunchError
from ezpz_launch._plan.kind import Kind
from ezpz_launch._plan.shim import PROGRAMS
from ezpz_topo import Family

if TYPE_CHECKING:
    from ezpz_launch._plan.plan import LaunchPlan

SPAWN = os.path.join(PROGRAMS, "spawn.py")

_RANK = ("EZPZ_SPAWN_RANK",)
_SIZE = ("EZPZ_SPAWN_SIZE",)


class Spawn(Kind):
    """A program of ours, which starts plain processes."""

    name = "spawn"
    program = "python"
    # Every rank is on this host. The shim renames them.
    family = Family("spawn", _RANK, _SIZE, local_rank=_RANK, local_world_size=_SIZE)

    def build_argv(self, plan: LaunchPlan) -> list[str]:
        if not plan.on_this_host:
            hosts = plan.placement.hosts
            where = f"{hosts[0]}, another host"
            if len(hosts) > 1:
                where = f"{len(hosts)} hosts"
            raise LaunchError(
                f"spawn starts ranks on this host, not on {where}; "
                "expected -N 1 here, or another --launcher"
            )
        # Without site packages and PYTHON variables it starts sooner, and it needs none.
        words = [plan.launcher.path, "-I", "-S", SPAWN, str(plan.nproc)]
        words += plan.launcher_args
        words += self.build_rank_command(plan)
        return words


KIND = Spawn()
