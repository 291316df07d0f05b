"""A run on a terminal: a plot, and lines as they come."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, TextIO

import numpy as np

from ezpz_obs._errors import ReportError
from ezpz_obs._history.statistics import STATISTICS
from ezpz_obs._history.summary import summarize, summarize_ranks
from ezpz_obs._records import Run, follow, read_run

from .extras import require
from .names import clean, shorten
from .numbers import number, tick_labels
from .series import FROM, MEAN, TO
from .survey import Survey, survey

_HEIGHT: Final = 22
_LINES: Final = 10
_COLOURS: Final = ("blue+", "orange+", "green+", "magenta+")


def plot(
    run: Run | str | os.PathLike[str],
    *names: str,
    file: TextIO | None = None,
    width: int | None = None,
    height: int = _HEIGHT,
) -> None:
    """Draw metrics of a run with letters, as wide as the terminal; in colour only there.

    Args:
        run: As of `read_run`.
        names: Metrics; default: the losses, or else the first.
        file: Where to write; default standard output.
        width: Letters; default: the terminal's, 80 where there is none.
        height: Lines.

    Raises:
        HistoryError: There is no such run, or it is damaged.
        ReportError: There is no such metric, or plotext is not installed.
    """
    plotext = require("plotext", "a plot")
    out = sys.stdout if file is None else file
    surveyed = survey(run if isinstance(run, Run) else read_run(run))
    chosen = _choose(surveyed, names)
    # Plotext has one picture, its own; there is no other way.
    plotext.clear_figure()
    plotext.plotsize(width or shutil.get_terminal_size((80, 24)).columns, height)
    coloured = out.isatty() and "NO_COLOR" not in os.environ
    plotext.theme("clear")
    drawn = []
    marker = "braille" if _can_write(out, "\u28ff") else "x"
    for place, name in enumerate(chosen):
        table = surveyed.series[name].curve(400)
        known = np.isfinite(table[MEAN])
        if known.any():
            steps, values = ((table[FROM] + table[TO]) / 2)[known], table[MEAN][known]
            drawn.append((steps, values))
            label = shorten(name, 30) if len(chosen) > 1 else None
            plotext.plot(
                steps.tolist(), values.tolist(), label=label, marker=marker,
                color=_COLOURS[place % len(_COLOURS)] if coloured else "default",
            )  # fmt: skip
    if not drawn:
        raise ReportError(
            f"{', '.join(map(shorten, chosen))}: no value is a number; nothing to draw"
        )
    for axis, parts in (
        (plotext.xticks, [steps for steps, _ in drawn]),
        (plotext.yticks, [values for _, values in drawn]),
    ):
        low, high = (float(f(np.concatenate(parts))) for f in (np.min, np.max))
        ticks = _ticks(low, high)
        axis(ticks, tick_labels(ticks))
    plotext.title(shorten(f"{surveyed.label}: {', '.join(chosen)}", 70))
    plotext.xlabel("step")
    picture = plotext.build()
    plotext.clear_figure()
    out.write((picture if coloured else plotext.uncolorize(picture)).rstrip("\n") + "\n")
    for name in chosen:
        of = surveyed.series[name]
        odd = f", {of.nan + of.infinite:,} not finite" if of.nan + of.infinite else ""
        last = number(of.last[1] if of.last else None)
        out.write(f"{shorten(name)}: last {last}, mean {number(of.mean)}{odd}\n")


def tail(
    run: str | os.PathLike[str],
    *,
    follow_it: bool = True,
    lines: int = _LINES,
    file: TextIO | None = None,
) -> None:
    """Write a line for each record and event of a run, as they are made, until it ends.

    A run that was killed never says that it ended: Ctrl-C.

    Args:
        run: As of `read_run`.
        follow_it: False writes the last lines only.
        lines: How many of those that are there already.
        file: Where to write; default standard output.

    Raises:
        HistoryError: There is no such run, or it is damaged.
    """
    out = sys.stdout if file is None else file
    waiting: deque[Mapping[str, Any]] | None = deque(maxlen=max(0, lines))
    width = shutil.get_terminal_size((80, 24)).columns if out.isatty() else None
    ended = False

    def show(line: Mapping[str, Any]) -> None:
        said = _say(line)
        out.write((said if width is None else shorten(said, width)) + "\n")

    def caught_up() -> bool:
        # Asked when there is nothing new: what waited is the end of what was there already.
        nonlocal waiting
        if waiting is not None:
            for line in waiting:
                show(line)
            waiting = None
        out.flush()
        return ended or not follow_it

    for line in follow(run, stop=caught_up):
        ended = line.get("event") == "end"
        if waiting is None:
            show(line)
        else:
            waiting.append(line)


def _choose(surveyed: Survey, names: tuple[str, ...]) -> list[str]:
    there = list(surveyed.series)
    if not there:
        raise ReportError(f"{surveyed.run.path} has no records yet; nothing to draw")
    unknown = [name for name in names if name not in surveyed.series]
    if unknown:
        known = ", ".join(shorten(name, 40) for name in there[:12]) + (", …" if there[12:] else "")
        raise ReportError(f"no metric {shorten(unknown[0])!r}; expected one of: {known}")
    return (
        list(names) or [name for name in surveyed.groups if name.endswith("loss")][:4] or there[:1]
    )


def _can_write(out: TextIO, letters: str) -> bool:
    try:
        letters.encode(out.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers from low to high."""
    if not high > low:
        return [low]
    rough = (high - low) / 5
    unit = 10.0 ** np.floor(np.log10(rough))
    each = float(unit * next(f for f in (1, 2, 5, 10) if f * unit >= 0.999 * rough))
    first = int(np.ceil(low / each - 1e-9))
    ticks = [round(place * each, 12) for place in range(first, int(high / each + 1e-9) + 1)]
    return ticks or [low, high]


def _say(line: Mapping[str, Any]) -> str:
    """Say a line of a run's file for people."""
    if "ezpz_obs" in line:
        ranks = line.get("world_size")
        said = [
            f"── attempt {line.get('attempt', 0)} of {line.get('run')}",
            f"{ranks} rank{'s' if ranks != 1 else ''}",
        ]
        if line.get("continues") is not None:
            said.append(f"continues after step {line['continues']}")
        return f"{_clock(line)} {clean(', '.join(said))}"
    if "event" in line:
        step = "" if line.get("step") is None else f"step={line['step']} "
        return (
            f"{_clock(line)} {clean(step)}{clean(line['event'])}: {clean(line.get('message', ''))}"
        )
    own = {name: v for name, v in line.items() if name.rpartition("/")[2] not in STATISTICS}
    said_ranks = any(f"{name}/mean" in line for name in own)
    summary = summarize_ranks(own, line) if said_ranks else summarize(line)
    return f"{_clock(line)} {clean(summary)}{' (replayed)' if line.get('replay') else ''}"


def _clock(line: Mapping[str, Any]) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(line["time"]))
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return "--:--:--"
