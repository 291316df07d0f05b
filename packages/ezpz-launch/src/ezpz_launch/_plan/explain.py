"""The output of ``--dry-run``: the command, and for each decision its value and its reason."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from ezpz_launch._plan.launchers import LAUNCHERS
from ezpz_launch._plan.options import list_settings
from ezpz_launch._plan.plan import LaunchPlan
from ezpz_launch._plan.shim import SHIM, pack_env
from ezpz_topo import fold_nodelist

_LONGEST_PADDING = 40
"""One long value must not push every reason off the screen."""


def explain(
    plan: LaunchPlan, argv: Sequence[str], hostfile: Sequence[str], columns: int = 0
) -> str:
    """Explain a launch to people; the command can be pasted into a shell."""
    lines = ["would run:", *_format_command(plan, argv), ""]
    if hostfile:
        hosts = list(hostfile)
        if len(hosts) > 8:
            hosts = [*hostfile[:6], "...", hostfile[-1]]
        lines.append(f"with {plan.hostfile}:")
        lines += [f"  {host}" for host in hosts]
        lines.append("")
    lines += format_decisions(_list_decisions(plan), columns)
    lines += [f"note: {note}" for note in (*plan.warnings, *plan.notes)]
    return "\n".join(lines)


def format_decisions(rows: Sequence[tuple[str, str, str]], columns: int = 0) -> list[str]:
    """Format name, value and reason of decisions as a table; ``columns`` are a terminal's."""
    name_width = max(len(name) for name, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    value_width = min(value_width, _LONGEST_PADDING)
    lines = ["because:"]
    for name, value, reason in rows:
        start = f"  {name:<{name_width}}  {value:<{value_width}}  "
        lines += wrap_last_cell(start, f"({reason})", columns)
    return lines


def wrap_last_cell(start: str, text: str, columns: int) -> list[str]:
    """Wrap the last cell of a row below itself; one line if there are no columns."""
    line = f"{start}{text}".rstrip()
    if not columns:
        return [line]
    from textwrap import wrap  # noqa: PLC0415  # only a terminal needs it

    lines = wrap(
        text,
        max(columns, len(start) + 18),
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [line]


def explain_json(plan: LaunchPlan, argv: Sequence[str], hostfile: Sequence[str]) -> str:
    """Explain a launch to programs."""
    placement = plan.placement
    facts: dict[str, object] = {
        "argv": list(argv),
        "environment": dict(plan.environment),
        "hostfile": None,
        "launcher": {"kind": plan.launcher.kind, "path": plan.launcher.path},
        "machine": plan.machine.name,
        "nproc": placement.nproc,
        "ppn": placement.ppn,
        "hosts": list(placement.hosts),
        "ranks_per_host": list(placement.ranks),
        "settings": {name: value for name, value, _ in list_settings(plan.request)},
        "sources": dict(plan.sources),
        "notes": [*plan.warnings, *plan.notes],
    }
    if hostfile:
        facts["hostfile"] = {"path": plan.hostfile, "lines": list(hostfile)}
    return json.dumps(facts, indent=2)


def _list_decisions(plan: LaunchPlan) -> list[tuple[str, str, str]]:
    placement = plan.placement
    sources = plan.sources
    rows = [
        ("machine", plan.machine.name, plan.machine.matched_by),
        ("launcher", f"{plan.launcher.kind}: {plan.launcher.path}", sources["launcher"]),
        ("ranks", str(placement.nproc), sources["nproc"]),
        ("ranks per host", _format_ranks(placement.ranks), sources["ppn"]),
        ("hosts", fold_nodelist(placement.hosts), sources["hosts"]),
        ("cpu binding", _format_binding(plan), sources["cpu_bind"]),
    ]
    if "flags" in sources:
        rows.append(("launcher flags", " ".join(plan.flags), sources["flags"]))
    for name in dict.fromkeys(plan.request.options):
        source = sources[f"--option {name}"]
        rows.append(("option", name, f"--option: {source}"))
    rows += list_settings(plan.request)
    rows += [(name, value, sources[name]) for name, value in plan.environment.items()]
    return rows


def _format_binding(plan: LaunchPlan) -> str:
    if plan.cpu_bind:
        return ":".join(plan.cpu_bind)
    if plan.depth:
        return f"in order, {plan.depth} cores each"
    prefixes = LAUNCHERS[plan.launcher.kind].binding_prefixes
    binding_flags = [flag for flag in plan.flags if flag.startswith(prefixes)]
    return " ".join(binding_flags) or "none"


def _format_ranks(ranks: Sequence[int]) -> str:
    first = ranks[0]
    last = ranks[-1]
    if len(ranks) == 1:
        return str(first)
    if first == last:
        return f"{first} x {len(ranks)}"
    return f"{first} x {len(ranks) - 1}, {last}"


def _format_command(plan: LaunchPlan, argv: Sequence[str]) -> list[str]:
    """Format the command with one group of arguments a line, each but the last continued."""
    groups = [["env"]]
    groups += [["-u", name] for name in plan.removed]
    environment = {**plan.environment, **pack_env(plan.environment)}
    groups += [[f"{name}={value}"] for name, value in environment.items()]
    shim = argv.index(SHIM) - 1
    command = len(argv) - len(plan.command)
    groups += _group_flags(argv[:shim])
    groups.append(list(argv[shim:command]))
    groups.append(list(argv[command:]))
    lines = [f"  {shlex.join(group)} \\" for group in groups]
    lines[-1] = lines[-1].removesuffix(" \\")
    return lines


def _group_flags(words: Sequence[str]) -> list[list[str]]:
    """Group a launcher's words: itself, then each flag with the word that follows it."""
    groups = [[words[0]]]
    for word in words[1:]:
        is_alone = len(groups) == 1
        if word.startswith("-") or is_alone or len(groups[-1]) > 1:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups
