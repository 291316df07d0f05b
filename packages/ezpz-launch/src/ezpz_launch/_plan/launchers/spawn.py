"""No launcher: ranks on this host alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ezpz_launch._errors import LaunchError
from ezpz_topo import Family

from . import PROGRAMS, Kind

if TYPE_CHECKING:
    from ezpz_launch._plan.plan import LaunchPlan

SPAWN = os.path.join(PROGRAMS, "spawn.py")


class Spawn(Kind):
    """A program of ours, which starts plain processes."""

    name = "spawn"
    program = "python"
    # Every rank is on this host. The shim renames them.
    _RANK, _SIZE = ("EZPZ_SPAWN_RANK",), ("EZPZ_SPAWN_SIZE",)
    family = Family("spawn", _RANK, _SIZE, local_rank=_RANK, local_world_size=_SIZE)

    def argv(self, plan: LaunchPlan) -> list[str]:
        if not plan.on_this_host:
            hosts = plan.placement.hosts
            where = f"{len(hosts)} hosts" if len(hosts) > 1 else f"{hosts[0]}, another host"
            raise LaunchError(
                f"spawn starts ranks on this host, not on {where}; "
                "expected -N 1 here, or another --launcher"
            )
        # Neither the user's site packages nor PYTHON variables: it needs none, and starts sooner.
        words = [plan.launcher.path, "-I", "-S", SPAWN, str(plan.nproc)]
        return [*words, *plan.launcher_args, *self.shim(plan)]


KIND = Spawn()
