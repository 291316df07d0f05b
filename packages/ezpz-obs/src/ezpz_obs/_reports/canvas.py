"""What plots stand on: a figure of matplotlib's, its axes' dress, and the SVG it becomes."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from typing import Any, Final

from .extras import require
from .names import shorten
from .numbers import tick_labels
from .palette import INK, to_variables

_PLACE: Final = (0.115, 0.155, 0.855, 0.81)

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


def styled() -> Any:
    """Return a context in which matplotlib draws as reports want it, and no one else notices.

    Raises:
        ReportError: matplotlib is not installed.
    """
    return require("matplotlib", "a plot").rc_context(_STYLE)


def canvas() -> tuple[Any, Any]:
    """Return an empty figure and its axes."""
    figure = require("matplotlib.figure", "a plot").Figure(figsize=_SIZE, dpi=72)
    axes = figure.add_axes(_PLACE)
    return figure, axes


def dress(axes: Any) -> None:
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


def legend(figure: Any, axes: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Above the curves, where it hides none."""
    count = len(handles)
    rows = -(-count // 3)
    axes.set_position((*_PLACE[:3], _PLACE[3] - 0.065 * rows))
    # Matplotlib leaves names out that begin with an underscore: so they come afterwards.
    made = figure.legend(
        handles, [f"{place}" for place in range(count)], loc="upper left",
        bbox_to_anchor=(0.1, 1.005), ncols=min(count, 3), frameon=False, fontsize=9.5,
        handlelength=2.2, columnspacing=1.4, borderpad=0.1, labelspacing=0.3,
    )  # fmt: skip
    for text, label in zip(made.get_texts(), labels, strict=True):
        text.set_text(shorten(label, 24))


_HEAD = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_SIZES = re.compile(r'<svg[^>]* viewBox="([^"]*)"[^>]*>')
_NEEDLESS = re.compile(r"<metadata>.*?</metadata>\s*|<style[^>]*>.*?</style>\s*", re.DOTALL)
_IDS = re.compile(r"<g id=\"[^\"]*\"")
_FONT = re.compile(r"font-family: 'DejaVu Sans'[^;\"]*")


def svg(figure: Any, title: str) -> str:
    """Return a figure as SVG: text is text, colours are the page's, nothing has an address."""
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
