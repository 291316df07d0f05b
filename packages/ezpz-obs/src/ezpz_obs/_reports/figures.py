"""Plots as SVG, by matplotlib, without its global state."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

import numpy as np

from .extras import require
from .names import shorten
from .numbers import TIMES, seconds, tick_labels
from .palette import DASHES, INK, alarm, colour, to_variables
from .series import COUNT, FROM, GREATEST, LEAST, MEAN, SIZE, TO, Floats, Series
from .smoothing import limits, reach, smooth
from .step_times import EDGES, StepTimes

POINTS: Final = 600
"""Of a curve: about one for each pixel of its width."""

_PLACE: Final = (0.115, 0.155, 0.855, 0.81)
_PARTS: Final = (0.5, 0.95, 0.99)

_SIZE: Final = (6.1, 3.3)  # inches; the page scales it
_STYLE: Final = {
    "text.parse_math": False,  # a metric's name is text, dollars and all
    "svg.fonttype": "none",
    "font.family": ["sans-serif"],
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.unicode_minus": True,
    "path.simplify": True,
    "path.sketch": None,
    "text.usetex": False,
}


@dataclass(frozen=True)
class Drawn:
    """One curve of a plot.

    Attributes:
        label: Whose it is.
        series: Its values.
        spread: Mean, std, min and max over the ranks, where they are known.
        place: Which colour and dashes.
    """

    label: str
    series: Series
    spread: dict[str, Series] | None
    place: int


def curves(lines: Sequence[Drawn], *, title: str) -> tuple[str, list[str]]:
    """Draw metrics over steps.

    Args:
        lines: What to draw; each with a faint curve of what was recorded, a clear one of its
            smoothed values, and the spread over the ranks where it is known.
        title: What it shows, for those who cannot see it.

    Returns:
        The SVG, and what else has to be said below it.

    Raises:
        ReportError: matplotlib is not installed.
    """
    with _styled():
        figure, axes = _canvas()
        notes: list[str] = []
        tables = [_table(line) for line in lines]
        low, high, log, outside = limits(tables)
        if outside:
            notes.append("outliers are outside the frame")
        if log:
            axes.set_yscale("log")
        for line, table in zip(lines, tables, strict=True):
            _draw(axes, line, table, alone=len(lines) == 1)
        axes.set_ylim(low, high)
        # Margins, or a single step's own place.
        first, last = reach(tables)
        pad = 0.01 * (last - first) if last > first else 0.5
        axes.set_xlim(first - pad, last + pad)
        for line in lines:
            notes.extend(_odd(axes, line, tag=len(lines) > 1))
        bare = [t for t, line in zip(tables, lines, strict=True) if t.shape[1] and not line.spread]
        if any(table[SIZE].max() > 1 for table in bare):
            notes.append("shaded: least to greatest")
        if any(line.spread for line in lines):
            notes.append("bands: mean ± std, and least to greatest, of the ranks")
        axes.set_xlabel("step")
        _dress(axes)
        if len(lines) > 1:
            _legend(figure, axes)
        return _svg(figure, title), notes


def step_histogram(of: Sequence[tuple[str, StepTimes]], *, title: str) -> tuple[str, list[str]]:
    """Draw how long steps took: how many each, on a logarithmic axis of seconds.

    Args:
        of: Label and step times of each run.
        title: For those who cannot see it.

    Returns:
        As `curves`.

    Raises:
        ReportError: matplotlib is not installed.
    """
    with _styled():
        figure, axes = _canvas()
        notes = ["vertical: how many"]
        ranges = [times.reach(0.999) for _, times in of]
        first = max(0, min(least for least, _ in ranges) - 4)
        last = min(len(EDGES) - 2, max(most for _, most in ranges) + 4)
        if len(of) == 1:
            middle, slow, slower = (seconds(of[0][1].quantile(part)) for part in _PARTS)
            notes.append(f"median (dashed) {middle}, 95 % {slow}, 99 % (dashed) {slower}")
        beyond = sum(int(times.histogram[last + 1 :].sum()) for _, times in of)
        if beyond:
            notes.append(f"{beyond:,} slower ones are outside the frame")
        each = max(1, -(-(last - first + 1) // 72))
        starts = np.arange(first, last + 1, each)
        edges = EDGES[[*starts.tolist(), min(int(starts[-1]) + each, len(EDGES) - 1)]]
        for place, (label, times) in enumerate(of):
            counts = np.add.reduceat(times.histogram[: last + 1], starts)
            if len(of) == 1:
                axes.stairs(counts, edges, fill=True, color=colour(0), alpha=0.75, linewidth=0)
            else:
                axes.stairs(
                    counts, edges, color=colour(place), linewidth=1.6, label=shorten(label, 24),
                    linestyle=DASHES[place % len(DASHES)],
                )  # fmt: skip
        axes.set_xscale("log")
        axes.set_xlim(edges[0], edges[-1])
        if len(of) == 1:
            for part in (0.5, 0.99):
                at = of[0][1].quantile(part)
                axes.axvline(at, color=INK, linewidth=0.9, alpha=0.6, linestyle=DASHES[1])
        _dress(axes)
        axes.xaxis.set_major_formatter(lambda value, _: seconds(value))
        if len(of) > 1:
            _legend(figure, axes)
        return _svg(figure, title), notes


def _styled() -> Any:
    return require("matplotlib", "a plot").rc_context(_STYLE)


def _canvas() -> tuple[Any, Any]:
    figure = require("matplotlib.figure", "a plot").Figure(figsize=_SIZE, dpi=72)
    axes = figure.add_axes(_PLACE)
    return figure, axes


def _table(line: Drawn) -> Floats:
    """Return a line's buckets; with a spread the mean's, and the least and greatest of all."""
    if line.spread is None:
        return line.series.curve(POINTS)
    table = line.spread["mean"].curve(POINTS).copy()
    least, greatest = (line.spread[name].curve(POINTS) for name in ("min", "max"))
    if least.shape == greatest.shape == table.shape:
        table[LEAST], table[GREATEST] = least[LEAST], greatest[GREATEST]
    return table


def _draw(axes: Any, line: Drawn, table: Floats, *, alone: bool) -> None:
    if not table.shape[1]:
        return
    of, dashes = colour(line.place), DASHES[line.place % len(DASHES)]
    steps = (table[FROM] + table[TO]) / 2
    faint = 0.13 if alone else 0.07
    if line.spread is not None or table[SIZE].max() > 1:
        axes.fill_between(steps, table[LEAST], table[GREATEST], color=of, alpha=faint, linewidth=0)
    if line.spread is not None:
        std = line.spread["std"].curve(POINTS)
        if std.shape == table.shape:
            axes.fill_between(
                steps, table[MEAN] - std[MEAN], table[MEAN] + std[MEAN],
                color=of, alpha=1.8 * faint, linewidth=0,
            )  # fmt: skip
    smoothed = smooth(table)
    if smoothed is None:
        smoothed = table[MEAN]
    else:
        axes.plot(steps, table[MEAN], color=of, alpha=0.32, linewidth=0.8)
    # A value without neighbours is no line, and must be seen all the same.
    known = np.isfinite(smoothed)
    beside = np.concatenate([[False], known, [False]])
    lonely = known & ~beside[:-2] & ~beside[2:]
    axes.plot(
        steps, smoothed, color=of, linewidth=1.7, linestyle=dashes, label=shorten(line.label, 24)
    )
    axes.plot(steps[lonely], smoothed[lonely], color=of, linestyle="none", marker="o", markersize=4)


def _odd(axes: Any, line: Drawn, *, tag: bool) -> list[str]:
    """Mark where values are no numbers, and say how many."""
    series = line.series if line.spread is None else line.spread["mean"]
    if not series.nan + series.infinite:
        return []
    table = series.curve(POINTS)
    places = np.flatnonzero(table[COUNT] < table[SIZE])
    axes.plot(
        (table[FROM] + table[TO])[places] / 2, np.full(len(places), 0.025),
        transform=axes.get_xaxis_transform(), color=alarm(), linestyle="none", marker="x",
        markersize=5, markeredgewidth=1.4, clip_on=False,
    )  # fmt: skip
    said = [
        f"{count:,} {word}"
        for count, word in ((series.nan, "NaN"), (series.infinite, "infinite"))
        if count
    ]
    whose = f"{shorten(line.label, 24)}: " if tag else ""
    return [f"{whose}{' and '.join(said)} ({TIMES}), first at step {series.first_odd:,}"]


def _dress(axes: Any) -> None:
    """Leave little but the curves."""
    ticker = require("matplotlib.ticker", "a plot")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set(alpha=0.35, linewidth=0.8)
    axes.tick_params(length=0, pad=5)
    axes.tick_params(which="minor", length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=INK, alpha=0.11, linewidth=0.8)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            if high / low < 30:
                axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            if high / low < 3:
                axis.set_major_locator(ticker.MaxNLocator(5))
        else:
            axis.set_major_locator(ticker.MaxNLocator(6 if axis is axes.xaxis else 5))
        axis.set_minor_locator(ticker.NullLocator())
        axis.set_major_formatter(_formatter(ticker))
    axes.xaxis.label.set(alpha=0.7, fontsize=10)


def _formatter(ticker: Any) -> Any:
    class Labels(ticker.Formatter):  # type: ignore[misc]
        def format_ticks(self, values: Any) -> list[str]:
            return tick_labels([float(value) for value in values])

        def __call__(self, x: float, pos: int | None = None) -> str:  # noqa: ARG002
            return tick_labels([float(x)])[0]

    return Labels()


def _legend(figure: Any, axes: Any) -> None:
    """Above the curves, where it hides none."""
    count = len(axes.get_legend_handles_labels()[1])
    rows = -(-count // 3)
    axes.set_position((*_PLACE[:3], _PLACE[3] - 0.065 * rows))
    figure.legend(
        loc="upper left", bbox_to_anchor=(0.1, 1.005), ncols=min(count, 3), frameon=False,
        fontsize=9.5, handlelength=2.2, columnspacing=1.4, borderpad=0.1, labelspacing=0.3,
    )  # fmt: skip


_HEAD = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_SIZES = re.compile(r'<svg[^>]* viewBox="([^"]*)"[^>]*>')
_NEEDLESS = re.compile(r"<metadata>.*?</metadata>\s*|<style[^>]*>.*?</style>\s*", re.DOTALL)
_IDS = re.compile(r"<g id=\"[^\"]*\"")
_FONT = re.compile(r"font-family: 'DejaVu Sans'[^;\"]*")


def _svg(figure: Any, title: str) -> str:
    require("matplotlib.backends.backend_svg", "a plot").FigureCanvasSVG(figure)
    found = io.StringIO()
    with require("matplotlib", "a plot").rc_context({"svg.hashsalt": title}):
        figure.savefig(found, format="svg", metadata={"Date": None, "Creator": None})
    text = _NEEDLESS.sub("", _HEAD.sub("", found.getvalue(), count=1))
    text = _FONT.sub("font-family: system-ui, sans-serif", text)
    text = _SIZES.sub(
        lambda match: (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{match[1]}" role="img" aria-label="{escape(shorten(title, 200))}">'
        ),
        text,
        count=1,
    )
    return to_variables(_IDS.sub("<g", text)).strip()
