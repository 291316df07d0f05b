"""The world as a picture in text: pure, and readable at ten thousand ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ezpz_dist._ranks import fold
from ezpz_topo import NodelistError, fold_nodelist

_WHOLE = 8
"""Nodes that are all shown; of more the first and the last."""

_FIRST = 3

_WIDE = 60
"""Characters for ranks in columns, and for a folded list of hosts or ranks."""


def picture(info: Mapping[str, Any], hosts: Sequence[str]) -> str:
    """Return what `get_dist_info` says, and which ranks are on which node.

    Args:
        info: The same keys as `get_dist_info`'s.
        hosts: By rank, the name of its host.
    """
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    sizes = sorted({len(ranks) for ranks in nodes.values()})
    each = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    head = f"{len(hosts):,} rank{_s(hosts)} on {len(nodes):,} node{_s(nodes)}"
    lines = [f"{head}, {each} a node" if len(nodes) > 1 else head, *_facts(info), ""]
    return "\n".join(lines + _table(nodes))


def _facts(info: Mapping[str, Any]) -> list[str]:
    job = f", {info['scheduler']} job {info['job_id']}" if info["job_id"] else ""
    timeout = "" if info["timeout"] is None else f", time-out {info['timeout']:g} s"
    started = "one process" if info["launcher"] == "none" else f"started by {info['launcher']}"
    facts = [
        f"{started} on {info['machine']}{job}",
        f"device {info['device']}, backend {info['backend']}{timeout}",
        ", ".join(f"{name} {version}" for name, version in info["versions"].items()),
    ]
    if any(degree > 1 for axis, degree in info["degrees"].items() if axis != "data"):
        degrees = (f"{axis} {degree:,}" for axis, degree in info["degrees"].items())
        facts.insert(2, "parallel: " + " x ".join(degrees))
    if not info["is_set_up"]:
        facts.append("not set up yet: this is what the environment says")
    return facts


def _table(nodes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return a line a node, those in the middle of many as one."""
    rows = [(str(index), host, ranks) for index, (host, ranks) in enumerate(nodes.items())]
    shown = rows if len(rows) <= _WHOLE else [*rows[:_FIRST], rows[-1]]
    digits = max(len(str(rank)) for _, _, ranks in shown for rank in ranks)
    in_columns = max(len(ranks) for _, _, ranks in shown) * (digits + 2) <= _WIDE
    node_width = max(len("node"), *(len(index) for index, _, _ in shown))
    host_width = max(len("host"), *(len(host) for _, host, _ in shown))
    lines = [f"{'node':>{node_width}}  {'host':<{host_width}}  ranks"]
    for index, host, ranks in shown:
        columns = "  ".join(f"{rank:>{digits}}" for rank in ranks)
        text = columns if in_columns else _cut(fold(ranks))
        lines.append(f"{index:>{node_width}}  {host:<{host_width}}  {text}")
    if shown is not rows:
        hidden = rows[_FIRST:-1]
        ranks = [rank for _, _, own in hidden for rank in own]
        where = _cut(_fold_hosts([host for _, host, _ in hidden]))
        more = f"{len(hidden):,} more: {where}, ranks {_cut(fold(ranks))}"
        lines.insert(-1, f"{'...':>{node_width}}  {more}")
    return lines


def _fold_hosts(hosts: Sequence[str]) -> str:
    try:
        return fold_nodelist(hosts)
    except NodelistError:
        return ", ".join(hosts)  # names that no nodelist can hold


def _cut(text: str) -> str:
    return text if len(text) <= _WIDE else f"{text[: _WIDE - 4]} ..."


def _s(many: Sequence[object] | Mapping[str, object]) -> str:
    return "" if len(many) == 1 else "s"
