"""What ``--dry-run`` prints: the command, and for each decision its value and its source."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ._plan import LaunchPlan
from .launchers.mpiexec import Mpiexec


def explain(plan: LaunchPlan, argv: Sequence[str], launcher: Mpiexec) -> str:
    """Return the explanation of a launch, for people; the command can be pasted into a shell."""
    rows = [
        ("launcher", f"{launcher.kind}: {launcher.path}", launcher.source),
        ("ranks", str(plan.nproc), plan.sources["nproc"]),
        ("host", " ".join(plan.hosts), plan.sources["hosts"]),
    ]
    rows += [(name, value, plan.sources[name]) for name, value in plan.environment.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    added = [f"{name}={value}" for name, value in plan.environment.items()]
    lines = ["would run:", f"  {shlex.join(['env', *added, *argv])}", "", "because:"]
    lines += [
        f"  {name:<{widths[0]}}  {value:<{widths[1]}}  ({source})" for name, value, source in rows
    ]
    return "\n".join(lines)
