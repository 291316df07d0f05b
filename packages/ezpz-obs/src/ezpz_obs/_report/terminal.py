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
from ezpz_obs._history import summarize
from ezpz_obs._run import Run, iterate_new_lines, read_run

from .series import Series, read_series, smooth
from .words import clean, format_number, format_tick, shorten

_COLORS: Final = (33, 208, 35, 170)  # blue, orange, green, pink on black and on white
_OTHER_COLORS: Final = re.compile(r"\x1b\[(?!0m|38;5;(?:33|208|35|170)m)[\d;]*m")
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
        width: Letters; default: the terminal's, else 80.
        height: Lines.

    Raises:
        HistoryError: There is no such run, or no line of it is a History's.
        ReportError: There is no such metric, or plotext is not installed.
    """
    plotext = require("plotext", "a plot")
    out = file or sys.stdout
    if not isinstance(run, Run):
        run = read_run(run)
    series, _ = read_series(run)
    chosen = _choose_metrics(run, series, names)
    has_colors = out.isatty() and "NO_COLOR" not in os.environ
    figure = plotext.figure  # plotext has one, its own
    figure.clear()
    figure.plot_size(width or shutil.get_terminal_size((80, 24)).columns, height)
    steps: list[float] = []
    heights: list[float] = []
    for place, name in enumerate(chosen):
        curve = series[name].make_curve()
        values = smooth(curve.mean)
        known = np.isfinite(values)
        # Also where the end is no number: the axis shows how far the run got.
        steps += [float(series[name].steps[0]), float(series[name].steps[-1])]
        if not known.any():
            continue
        heights += values[known].tolist()
        color = plotext.marker("braille", (_COLORS[place % len(_COLORS)], "none"))
        signal = figure.signal(curve.steps[known].tolist(), values[known].tolist(), marker=color)
        signal = signal.lines()
        if len(chosen) > 1:
            signal.label(shorten(name, 30))
        figure.draw(signal)
    if not heights:
        wanted = ", ".join(map(shorten, chosen))
        raise ReportError(f"{wanted}: no value is a number; expected one at least")
    _set_axis(figure.ruler("x"), min(steps), max(steps))
    _set_axis(figure.ruler("y"), min(heights), max(heights))
    figure.title(shorten(f"{run.name}: {', '.join(chosen)}", 70))
    picture = figure.build().string(colorless=not has_colors)
    figure.clear()
    lines = [line.rstrip() for line in _OTHER_COLORS.sub("", picture).splitlines()]
    out.write("\n".join(lines).strip("\n") + "\n")
    for name in chosen:
        one = series[name]
        text = f"{shorten(name)}: last {format_number(one.last)}, mean {format_number(one.mean)}"
        odd = len(one.values) - len(one.finite)
        if odd:
            text += f", {odd:,} not finite"
        out.write(f"{text}\n")


def _choose_metrics(run: Run, series: Mapping[str, Series], names: tuple[str, ...]) -> list[str]:
    if not series:
        raise ReportError(f"{run.path} has no records yet; nothing to draw")
    for name in names:
        if name not in series:
            known = ", ".join(shorten(one, 40) for one in list(series)[:12])
            raise ReportError(f"no metric {shorten(name)!r}; expected one of: {known}")
    if names:
        return list(names)
    losses = [name for name in series if name.endswith("loss")]
    return losses[:4] or list(series)[:1]


def _set_axis(ruler: Any, low: float, high: float) -> None:
    if not high > low:
        ruler.ticks([low], [format_tick(low)])
        return
    rough = (high - low) / 5
    unit = 10.0 ** np.floor(np.log10(rough))
    distance = float(unit * next(one for one in (1, 2, 5, 10) if one * unit >= 0.999 * rough))
    first = int(np.ceil(low / distance - 1e-9))
    last = int(high / distance + 1e-9)
    ticks = [round(place * distance, 12) for place in range(first, last + 1)] or [low, high]
    ruler.ticks(ticks, list(map(format_tick, ticks)))
    # Given ticks and no limits, plotext draws nothing beyond the last tick.
    ruler.lim(low, high)


def tail(
    run: str | os.PathLike[str],
    *,
    follow: bool = True,
    lines: int = 10,
    file: TextIO | None = None,
) -> None:
    """Write a line for each record and event of a run, as they are made, until it ends.

    A run that was killed has no end: press Ctrl-C.

    Args:
        run: As of `read_run`.
        follow: False writes the last lines only.
        lines: How many of those that are there already.
        file: Where to write; default standard output.

    Raises:
        HistoryError: There is no such run, or a line is longer than 64 MiB.
    """
    found = read_run(run)
    out = file or sys.stdout
    waiting: deque[Mapping[str, Any]] | None = deque(maxlen=max(0, lines))
    width = None
    if out.isatty():
        width = shutil.get_terminal_size((80, 24)).columns
    ended = False

    def show(line: Mapping[str, Any]) -> None:
        text = format_line(line)
        if width is not None:
            text = shorten(text, width)
        out.write(f"{text}\n")

    def caught_up() -> bool:
        # Called when nothing new is there: the lines that wait are the last of the old ones.
        nonlocal waiting
        if waiting is not None:
            for line in waiting:
                show(line)
            waiting = None
        out.flush()
        found.warn_of_damage()
        return ended or not follow

    for line in iterate_new_lines(found, stop=caught_up):
        ended = line.get("event") == "end"
        if waiting is None:
            show(line)
        else:
            waiting.append(line)


def format_line(line: Mapping[str, Any]) -> str:
    """Return a line of a run's file for people, after the time of day."""
    if "ezpz_obs" in line:
        text = f"── attempt {line.get('attempt', 0)} of {line.get('run')}"
        ranks = line.get("world_size")
        text += f", {ranks} rank"
        if ranks != 1:
            text += "s"
        if line.get("continues") is not None:
            text += f", continues after step {line['continues']}"
    elif "event" in line:
        text = f"{clean(line['event'])}: {clean(line.get('message', ''))}"
        if line.get("step") is not None:
            text = f"step={line['step']} {text}"
    else:
        text = _format_history_line(line)
    return f"{_format_clock(line)} {clean(text)}"


def _format_history_line(line: Mapping[str, Any]) -> str:
    text = summarize(line, has_statistics=True)
    if line.get("replay"):
        text += " (replayed)"
    return text


def _format_clock(line: Mapping[str, Any]) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(line["time"]))
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return "--:--:--"
