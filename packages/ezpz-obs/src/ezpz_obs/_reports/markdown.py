"""A report as Markdown, its plots in files beside it."""

from __future__ import annotations

import re

from .content import Plot, Report, RunPart
from .facts import Table
from .names import clean, shorten

_SPECIAL = re.compile(r"([\\`*_\[\]|$~#{}()!])")
_ENTITIES = str.maketrans({"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def render(report: Report) -> str:
    """Return the report in short; its plots are expected as ``NAME.svg`` beside it."""
    lines = [f"# {escape(report.title, 100)}", ""]
    for run in report.runs:
        whose = "" if report.alone else f"**{escape(run.label)}**: "
        lines += [
            f"{whose}**{escape(run.words, 200)}** · {escape(' · '.join(run.course), 400)}",
            "",
        ]
        if report.alone and run.tiles:
            lines += _table(
                Table(("", "", ""), [(tile.label, tile.value, tile.note) for tile in run.tiles])
            )
    if not report.alone:
        lines += ["## Side by side", "", *_table(report.comparison)]
    for title, plots in (
        ("Curves", report.curves), ("Speed", report.speed), ("Memory", report.memory)
    ):  # fmt: skip
        if plots:
            lines += [f"## {title}", ""]
            for plot in plots:
                lines += _plot(plot)
    if report.left_out:
        lines += [f"{report.left_out:,} more metrics are not drawn.", ""]
    for run in report.runs:
        lines += _run(run, alone=report.alone)
    for title, table in report.environment:
        lines += [f"## {title}", "", *_table(table)]
    return "\n".join(lines).rstrip() + "\n"


def escape(text: str, limit: int = 160) -> str:
    """Return a text that Markdown shows as it is."""
    return _SPECIAL.sub(r"\\\1", shorten(text, limit).translate(_ENTITIES))


def _run(run: RunPart, *, alone: bool) -> list[str]:
    lines: list[str] = []
    whose = "" if alone else f" of {escape(run.label)}"
    if run.pauses:
        lines += [f"Longest pauses{whose}: {', '.join(run.pauses)}.", ""]
    if run.ranks:
        lines += [f"## Ranks{whose}", "", *_table(run.ranks)]
    if run.notices.rows:
        lines += [f"## Warnings, alarms and events{whose}", "", *_table(run.notices)]
    lines += [f"## Attempts{whose}", "", *_table(run.attempts)]
    if alone and run.metrics.rows:
        lines += ["## Metrics", "", *_table(run.metrics)]
    return lines


def _plot(plot: Plot) -> list[str]:
    notes = f" ({escape('; '.join(plot.notes), 300)})" if plot.notes else ""
    title = escape(plot.title)
    unit = f" ({plot.unit})" if plot.unit else ""
    return [f"### {title}{unit}", "", f"![{title}]({plot.file}.svg){notes}", ""]


def _table(of: Table) -> list[str]:
    rows = [[escape(cell, 300) if clean(cell) else " " for cell in row] for row in of.rows]
    head = [escape(column, 60) or " " for column in of.columns]
    found = [head, ["---"] * len(head), *rows]
    lines = [f"| {' | '.join(row)} |" for row in found] + [""]
    return lines + ([escape(of.note, 400), ""] if of.note else [])
