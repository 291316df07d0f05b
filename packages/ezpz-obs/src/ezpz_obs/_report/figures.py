"""Plots as SVG, by matplotlib, without its global state."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

import numpy as np
import orjson

from ezpz_obs._errors import require

from .survey import COUNT, EDGES, FROM, GREATEST, LEAST, MEAN, SIZE, TO, Floats, Series, StepTimes
from .words import TIMES, compact, seconds, shorten

INK: Final = "#010a01"
"""Stands for the colour of the text around the plot until the plot is written."""

LIGHT: Final = ("#0072b2", "#d55e00", "#00936b", "#3d3d46", "#c4639d")
"""Of the series, on white: at least 3.4 : 1 (after Okabe and Ito: blue, vermilion, green, ...)."""

DARK: Final = ("#56b4e9", "#f08a3c", "#2fc49a", "#e8e8ee", "#e0609f")
"""The same on near black: at least 5 : 1."""

ALARM: Final = ("#c8232c", "#ff6b6b")
"""What is wrong, light and dark."""

_STANDS_FOR: Final = tuple(f"#02{place:02x}0b" for place in range(len(LIGHT)))
_STANDS_FOR_ALARM: Final = "#030c03"

DASHES: Final = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.5, 1.2, 1.5)))
"""Of the series too, so that colour is never the only thing that tells."""


def colour(place: int) -> str:
    """Return what stands for the colour of the series at this place until `to_variables`."""
    return _STANDS_FOR[place % len(_STANDS_FOR)]


def to_variables(svg: str) -> str:
    """Replace what stands for colours by ``currentColor`` and variables of `style`."""
    svg = svg.replace(INK, "currentColor").replace(_STANDS_FOR_ALARM, f"var(--alarm, {ALARM[0]})")
    for place, stands in enumerate(_STANDS_FOR):
        svg = svg.replace(stands, f"var(--series-{place}, {LIGHT[place]})")
    return svg


def style(selector: str) -> str:
    light, dark = (
        "".join(f"--series-{place}:{of}; " for place, of in enumerate(colours)) + f"--alarm:{alarm}"
        for colours, alarm in ((LIGHT, ALARM[0]), (DARK, ALARM[1]))
    )
    return (
        f"{selector} {{ {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}"
    )


_PLACE: Final = (0.115, 0.155, 0.855, 0.81)
_STYLE: Final = {  # while reports are drawn; no one else notices
    "text.parse_math": False,  # a metric's name is text, dollars and all
    "text.usetex": False, "svg.fonttype": "none", "font.family": ["sans-serif"], "font.size": 10.5,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK,
    "ytick.color": INK, "axes.facecolor": "none", "figure.facecolor": "none",
    "savefig.facecolor": "none", "axes.unicode_minus": True, "path.simplify": True,
    "path.sketch": None,
}  # fmt: skip


def canvas() -> tuple[Any, Any]:
    figure = require("matplotlib.figure", "a plot").Figure(figsize=(6.1, 3.3), dpi=72)
    return figure, figure.add_axes(_PLACE)


def dress(axes: Any) -> None:
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
        axis.set_major_formatter(lambda value, _: compact(float(value)))
    axes.xaxis.label.set(alpha=0.7, fontsize=10)
    # No label of the vertical axis is cut: on a phone a character takes 7.5 points at most.
    low, high = sorted(axes.get_ylim())
    shown = [float(tick) for tick in axes.get_yticks() if low <= tick <= high]
    longest = max(map(len, map(compact, shown)), default=0)
    left = max(_PLACE[0], (7.5 * longest + 9) / (72 * axes.figure.get_figwidth()))
    axes.set_position((left, _PLACE[1], _PLACE[0] + _PLACE[2] - left, _PLACE[3]))


def legend(figure: Any, axes: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    count = len(handles)
    # On a phone, where letters are larger, no name runs into the next one's line.
    longest = max(len(shorten(label, 24)) for label in labels)
    columns = min(count, 3, max(1, int(400 // (7.5 * longest + 40))))
    rows = -(-count // columns)
    axes.set_position((*axes.get_position().bounds[:3], _PLACE[3] - 0.065 * rows))
    # Matplotlib leaves names out that begin with an underscore: so they come afterwards.
    made = figure.legend(
        handles, [f"{place}" for place in range(count)], loc="upper left",
        bbox_to_anchor=(0.1, 1.005), ncols=columns, frameon=False, fontsize=9.5,
        handlelength=2.2, columnspacing=1.2 + 0.19 * longest, borderpad=0.1, labelspacing=0.3,
    )  # fmt: skip
    for text, label in zip(made.get_texts(), labels, strict=True):
        text.set_text(shorten(label, 24))


_HEAD = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_SIZES = re.compile(r'<svg[^>]* viewBox="([^"]*)"[^>]*>')
_NEEDLESS = re.compile(r"<metadata>.*?</metadata>\s*|<style[^>]*>.*?</style>\s*", re.DOTALL)
_IDS = re.compile(r"<g id=\"[^\"]*\"")
_FONT = re.compile(r"font-family: 'DejaVu Sans'[^;\"]*")


def svg(figure: Any, title: str, data: Mapping[str, Any] | None = None) -> str:
    """Return a figure as SVG: text is text, colours are the page's, nothing has an address."""
    # The data are for the page's script.
    told = f' data-curves="{escape(orjson.dumps(data).decode())}"' if data else ""
    require("matplotlib.backends.backend_svg", "a plot").FigureCanvasSVG(figure)
    found = io.StringIO()
    with require("matplotlib", "a plot").rc_context({"svg.hashsalt": title}):
        figure.savefig(found, format="svg", metadata={"Date": None, "Creator": None})
    text = _NEEDLESS.sub("", _HEAD.sub("", found.getvalue(), count=1))
    text = _FONT.sub("font-family: system-ui, sans-serif", text)
    text = _SIZES.sub(
        lambda match: (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{match[1]}" role="img" aria-label="{escape(shorten(title, 200))}"{told}>'
        ),
        text,
        count=1,
    )
    return to_variables(_IDS.sub("<g", text)).strip()


_FEW = 24  # points that need no smoothing
_FAR = 20.0  # so many times the range of nearly all values beyond it, a value is an outlier
_DECADES = 3.0
_LITTLE = 0.004  # of the range: less is no noise but a learning rate's corners


def smooth(table: Floats) -> Floats | None:
    """Return the buckets' means without their noise; None where there is none to speak of."""
    # Each is a mean of all, their weights falling off exponentially to both sides: unlike a moving
    # average it does not lag behind. What is no number leaves a gap.
    means = table[MEAN]
    if len(means) < _FEW:
        return None
    known = np.isfinite(means)
    scale = float(np.abs(means[known]).max(initial=0.0)) or 1.0
    values = np.where(known, means, 0.0) / scale  # squares of 1e200 are no doubles
    if known.sum() < _FEW:
        return None
    # The standard deviation of what has no course, from each value's two neighbours.
    noise = np.median(np.abs(np.diff(values[known], 2))) / (0.6745 * 6**0.5)
    if noise <= _LITTLE * np.ptp(values[known]):  # both are 0 of a constant
        return None
    places = np.arange(len(means), dtype=np.float64)
    away = np.abs(places - places[:, None]) / max(2.5, len(means) / 60)
    weight = np.exp(-away) * known
    return np.where(known, weight @ values / weight.sum(1) * scale, np.nan)


def limits(tables: Sequence[Floats]) -> tuple[float, float, bool, bool]:
    """Return the frame: lower and upper end, whether logarithmic, whether something is outside."""
    means = np.concatenate([table[MEAN] for table in tables])
    means = means[np.isfinite(means)]
    if not len(means):
        return 0.0, 1.0, False, False
    known = [table for table in tables if np.isfinite(table[MEAN]).any()]
    least = min(float(np.nanmin(table[LEAST])) for table in known)
    greatest = max(float(np.nanmax(table[GREATEST])) for table in known)
    usual_low, usual_high = (float(q) for q in np.quantile(means, (0.02, 0.98), method="nearest"))
    usual = usual_high / 2 - usual_low / 2  # halves: twice the largest double is none
    if usual_low > 0 and least > 0 and math.log10(usual_high) - math.log10(usual_low) > _DECADES:
        return least / 1.2, min(greatest * 1.2, 1e308), True, False
    low, high = least, greatest
    if usual > 0:
        low = max(low, usual_low - 2 * _FAR * usual)
        high = min(high, usual_high + 2 * _FAR * usual)
    outside = low > least or high < greatest
    if outside:
        # The outlier would hide everything else: show what is usual.
        low = usual_low - usual if low > least else low
        high = usual_high + usual if high < greatest else high
    half = high / 2 - low / 2
    pad = 0.12 * half if half > 0 else 0.05 * abs(high) or 0.5
    return max(low - pad, -1.7e308), min(high + pad, 1.7e308), False, outside


POINTS: Final = 600  # of a curve: about one for each pixel of its width
_LARGEST: Final = 1e300


@dataclass(frozen=True)
class Drawn:
    label: str
    series: Series
    spread: dict[str, Series] | None  # mean, std, min and max over the ranks, where known
    place: int  # which colour and dashes


def curves(lines: Sequence[Drawn], *, title: str) -> tuple[str, list[str]]:
    """Draw metrics over steps; return the SVG, and what else has to be said below it."""
    # Each has a faint curve of what was recorded, a clear one of its smoothed values, and the
    # spread over the ranks where it is known. The title is for those who cannot see it.
    with require("matplotlib", "a plot").rc_context(_STYLE):
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
        steps = np.concatenate([table[[FROM, TO]].ravel() for table in tables])
        first, last = (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 1.0)
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
        return svg(figure, title, _data(figure, axes, lines, tables)), notes


def _data(
    figure: Any, axes: Any, lines: Sequence[Drawn], tables: Sequence[Floats]
) -> dict[str, Any]:
    """Return what is drawn and where, in the picture's units: six digits, None for no number."""
    place, (width, height) = axes.get_position(), 72 * figure.get_size_inches()
    box = (place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height)

    def plain(values: Floats) -> list[float | None]:
        return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]

    return {
        "box": [round(float(edge), 1) for edge in box],
        "x": [float(end) for end in axes.get_xlim()],
        "lines": [
            {"label": shorten(line.label, 40), "place": line.place % len(LIGHT),
             "x": plain((table[FROM] + table[TO]) / 2), "y": plain(table[MEAN])}
            for line, table in zip(lines, tables, strict=True)
        ],
    }  # fmt: skip


def step_histogram(of: Sequence[tuple[str, StepTimes]]) -> tuple[str, list[str]]:
    """Draw how long steps took, on a logarithmic axis of seconds; return what `curves` does."""
    with require("matplotlib", "a plot").rc_context(_STYLE):
        figure, axes = canvas()
        notes = ["vertical: how many"]
        ranges = [times.reach(0.999) for _, times in of]
        first = max(0, min(least for least, _ in ranges) - 4)
        last = min(len(EDGES) - 2, max(most for _, most in ranges) + 4)
        if len(of) == 1:
            middle, slow, slower = (seconds(of[0][1].quantile(part)) for part in (0.5, 0.95, 0.99))
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
        return svg(figure, "step times"), notes


def _table(line: Drawn) -> Floats:
    """Return a line's buckets; with a spread the mean's, and the least and greatest of all."""
    table = (line.spread["mean"] if line.spread else line.series).curve(POINTS).copy()
    if line.spread is not None:
        least, greatest = (line.spread[name].curve(POINTS) for name in ("min", "max"))
        if least.shape == greatest.shape == table.shape:
            table[LEAST], table[GREATEST] = least[LEAST], greatest[GREATEST]
    # Leave matplotlib room to reckon in: it is lost beyond.
    table[[MEAN, LEAST, GREATEST]] = np.clip(table[[MEAN, LEAST, GREATEST]], -_LARGEST, _LARGEST)
    return table


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
    series = line.series if line.spread is None else line.spread["mean"]
    if not series.nan + series.infinite:
        return []
    table = series.curve(POINTS)
    places = np.flatnonzero(table[COUNT] < table[SIZE])
    axes.plot(
        (table[FROM] + table[TO])[places] / 2, np.full(len(places), 0.025),
        transform=axes.get_xaxis_transform(), color=_STANDS_FOR_ALARM, linestyle="none", marker="x",
        markersize=5, markeredgewidth=1.4, clip_on=False,
    )  # fmt: skip
    counts = ((series.nan, "NaN"), (series.infinite, "infinite"))
    said = [f"{count:,} {word}" for count, word in counts if count]
    whose = f"{shorten(line.label, 24)}: " if tag else ""
    return [f"{whose}{' and '.join(said)} ({TIMES}), first at step {series.first_odd:,}"]
