"""No launcher: ranks on this host alone."""

from __future__ import annotations

import os

from ezpz_launch._errors import LaunchError
from ezpz_launch._plan import PROGRAMS, LaunchPlan, shim_argv
from ezpz_topo import Family

SPAWN = os.path.join(PROGRAMS, "_spawn.py")

# Every rank is on this host.
_FAMILY = Family(
    name="spawn",
    rank=("EZPZ_SPAWN_RANK",),
    world_size=("EZPZ_SPAWN_SIZE",),
    local_rank=("EZPZ_SPAWN_RANK",),
    local_world_size=("EZPZ_SPAWN_SIZE",),
)


def argv(plan: LaunchPlan) -> list[str]:
    """Return the command line that starts a plan's ranks.

    Raises:
        LaunchError: The ranks are not all on this host.
    """
    if not plan.on_this_host:
        hosts = plan.placement.hosts
        where = f"{len(hosts)} hosts" if len(hosts) > 1 else f"{hosts[0]}, another host"
        raise LaunchError(
            f"spawn starts ranks on this host, not on {where}; "
            "expected -N 1 here, or another --launcher"
        )
    # Neither the user's site packages nor PYTHON variables: it needs none, and starts sooner.
    words = [plan.launcher.path, "-I", "-S", SPAWN, "-n", str(plan.nproc)]
    return [*words, *plan.launcher_args, *shim_argv(plan, _FAMILY)]
