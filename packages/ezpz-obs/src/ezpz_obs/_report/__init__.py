"""Reports of runs: one HTML page that needs nothing else, and Markdown."""

from __future__ import annotations

import os
import re
import time
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from ezpz_obs._context import replacing
from ezpz_obs._errors import ReportError, require
from ezpz_obs._records import STATISTICS, to_file_name
from ezpz_obs._run import Run, read_run
from ezpz_obs._version import __version__

from .figures import LIGHT, ChartLine, draw_chart, make_style
from .series import Series
from .summary import (
    STEP_PARTS,
    Summary,
    Table,
    Tile,
    make_facts,
    make_tables,
    make_tiles,
    metric_basename,
    summarize_run,
)
from .words import clean, format_time, shorten

MOST_CHARTS: Final = 48  # a model's every layer is for the table

_UNITS: Final = {
    "tokens_per_s": "tokens/s", "samples_per_s": "samples/s", "tflops": "TFLOP/s", "mfu": "",
    **dict.fromkeys(("step_s", *STEP_PARTS), "s"),
    "memory_gib": "GiB", "memory_peak_gib": "GiB", "memory_fraction": "",
}  # fmt: skip
"""Metrics of the section "Speed and memory", in its order, and the units of their axes."""

_JOINT: Final = (
    ("parts of a step", ("step_s", *STEP_PARTS)),
    ("memory", ("memory_gib", "memory_peak_gib")),
)
"""Metrics that share a chart, if there is one run: else the colours are runs'."""


@dataclass(frozen=True)
class Chart:
    """A chart, drawn; in a section of an odd number the last one is drawn as wide as two, too."""

    title: str
    unit: str  # of the vertical axis; "" where it is not known
    file: str  # name of the SVG file
    svg: str
    wide_svg: str
    notes: list[str]


@dataclass(frozen=True)
class RunOverview:
    label: str
    state: str  # "good", "bad" or "open"
    words: str
    facts: list[str]
    tiles: list[Tile]


@dataclass(frozen=True)
class Report:
    title: str
    runs: list[RunOverview]
    sections: dict[str, list[Chart]]
    undrawn: int  # metrics
    tables: list[Table]
    made: str


def write_report(
    runs: Iterable[Run | str | os.PathLike[str]] | Run | str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
) -> tuple[Path, ...]:
    """Write a report of runs: ``report.html``, ``report.md`` and the pictures of the latter.

    The page needs no network and no other file. Of several runs the curves are overlaid. A report
    that is there is replaced, file by file; other files are left alone.

    Args:
        runs: One or more: what `read_run` returned, or folders and files.
        out: The folder to write to; default ``report`` in the (first) run's.

    Returns:
        The files: the page first, then the Markdown, then the pictures.

    Raises:
        HistoryError: There is no such run, or no line of it is a History's.
        OSError: The folder cannot be written.
        ReportError: Nothing was given, or what reports need is not installed.
    """
    if isinstance(runs, Run | str | os.PathLike):
        runs = [runs]
    given = list(runs)
    if not given:
        raise ReportError("no runs; expected one at least: write_report(['outputs/run'])")
    require("matplotlib", "a report")  # before a million records are read for nothing
    require("jinja2", "a report")
    found = [run if isinstance(run, Run) else read_run(run) for run in given]
    report = make_report(found)
    folder = Path(out or found[0].path.parent / "report")
    folder.mkdir(parents=True, exist_ok=True)
    charts = chain.from_iterable(report.sections.values())
    pictures = [_write(folder / chart.file, _make_standalone(chart.svg)) for chart in charts]
    text = _write(folder / "report.md", _render_markdown(report))
    page = _write(folder / "report.html", _render_page(report))
    return (page, text, *pictures)


def make_report(runs: Sequence[Run]) -> Report:
    """Read runs and draw their charts."""
    summaries = [
        summarize_run(run, label) for run, label in zip(runs, _label_runs(runs), strict=True)
    ]
    sections, undrawn = _draw_charts(summaries)
    parts = []
    for summary in summaries:
        state, words = summary.outcome
        parts.append(
            RunOverview(summary.label, state, words, make_facts(summary), make_tiles(summary))
        )
    title = summaries[0].label
    tables: list[Table] = []
    if len(summaries) > 1:
        title = f"{len(summaries)} runs"
    else:
        tables = make_tables(summaries[0])
    return Report(title, parts, sections, undrawn, tables, format_time(time.time()))


def _label_runs(runs: Sequence[Run]) -> list[str]:
    names = [run.name for run in runs]
    labels = []
    for run, name in zip(runs, names, strict=True):
        if names.count(name) == 1:
            labels.append(name)
        else:
            labels.append(f"{name} ({run.path.parent})")
    return labels


def _draw_charts(summaries: Sequence[Summary]) -> tuple[dict[str, list[Chart]], int]:
    """Draw the charts; return them by section, and how many metrics are not drawn."""
    # Of each chart its title, and its lines: label, summary, metric.
    wanted: dict[str, list[tuple[str, Summary, str]]] = {}
    for summary in summaries:
        for name in summary.groups:
            if summary.get_series(name).is_counter:
                continue
            if len(summaries) > 1:
                wanted.setdefault(name, []).append((summary.label, summary, name))
            else:
                wanted.setdefault(_find_title(name, summary), []).append((name, summary, name))
    titles = sorted(wanted, key=_find_order)
    sections: dict[str, list[str]] = {}
    for title in titles[:MOST_CHARTS]:
        name = wanted[title][0][2]
        section = "Curves"
        if metric_basename(name) in _UNITS:
            section = "Speed and memory"
        sections.setdefault(section, []).append(title)
    drawn = {}
    for section in sorted(sections):
        names = sections[section]
        charts = []
        for title in names:
            is_last_of_odd = title == names[-1] and len(names) % 2 == 1
            charts.append(_draw(title, wanted[title], has_wide=is_last_of_odd))
        drawn[section] = charts
    return drawn, len(titles) - min(len(titles), MOST_CHARTS)


def _find_title(name: str, summary: Summary) -> str:
    present = {metric_basename(other) for other in summary.groups}
    for title, parts in _JOINT:
        if metric_basename(name) in parts and len(present.intersection(parts)) > 1:
            return title
    return name


def _find_order(title: str) -> tuple[int, int]:
    """Return a sort key: losses first, then accuracies, then the rest as recorded."""
    part = metric_basename(title)
    if part in _UNITS:
        return 4, list(_UNITS).index(part)
    if "loss" in part:
        return 1, int(part != "loss")
    if "acc" in part or part in ("perplexity", "ppl", "score", "f1"):
        return 2, 0
    return 3, 0


def _draw(title: str, wanted: Sequence[tuple[str, Summary, str]], *, has_wide: bool) -> Chart:
    lines = []
    for color, (label, summary, name) in enumerate(wanted):
        spread = None
        if summary.groups[name]:
            spread = {
                part: summary.series[f"{name}/{part}"].make_curve() for part in STATISTICS[:4]
            }
            if len({len(curve.steps) for curve in spread.values()}) > 1:
                spread = None  # somebody's own metrics of these names
        series = summary.get_series(name)
        lines.append(
            ChartLine(label, color, series.make_curve(), _summarize_not_finite(series), spread)
        )
    svg, notes = draw_chart(lines, f"{title} over steps")
    wide_svg = ""
    if has_wide:
        wide_svg, _ = draw_chart(lines, f"{title} over steps", wide=True)
    unit = _UNITS.get(metric_basename(wanted[0][2]), "")
    return Chart(title, unit, f"{to_file_name('curve', title)}.svg", svg, wide_svg, notes)


def _summarize_not_finite(series: Series) -> tuple[Any, int, int]:
    is_nan = np.isnan(series.values)
    is_infinite = np.isinf(series.values)
    return series.steps[is_nan | is_infinite], int(is_nan.sum()), int(is_infinite.sum())


def _make_standalone(svg: str) -> str:
    """Return a chart as a separate file: with its colours, without the script's data."""
    rules = (
        f"{make_style('svg')}\nsvg {{ color: #1d1f24; stroke-linejoin: round }}\n"
        "@media screen and (prefers-color-scheme: dark) { svg { color: #e7e9ee } }"
    )
    head, _, rest = re.sub(' data-curves="[^"]*"', "", svg, count=1).partition(">")
    return f"{head}>\n<style>{rules}</style>{rest}\n"


def _render_page(report: Report) -> str:
    """Return the page: no request, no script but ours; every name in it is text."""
    template = _read_template("page.html.j2", autoescape=True)
    script = _read_text("page.js")
    page: str = template.render(
        report=report,
        version=__version__,
        style=f"{_read_text('page.css')}{make_style(':root')}",
        colors=len(LIGHT),
        script=script,
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
    )
    return page


def _render_markdown(report: Report) -> str:
    text = _read_template("report.md.j2", autoescape=False).render(report=report)
    # What its parts leave empty takes a line all the same; no text in it has two.
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _read_template(name: str, *, autoescape: bool) -> Any:
    jinja2 = require("jinja2", "a report")
    environment = jinja2.Environment(
        autoescape=autoescape, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"clean": clean, "shorten": shorten, "md": escape_markdown}
    return environment.from_string(_read_text(name))


_SPECIAL = re.compile(r"([\\`*_\[\]|$~#{}()!])")
_ENTITIES = str.maketrans({"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def escape_markdown(text: str, limit: int = 160) -> str:
    """Return a text in one line that Markdown shows as it is."""
    return _SPECIAL.sub(r"\\\1", shorten(text, limit).translate(_ENTITIES))


def _read_text(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _write(path: Path, text: str) -> Path:
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="backslashreplace")
    return path
