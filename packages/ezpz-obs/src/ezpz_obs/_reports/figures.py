"""Plots as SVG, by matplotlib, without its global state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .canvas import canvas, dress, legend, styled, svg
from .names import shorten
from .numbers import TIMES, seconds
from .palette import DASHES, INK, alarm, colour
from .series import COUNT, FROM, GREATEST, LEAST, MEAN, SIZE, TO, Floats, Series
from .smoothing import limits, reach, smooth
from .step_times import EDGES, StepTimes

POINTS: Final = 600
"""Of a curve: about one for each pixel of its width."""

_PARTS: Final = (0.5, 0.95, 0.99)
_LARGEST: Final = 1e300


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
    with styled():
        figure, axes = canvas()
        notes: list[str] = []
        tables = [_table(line) for line in lines]
        low, high, log, outside = limits(tables)
        if outside or any(
            np.nanmax(np.abs(t[LEAST : GREATEST + 1]), initial=0) >= _LARGEST for t in tables
        ):
            notes.append("outliers are outside the frame")
        if log:
            axes.set_yscale("log")
        drawn = [
            _draw(axes, line, table, alone=len(lines) == 1)
            for line, table in zip(lines, tables, strict=True)
        ]
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
        dress(axes)
        if len(lines) > 1:
            legend(figure, axes, drawn, [line.label for line in lines])
        return svg(figure, title), notes


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
    with styled():
        figure, axes = canvas()
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
        drawn = []
        for place, (_, times) in enumerate(of):
            counts = np.add.reduceat(times.histogram[: last + 1], starts)
            if len(of) == 1:
                axes.stairs(counts, edges, fill=True, color=colour(0), alpha=0.75, linewidth=0)
            else:
                dashes = DASHES[place % len(DASHES)]
                drawn.append(
                    axes.stairs(counts, edges, color=colour(place), linewidth=1.6, linestyle=dashes)
                )
        axes.set_xscale("log")
        axes.set_xlim(edges[0], edges[-1])
        if len(of) == 1:
            for part in (0.5, 0.99):
                at = of[0][1].quantile(part)
                axes.axvline(at, color=INK, linewidth=0.9, alpha=0.6, linestyle=DASHES[1])
        dress(axes)
        axes.xaxis.set_major_formatter(lambda value, _: seconds(value))
        if len(of) > 1:
            legend(figure, axes, drawn, [label for label, _ in of])
        return svg(figure, title), notes


def _table(line: Drawn) -> Floats:
    """Return a line's buckets; with a spread the mean's, and the least and greatest of all."""
    if line.spread is None:
        return _within(line.series.curve(POINTS))
    table = line.spread["mean"].curve(POINTS).copy()
    least, greatest = (line.spread[name].curve(POINTS) for name in ("min", "max"))
    if least.shape == greatest.shape == table.shape:
        table[LEAST], table[GREATEST] = least[LEAST], greatest[GREATEST]
    return _within(table)


def _within(table: Floats) -> Floats:
    """Leave matplotlib room to reckon in: it is lost beyond."""
    found = table.copy()
    found[[MEAN, LEAST, GREATEST]] = np.clip(found[[MEAN, LEAST, GREATEST]], -_LARGEST, _LARGEST)
    return found


def _draw(axes: Any, line: Drawn, table: Floats, *, alone: bool) -> Any:
    """Draw a line with its shades; return what stands for it in a legend."""
    of, dashes = colour(line.place), DASHES[line.place % len(DASHES)]
    steps = (table[FROM] + table[TO]) / 2
    faint = 0.13 if alone else 0.07
    if line.spread is not None or table[SIZE].max(initial=0) > 1:
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
    axes.plot(steps[lonely], smoothed[lonely], color=of, linestyle="none", marker="o", markersize=4)
    return axes.plot(steps, smoothed, color=of, linewidth=1.7, linestyle=dashes)[0]


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
