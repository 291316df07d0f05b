"""Warnings, alarms and errors of a run: of its events, and of its ranks' logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import orjson

from ezpz_obs._file import LONGEST_LINE

ROOM: Final = 200
"""Different messages that are kept, of the first and of the last each."""

_GRAVE: Final = frozenset({"warning", "error", "critical", "exception", "fatal", "alarm"})
_LIGHT: Final = (b'"level":"info"', b'"level":"debug"')
_QUIET: Final = frozenset({"end"})
_ENOUGH: Final = 300


@dataclass
class Notice:
    """Something that was said, once or several times in the same words."""

    kind: str
    text: str
    time: float | None
    """Of the first time: seconds since 1970."""
    step: int | None
    ranks: set[int]
    times: int = 1


@dataclass
class Notices:
    """What was said, in order."""

    shown: list[Notice]
    left_out: int
    """Different ones between the first and the last of those shown."""
    unreadable: int
    """Lines of logs that are no JSON."""


def collect(events: Iterable[dict[str, Any]], folder: Path) -> Notices:
    """Read what the events of a run and ``folder/logs/*.jsonl`` say, from WARNING upward.

    Args:
        events: Of the run's file; all are shown but its ends.
        folder: The run's.
    """
    found = _Collection()
    for event in events:
        if event["event"] not in _QUIET:
            found.put(_of_event(event))
    for path in filter(Path.is_file, sorted((folder / "logs").glob("*.jsonl"))):
        for line in _lines(path):
            if line is None:
                found.unreadable += 1
            else:
                found.put(line)
    return found.done()


class _Collection:
    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], Notice] = {}
        self.late: dict[tuple[str, str], Notice] = {}
        self.left_out = self.unreadable = 0

    def put(self, notice: Notice) -> None:
        key = (notice.kind, notice.text)
        known = self.kept.get(key) or self.late.get(key)
        if known is not None:
            known.times += notice.times
            known.ranks |= notice.ranks
        elif len(self.kept) < ROOM:
            self.kept[key] = notice
        else:
            self.late[key] = notice
            if len(self.late) > ROOM:
                del self.late[next(iter(self.late))]
                self.left_out += 1

    def done(self) -> Notices:
        shown = [*self.kept.values(), *self.late.values()]
        shown.sort(key=lambda notice: float("inf") if notice.time is None else notice.time)
        return Notices(shown, self.left_out, self.unreadable)


def _of_event(event: dict[str, Any]) -> Notice:
    known = {"event", "time", "step", "message", "crc"}
    more = [f"{name}={value}" for name, value in event.items() if name not in known]
    text = " ".join(part for part in (str(event.get("message") or ""), *more) if part)
    return Notice(
        str(event["event"]), text[:_ENOUGH], _seconds(event.get("time")),
        _whole(event.get("step")), set(),
    )  # fmt: skip


def _lines(path: Path) -> Iterator[Notice | None]:
    """Give what a log says from WARNING upward, and None for a line that is no log's."""
    with open(path, "rb", buffering=1 << 20) as file:
        # In parts where it is longer than any log's: those are no JSON.
        for line in iter(lambda: file.readline(LONGEST_LINE), b""):
            if any(light in line for light in _LIGHT):
                continue
            try:
                said = orjson.loads(line)
                level = str(said.get("level", "")).lower()
            except (orjson.JSONDecodeError, AttributeError):
                if line.endswith(b"\n"):  # else torn by the end of its writer
                    yield None
                continue
            if level in _GRAVE:
                yield _of_line(level, said)


def _of_line(level: str, said: dict[str, Any]) -> Notice:
    exception = str(said.get("exception") or "").strip()
    text = str(said.get("event") or "")
    if exception:
        # The last line of a traceback is what went wrong.
        text = f"{text}: {exception.splitlines()[-1]}" if text else exception.splitlines()[-1]
    rank = _whole(said.get("rank"))
    return Notice(
        level, text[:_ENOUGH], _seconds(said.get("time")), _whole(said.get("step")),
        set() if rank is None else {rank},
    )  # fmt: skip


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _seconds(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except (ValueError, OverflowError):
        return None
