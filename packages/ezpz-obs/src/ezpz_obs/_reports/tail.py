"""Lines of a live run, as they come."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, TextIO

from ezpz_obs._file import STATISTICS
from ezpz_obs._history import summarize, summarize_ranks
from ezpz_obs._run import follow as read_on

from .names import clean, shorten

_LINES: Final = 10


def tail(
    run: str | os.PathLike[str],
    *,
    follow: bool = True,
    lines: int = _LINES,
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
        return ended or not follow

    for line in read_on(run, stop=caught_up):
        ended = line.get("event") == "end"
        if waiting is None:
            show(line)
        else:
            waiting.append(line)


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
