"""The ratios of bench:all as pictures: one SVG a section, for light and for dark pages."""

from collections.abc import Sequence
from pathlib import Path

import goals
import matplotlib as mpl
from matplotlib.figure import Figure
from paired import Row

_INK, _OURS, _MISSED = "#808080", "#2a7fb8", "#d62728"


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw each section that has ratios, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = list(dict.fromkeys(row.key.split("/")[0] for row in rows))
    paths = []
    for section in sections:
        # A peer that was not measured has its line, too.
        shown = [
            row for row in rows if (row.ratio or row.peer) and row.key.startswith(f"{section}/")
        ]
        if any(row.ratio for row in shown):
            path = folder / f"{section}.svg"
            # The same figures give the same file.
            with mpl.rc_context({"svg.hashsalt": section, "svg.fonttype": "none"}):
                _picture(section, shown).savefig(
                    path, transparent=True, metadata={"Date": None, "Creator": None}
                )
            paths.append(path)
    return paths


def _picture(section: str, rows: Sequence[Row]) -> Figure:
    every = goals.load()
    figure = Figure(figsize=(8, 0.9 + 0.24 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        ratio = row.ratio
        if ratio is None:
            axes.text(1, place, " not measured", color=_INK, fontsize=8, va="center")
            continue
        verdicts = goals.judge(row, every)
        colour = _MISSED if any(verdict.holds is False for verdict in verdicts) else _OURS
        axes.plot([ratio.low, ratio.high], [place, place], color=colour, linewidth=2)
        axes.plot(ratio.median, place, "o", color=colour, markersize=5)
        for verdict in verdicts:
            limit = float(verdict.goal.limit.split()[1])
            if verdict.goal.figure in {"ratio", "inverse"} and not verdict.goal.beyond:
                at = limit if verdict.goal.figure == "ratio" else 1 / limit
                axes.plot(at, place, "|", color=_INK, markersize=12, markeredgewidth=2)
    axes.axvline(1, color=_INK, linewidth=1, linestyle=":")
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [f"{row.what} / {row.peer}" for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(
        "ours / theirs: left of 1 we take less; | is a goal; red misses one", color=_INK
    )
    axes.set_title(section, color=_INK, loc="left")
    axes.tick_params(colors=_INK, which="both", labelsize=8)
    for spine in axes.spines.values():
        spine.set_color(_INK)
    return figure
