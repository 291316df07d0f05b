"""What every rank starts with: the words that a launcher is given to run."""

from __future__ import annotations

import os

from ezpz_launch._planning.plan import LaunchPlan
from ezpz_topo import Family

PROGRAMS = os.path.join(
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "_running"
)
"""The folder of the programs that run beside the ranks."""

SHIM = os.path.join(PROGRAMS, "rank_shim.sh")

_ESCAPE = "+"
"""Put before every word of a command that holds a launcher's own separator."""


def shim_argv(plan: LaunchPlan, names: Family, *, separator: str = "") -> list[str]:
    """Return the words that run the plan's command as one rank.

    Args:
        plan: The launch.
        names: The variables by which the launcher tells a rank who it is.
        separator: A word that this launcher would take for the start of another program.
    """
    # PALS with PMIx tells no size at all; srun's is that of the step.
    size = "-" if names.name == "pals" else names.world_size[0]
    words = ["sh", SHIM, names.name, str(plan.placement.nproc), str(plan.placement.ppn)]
    words += [names.rank[0], size, names.local_rank[0]]
    if separator and separator in plan.command:
        return [*words, "--escaped", *(_ESCAPE + word for word in plan.command)]
    return [*words, "--", *plan.command]
