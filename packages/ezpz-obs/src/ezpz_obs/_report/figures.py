"""Charts as SVG, by matplotlib, without its global state."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

import numpy as np
import orjson

from ezpz_obs._errors import require

from .series import LARGEST, Curve, Floats, smooth
from .words import TIMES, format_tick, shorten

LIGHT: Final = ("#0072b2", "#d55e00", "#00936b", "#3d3d46", "#c4639d")
"""Of the lines, on white: at least 3.4 : 1 (after Okabe and Ito: blue, vermilion, green, ...)."""

DARK: Final = ("#56b4e9", "#f08a3c", "#2fc49a", "#e8e8ee", "#e0609f")
"""The same on near black: at least 5 : 1."""

ALARM: Final = ("#c8232c", "#ff6b6b")
"""What is not finite, light and dark."""

# Placeholders, replaced by the page's colours when the chart is written.
_INK: Final = "#010a01"
_ALARM: Final = "#030c03"
_LINES: Final = ("#02000b", "#02010b", "#02020b", "#02030b", "#02040b")
_DASHES: Final = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.5, 1.2, 1.5)))
_STYLE: Final = {
    "text.parse_math": False,  # a metric's name is text, dollars and all
    "text.usetex": False, "svg.fonttype": "none", "font.family": ["sans-serif"], "font.size": 10.5,
    "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK, "xtick.color": _INK,
    "ytick.color": _INK, "axes.facecolor": "none", "figure.facecolor": "none",
    "savefig.facecolor": "none", "axes.unicode_minus": True, "path.sketch": None,
}  # fmt: skip
_HIGH: Final = 3.3  # inches
_WIDTHS: Final = {False: 6.1, True: 12.7}  # of a chart, and of one that fills its row
_DECADES: Final = 3.0  # from which an axis is logarithmic
_FAR: Final = 20.0  # an outlier lies this many times the usual range outside of it


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart: its curve, and mean, std, min and max over the ranks if known."""

    label: str
    color: int
    curve: Curve
    not_finite: tuple[Floats, int, int]  # their steps; how many are NaN, and infinite
    spread: dict[str, Curve] | None


def make_style(selector: str) -> str:
    """Return CSS variables of the lines' colours, light and dark."""
    rules = []
    for colors, alarm in ((LIGHT, ALARM[0]), (DARK, ALARM[1])):
        variables = "".join(f"--series-{place}:{color}; " for place, color in enumerate(colors))
        rules.append(f"{selector} {{ {variables}--alarm:{alarm} }}")
    return f"{rules[0]}\n@media screen and (prefers-color-scheme: dark) {{ {rules[1]} }}"


def draw_chart(
    lines: Sequence[ChartLine], title: str, *, wide: bool = False
) -> tuple[str, list[str]]:
    """Draw metrics over steps; return the SVG, and notes for below it."""
    # Each has a faint line of the values, a clear one of their running median, and bands for the
    # spread over the ranks or, of a long run, over the steps that share a point. The title is for
    # screen readers.
    matplotlib = require("matplotlib", "a plot")
    with matplotlib.rc_context(_STYLE):
        figure = require("matplotlib.figure", "a plot").Figure((_WIDTHS[wide], _HIGH), dpi=72)
        left = 0.115 * _WIDTHS[False] / _WIDTHS[wide]
        axes = figure.add_axes((left, 0.155, 0.97 - left, 0.81))
        notes = []
        low, high, is_log, has_outliers = find_y_limits(lines)
        if has_outliers:
            notes.append("outliers are outside the frame")
        if is_log:
            axes.set_yscale("log")
        handles = [_draw_line(axes, line, alone=len(lines) == 1) for line in lines]
        axes.set_ylim(low, high)
        steps = np.concatenate([line.curve.steps for line in lines])
        first = float(steps.min())
        last = float(steps.max())
        margin = 0.01 * (last - first) or 0.5
        axes.set_xlim(first - margin, last + margin)
        for line in lines:
            notes += _mark_not_finite(axes, line, has_label=len(lines) > 1)
        if any(line.spread for line in lines):
            notes.append("bands: mean ± std, and least to greatest, of the ranks")
        _style_axes(axes)
        if len(lines) > 1:
            _add_legend(axes, handles, [line.label for line in lines])
        return _to_svg(figure, title, _describe(figure, axes, lines)), notes


def find_y_limits(lines: Sequence[ChartLine]) -> tuple[float, float, bool, bool]:
    """Return the frame: both ends, whether it is logarithmic, whether something is outside."""
    means = np.concatenate([line.curve.mean for line in lines])
    means = means[np.isfinite(means)]
    if not len(means):
        return 0.0, 1.0, False, False
    low = min(float(np.nanmin(curve.least)) for curve in _visible_curves(lines))
    high = max(float(np.nanmax(curve.greatest)) for curve in _visible_curves(lines))
    usual_low, usual_high = np.quantile(means, (0.02, 0.98), method="nearest").tolist()
    if low > 0 and math.log10(usual_high) - math.log10(usual_low) > _DECADES:
        return low / 1.2, high * 1.2, True, False
    usual = usual_high - usual_low
    has_outliers = usual > 0 and high - low > _FAR * usual
    if has_outliers:
        # They would hide everything else: show the usual range.
        low = max(low, usual_low - usual)
        high = min(high, usual_high + usual)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    return low - margin, high + margin, False, has_outliers


def _visible_curves(lines: Sequence[ChartLine]) -> list[Curve]:
    curves = []
    for line in lines:
        curves.append(line.curve)
        if line.spread is not None:
            curves += [line.spread["min"], line.spread["max"]]
    return [curve for curve in curves if np.isfinite(curve.mean).any()]


def _draw_line(axes: Any, line: ChartLine, *, alone: bool) -> Any:
    """Draw a line with its bands; return its handle for a legend."""
    color = _LINES[line.color % len(_LINES)]
    steps = line.curve.steps
    mean = line.curve.mean
    faint = 0.13 if alone else 0.07
    if line.spread is None and not np.array_equal(
        line.curve.least, line.curve.greatest, equal_nan=True
    ):
        axes.fill_between(
            steps, line.curve.least, line.curve.greatest, color=color, alpha=faint, linewidth=0
        )
    if line.spread is not None:
        least = line.spread["min"].least
        greatest = line.spread["max"].greatest
        std = line.spread["std"].mean
        axes.fill_between(steps, least, greatest, color=color, alpha=faint, linewidth=0)
        axes.fill_between(
            steps, mean - std, mean + std, color=color, alpha=1.8 * faint, linewidth=0
        )
    smoothed = smooth(mean)
    if not np.array_equal(smoothed, mean, equal_nan=True):
        axes.plot(steps, mean, color=color, alpha=0.4, linewidth=0.8)
    mean = smoothed
    # A value without neighbours is no line, and must be seen all the same.
    known = np.concatenate([[False], np.isfinite(mean), [False]])
    lonely = known[1:-1] & ~known[:-2] & ~known[2:]
    axes.plot(steps[lonely], mean[lonely], color=color, linestyle="", marker="o", markersize=4)
    dashes = _DASHES[line.color % len(_DASHES)]  # color is never the only difference
    return axes.plot(steps, mean, color=color, linewidth=1.7, linestyle=dashes)[0]


def _mark_not_finite(axes: Any, line: ChartLine, *, has_label: bool) -> list[str]:
    steps, nan, infinite = line.not_finite
    if not len(steps):
        return []
    axes.plot(
        steps, np.full(len(steps), 0.025), transform=axes.get_xaxis_transform(), color=_ALARM,
        linestyle="", marker="x", markersize=5, markeredgewidth=1.4, clip_on=False,
    )  # fmt: skip
    counts = []
    if nan:
        counts.append(f"{nan:,} NaN")
    if infinite:
        counts.append(f"{infinite:,} infinite")
    label = ""
    if has_label:
        label = f"{shorten(line.label, 24)}: "
    return [f"{label}{' and '.join(counts)} ({TIMES}), first at step {int(steps[0]):,}"]


def _style_axes(axes: Any) -> None:
    ticker = require("matplotlib.ticker", "a plot")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set(alpha=0.35, linewidth=0.8)
    axes.tick_params(which="both", length=0, pad=5)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=_INK, alpha=0.11, linewidth=0.8)
    axes.set_xlabel("step", alpha=0.7, fontsize=10)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() != "log":
            axis.set_major_locator(ticker.MaxNLocator(5))
        axis.set_minor_locator(ticker.NullLocator())
        axis.set_major_formatter(lambda value, _: format_tick(float(value)))
    # No label of the vertical axis is cut: on a phone a letter takes 7.5 points at most.
    low, high = axes.get_ylim()
    labels = [format_tick(float(tick)) for tick in axes.get_yticks() if low <= tick <= high]
    longest = max(map(len, labels), default=0)
    needed = (7.5 * longest + 9) / (72 * axes.figure.get_figwidth())
    box = axes.get_position()
    left = max(box.x0, needed)
    axes.set_position((left, box.y0, box.x1 - left, box.height))


def _add_legend(axes: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    box = axes.get_position()
    axes.set_position((box.x0, box.y0, box.width, box.height - 0.06 * math.ceil(len(labels) / 2)))
    # Matplotlib leaves names out that begin with an underscore: so they come afterwards.
    legend = axes.legend(
        handles, [str(place) for place in range(len(handles))], loc="lower left",
        bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=9.5, borderpad=0.1,
        columnspacing=10,
    )  # fmt: skip
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(shorten(label, 24))


def _describe(figure: Any, axes: Any, lines: Sequence[ChartLine]) -> dict[str, Any]:
    """Return the curves and the frame, in the picture's units, for the page's script."""
    box = axes.get_position()
    width, height = (72 * figure.get_size_inches()).tolist()
    edges = (box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height)
    described = [
        {
            "label": shorten(line.label, 40),
            "color": line.color % len(LIGHT),
            "x": _round(line.curve.steps),
            "y": _round(line.curve.mean),
        }
        for line in lines
    ]
    limits = [float(end) for end in axes.get_xlim()]
    return {"box": [round(float(edge), 1) for edge in edges], "x": limits, "lines": described}


def _round(values: Floats) -> list[float | None]:
    return [float(f"{value:.6g}") if abs(value) <= LARGEST else None for value in values.tolist()]


_HEAD = re.compile(r"^.*?<svg[^>]* viewBox=\"([^\"]*)\"[^>]*>", re.DOTALL)
_NEEDLESS = re.compile(r"<metadata>.*?</metadata>\s*|<style[^>]*>.*?</style>\s*", re.DOTALL)
_FONT = re.compile(r"font-family: 'DejaVu Sans'[^;\"]*")


def _to_svg(figure: Any, title: str, data: dict[str, Any]) -> str:
    """Return a figure as SVG: text is text, colours are the page's, nothing has an address."""
    require("matplotlib.backends.backend_svg", "a plot").FigureCanvasSVG(figure)
    file = io.StringIO()
    with require("matplotlib", "a plot").rc_context({"svg.hashsalt": title}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    head = _HEAD.match(text)
    assert head is not None
    text = _NEEDLESS.sub("", text[head.end() :])
    text = _FONT.sub("font-family: system-ui, sans-serif", text)
    text = re.sub(r"<g id=\"[^\"]*\"", "<g", text)
    text = text.replace(_INK, "currentColor").replace(_ALARM, f"var(--alarm, {ALARM[0]})")
    for place, color in enumerate(_LINES):
        text = text.replace(color, f"var(--series-{place}, {LIGHT[place]})")
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{head[1]}" role="img" aria-label="{escape(shorten(title, 200))}" '
        f'data-curves="{escape(orjson.dumps(data).decode())}">{text.strip()}'
    )
