"""A run on the terminal: a plot of letters, and the lines of a live run."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, TextIO

import numpy as np

from ezpz_obs._errors import ReportError, require
from ezpz_obs._file import STATISTICS
from ezpz_obs._history import summarize
from ezpz_obs._run import Run, read_run
from ezpz_obs._run import follow as read_on

from .figures import smooth
from .survey import FROM, MEAN, TO, Survey, survey
from .words import clean, compact, number, shorten

_LARGEST: Final = 1e300  # the height of a frame is to be a number too
_FRAME: Final = str.maketrans("┌┐└┘├┤┬┴─│┼…", "++++++++-|+.")
_COLOURS: Final = (33, 208, 35, 170)  # blue, orange, green, pink on black and on white
_OTHERS: Final = re.compile(r"\x1b\[(?!0m|38;5;(?:33|208|35|170)m)[\d;]*m")
"""Plotext's other colours: a white ground, whatever the terminal has."""


def plot(
    run: Run | str | os.PathLike[str],
    *names: str,
    file: TextIO | None = None,
    width: int | None = None,
    height: int = 22,
) -> None:
    """Draw metrics of a run with letters, as wide as the terminal; in colour only there.

    Args:
        run: As of `read_run`.
        names: Metrics; default: the losses, or else the first.
        file: Where to write; default standard output.
        width: Letters; default: the terminal's, 80 where there is none.
        height: Lines.

    Raises:
        HistoryError: There is no such run, or no line of it is a History's.
        ReportError: There is no such metric, or plotext is not installed.
    """
    plotext = require("plotext", "a plot")
    out = sys.stdout if file is None else file
    surveyed = survey(run if isinstance(run, Run) else read_run(run))
    chosen = _choose(surveyed, names)
    coloured = out.isatty() and "NO_COLOR" not in os.environ
    figure = plotext.figure  # plotext has one, its own
    figure.clear()
    figure.plot_size(width or shutil.get_terminal_size((80, 24)).columns, height)
    steps: list[float] = []
    heights: list[float] = []
    marker = "braille" if _can_write(out, "\u28ff") else "x"
    for place, name in enumerate(chosen):
        table = surveyed.series[name].curve(400)
        smoothed = smooth(table)
        curve = table[MEAN] if smoothed is None else smoothed
        known = np.isfinite(curve)
        # Also where the end is no number: the axis shows how far the run got.
        steps += [*table[FROM], *table[TO]]
        if known.any():
            middles = ((table[FROM] + table[TO]) / 2)[known]
            values = np.clip(curve[known], -_LARGEST, _LARGEST)
            heights += values.tolist()
            of_plot = plotext.marker(marker, (_COLOURS[place % len(_COLOURS)], "none"))
            signal = figure.signal(middles.tolist(), values.tolist(), marker=of_plot).lines()
            if len(chosen) > 1:
                signal.label(shorten(name, 30))
            figure.draw(signal)
    if not heights:
        wanted = ", ".join(map(shorten, chosen))
        raise ReportError(f"{wanted}: no value is a number; expected one at least")
    for axis, values in (("x", steps), ("y", heights)):
        low = float(min(values))
        high = float(max(values))
        ticks = _ticks(low, high)
        ruler = figure.ruler(axis).ticks(ticks, list(map(compact, ticks)))
        if high > low:
            # Given ticks and no limits, plotext draws nothing beyond the last tick.
            ruler.lim(low, high)
    figure.title(shorten(f"{surveyed.label}: {', '.join(chosen)}", 70))
    picture = figure.build().string(colorless=not coloured)
    figure.clear()
    lines = [line.rstrip() for line in _OTHERS.sub("", picture).splitlines()]
    if marker == "x":
        lines = [line.translate(_FRAME) for line in lines]
    out.write("\n".join(lines).strip("\n") + "\n")
    for name in chosen:
        of = surveyed.series[name]
        odd = f", {of.nan + of.infinite:,} not finite" if of.nan + of.infinite else ""
        last = number(of.last and of.last[1])
        out.write(f"{shorten(name)}: last {last}, mean {number(of.mean)}{odd}\n")


def _choose(surveyed: Survey, names: tuple[str, ...]) -> list[str]:
    there = list(surveyed.series)
    if not there:
        raise ReportError(f"{surveyed.run.path} has no records yet; nothing to draw")
    unknown = [name for name in names if name not in surveyed.series]
    if unknown:
        known = ", ".join(shorten(name, 40) for name in there[:12]) + (", …" if there[12:] else "")
        raise ReportError(f"no metric {shorten(unknown[0])!r}; expected one of: {known}")
    losses = [name for name in surveyed.groups if name.endswith("loss")][:4]
    return list(names) or losses or there[:1]


def _can_write(out: TextIO, letters: str) -> bool:
    try:
        letters.encode(out.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _ticks(low: float, high: float) -> list[float]:
    if not high > low:
        return [low]
    rough = (high - low) / 5
    unit = 10.0 ** np.floor(np.log10(rough))
    each = float(unit * next(f for f in (1, 2, 5, 10) if f * unit >= 0.999 * rough))
    first = int(np.ceil(low / each - 1e-9))
    ticks = [round(place * each, 12) for place in range(first, int(high / each + 1e-9) + 1)]
    return ticks or [low, high]


def tail(
    run: str | os.PathLike[str],
    *,
    follow: bool = True,
    lines: int = 10,
    file: TextIO | None = None,
) -> None:
    """Write a line for each record and event of a run, as they are made, until it ends.

    A run that was killed never says that it ended: Ctrl-C.

    Args:
        run: As of `read_run`.
        follow: False writes the last lines only.
        lines: How many of those that are there already.
        file: Where to write; default standard output.

    Raises:
        HistoryError: There is no such run, or a line is longer than 64 MiB.
    """
    found = read_run(run)
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
        found.warn_of_damage()
        return ended or not follow

    for line in read_on(found, stop=caught_up):
        ended = line.get("event") == "end"
        if waiting is None:
            show(line)
        else:
            waiting.append(line)


def _say(line: Mapping[str, Any]) -> str:
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
        event = f"{clean(line['event'])}: {clean(line.get('message', ''))}"
        return f"{_clock(line)} {clean(step)}{event}"
    own = {name: v for name, v in line.items() if name.rpartition("/")[2] not in STATISTICS}
    said_ranks = any(f"{name}/mean" in line for name in own)
    summary = summarize(own if said_ranks else line, line)
    return f"{_clock(line)} {clean(summary)}{' (replayed)' if line.get('replay') else ''}"


def _clock(line: Mapping[str, Any]) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(line["time"]))
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return "--:--:--"
