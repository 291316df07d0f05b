"""What ``--dry-run`` says: the command, and for each decision its value and its source."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from ezpz_launch._request import GRACE, Request
from ezpz_topo import fold_nodelist

from .cores import fold_ranks
from .plan import LaunchPlan


def explain(plan: LaunchPlan, argv: Sequence[str], hostfile: Sequence[str]) -> str:
    """Return the explanation of a launch, for people; the command can be pasted into a shell."""
    rows = _decisions(plan)
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    # One long value must not push every source off the screen.
    widths[1] = min(widths[1], 40)
    lines = ["would run:", *_command(plan, argv), ""]
    if hostfile:
        lines += [f"with {plan.hostfile}:", *(f"  {line}" for line in _shortened(hostfile)), ""]
    lines += ["because:"]
    lines += [f"  {n:<{widths[0]}}  {v:<{widths[1]}}  ({why})" for n, v, why in rows]
    return "\n".join([*lines, *(f"note: {note}" for note in (*plan.warnings, *plan.notes))])


def explain_json(plan: LaunchPlan, argv: Sequence[str], hostfile: Sequence[str]) -> str:
    """Return the explanation of a launch, for programs."""
    placement = plan.placement
    return json.dumps(
        {
            "argv": list(argv),
            "environment": dict(plan.environment),
            "hostfile": {"path": plan.hostfile, "lines": list(hostfile)} if hostfile else None,
            "launcher": {"kind": plan.launcher.kind, "path": plan.launcher.path},
            "machine": plan.machine.name,
            "nproc": placement.nproc,
            "ppn": placement.ppn,
            "hosts": list(placement.hosts),
            "ranks_per_host": list(placement.ranks),
            "settings": {name: value for name, value, _ in _settings(plan.request)},
            "sources": dict(plan.sources),
            "notes": [*plan.warnings, *plan.notes],
        },
        indent=2,
    )


def _decisions(plan: LaunchPlan) -> list[tuple[str, str, str]]:
    placement, sources = plan.placement, plan.sources
    rows = [
        ("machine", plan.machine.name, plan.machine.matched_by),
        ("launcher", f"{plan.launcher.kind}: {plan.launcher.path}", sources["launcher"]),
        ("ranks", str(placement.nproc), sources["nproc"]),
        ("ranks per host", _ranks(placement.ranks), sources["ppn"]),
        ("hosts", fold_nodelist(placement.hosts), sources["hosts"]),
        ("cpu binding", _binding(plan), sources["cpu_bind"]),
    ]
    if "flags" in sources:
        rows += [("launcher flags", " ".join(plan.flags), sources["flags"])]
    for name in dict.fromkeys(plan.request.options):
        rows += [("option", name, f"--option: {sources[f'--option {name}']}")]
    rows += _settings(plan.request)
    return rows + [(name, value, sources[name]) for name, value in plan.environment.items()]


def _settings(asked: Request) -> list[tuple[str, str, str]]:
    """Return what is asked of the launch while it runs; what nobody asked for is not shown."""
    rows = []
    if asked.one_device:
        rows.append(("devices of a rank", "its own only", "--one-device"))
    if asked.log_dir:
        where, why = ("there and here", ", --tee") if asked.tee else ("there only", "")
        rows.append(("output", f"{asked.log_dir}, {where}", f"--log-dir{why}"))
    if asked.only_ranks is not None:
        ranks = fold_ranks(asked.only_ranks)
        rows.append(("output shown", f"of ranks {ranks}", "--only-ranks"))
    if asked.prefix:
        rows.append(("lines begin with", "[rank@host]", "--prefix"))
    for name, seconds, usual, flag in (
        ("hung when silent", asked.idle_timeout, 0.0, "--idle-timeout"),
        ("SIGTERM to SIGKILL", asked.grace, GRACE, "--grace"),
        ("SIGUSR1 before end", asked.signal_before, 0.0, "--signal-before"),
    ):
        if seconds != usual:
            rows.append((name, f"{seconds:g} s", flag))
    if asked.retries:
        rows.append(("retries", f"up to {asked.retries}", "--retries"))
    if asked.nested:
        rows.append(("inside a launch", "allowed", "--nested"))
    return rows


def _binding(plan: LaunchPlan) -> str:
    if plan.cpu_bind:
        return ":".join(plan.cpu_bind)
    if plan.depth:
        return f"in order, {plan.depth} cores each"
    return " ".join(f for f in plan.flags if f.startswith(("--cpu-bind", "--depth"))) or "none"


def _ranks(ranks: Sequence[int]) -> str:
    same = f"{ranks[0]} x {len(ranks)}" if len(ranks) > 1 else str(ranks[0])
    return same if ranks[-1] == ranks[0] else f"{ranks[0]} x {len(ranks) - 1}, {ranks[-1]}"


def _command(plan: LaunchPlan, argv: Sequence[str]) -> list[str]:
    """Return the command with one group of arguments a line, each but the last continued."""
    added = [f"{name}={value}" for name, value in plan.environment.items()]
    removed = [["-u", name] for name in plan.removed]
    groups = [["env"], *removed, *([pair] for pair in added), [argv[0]]]
    start = argv.index("sh", 1)
    for word in argv[1:start]:
        # A flag begins a group, and what follows it belongs to it.
        if word.startswith("-") or len(groups[-1]) > 1 or groups[-1][0] == argv[0]:
            groups.append([word])
        else:
            groups[-1].append(word)
    end = len(argv) - len(plan.command)
    groups += [list(argv[start:end]), list(argv[end:])]
    lines = [shlex.join(group) for group in groups if group]
    return [f"  {line} \\" for line in lines[:-1]] + [f"  {lines[-1]}"]


def _shortened(lines: Sequence[str]) -> list[str]:
    return list(lines) if len(lines) <= 8 else [*lines[:6], "...", lines[-1]]
