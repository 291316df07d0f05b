"""One event as a line: for people, or as JSON."""

from __future__ import annotations

import math
import re
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import orjson
import structlog

from ezpz_obs._context import NOW, Place
from ezpz_topo import redact

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]

RESERVED = frozenset(
    {"time", "timestamp", "level", "logger", "logger_name", "event", "exception", "stack"}
)
"""Names that a line uses itself; a field called so gets an underscore."""

_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_NEEDS_QUOTES = re.compile(r"[\s='\"\x00-\x1f]|^$").search
_LONGEST = 2000  # letters of a value that is no number, string, list or mapping
_DEEPEST = 20


@dataclass(slots=True)
class Event:
    """Something to say: who, what, how bad, and what belongs to it."""

    level: int
    label: str
    logger: str | None
    text: str
    fields: dict[str, Any]
    exception: str | None = None
    """The traceback, as text."""
    stack: str | None = None

    def redact(self) -> None:
        """Take the secrets out of it."""
        self.text, self.fields = redact(self.text), redact(self.fields)
        self.exception, self.stack = redact(self.exception), redact(self.stack)


def json_line(event: Event, place: Place, now: float) -> bytes:
    """Return the event as one line of JSON, with its newline.

    What JSON has no word for is told by a string: NaN and the infinities, integers beyond 64
    bits, objects.
    """
    line: dict[str, Any] = {
        "time": _utc(now),
        "level": event.label,
    }
    if event.logger is not None:
        line["logger"] = event.logger
    line["event"], line["rank"], line["host"] = event.text, place.rank, place.host
    line.update(_fields(event, place))
    if event.stack is not None:
        line["stack"] = event.stack
    if event.exception is not None:
        line["exception"] = event.exception
    try:
        written = orjson.dumps(line, _describe, _OPTIONS)
    except TypeError:  # integers beyond 64 bits, lone surrogates, cycles, a mapping's odd keys
        return orjson.dumps(_plain(line, 0), option=_OPTIONS)
    # NaN and the infinities were written as null, which says nothing.
    return orjson.dumps(_plain(line, 0), option=_OPTIONS) if b"null" in written else written


def _utc(now: float) -> str:
    """Return ISO 8601 in UTC with microseconds, always of the same length."""
    global _utc_second
    microseconds = int(now * 1e6)
    second = microseconds // 1_000_000
    known, text = _utc_second
    if known != second:  # a microsecond's work, and most lines share theirs with another
        text = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        _utc_second = second, text
    return f"{text}.{microseconds - second * 1_000_000:06}+00:00"


_utc_second: tuple[int, str] = (-1, "")


class Console:
    """Lines for people: time, level, text, logger, fields.

    Args:
        colours: Whether the terminal has some.
    """

    def __init__(self, *, colours: bool) -> None:
        self._second: tuple[int, str] = (-1, "")
        # Structlog's is for terminals; into files it takes 11 µs a line, ours 3.
        self._colourful = (
            structlog.dev.ConsoleRenderer(
                colors=True, force_colors=True, sort_keys=False,
                # The rich one prints every local variable: ours comes as text.
                exception_formatter=structlog.dev.plain_traceback,
            ) if colours else None
        )  # fmt: skip

    def line(self, event: Event, place: Place, now: float) -> str:
        """Return the event as text, with its newline; a traceback takes lines of its own."""
        shown = {}
        if place.world_size > 1:
            shown = {"rank": place.rank, "host": place.host}
        shown |= _fields(event, place if shown else None)
        if event.text.startswith(f"step={NOW.step} "):
            shown.pop("step", None)  # what `History.update` returned begins with it
        stamp = self._stamp(int(now))
        if self._colourful is None:
            return _uncoloured(event, shown, stamp)
        # What structlog cannot show may raise, and it may not.
        shown = {
            name: value if _is_simple(value) else _show(value) for name, value in shown.items()
        }
        first, _, rest = event.text.partition("\n")
        shown |= {"timestamp": stamp, "level": event.label, "event": first}
        if event.logger is not None:
            shown["logger"] = event.logger
        return _with_more(self._colourful(None, event.label, shown), rest, event)

    def _stamp(self, second: int) -> str:
        known, text = self._second
        if known != second:  # 2 µs, and most lines share theirs with another
            text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
            self._second = second, text
        return text


def _uncoloured(event: Event, shown: Mapping[str, Any], stamp: str) -> str:
    """Return a line as structlog's renderer does, without its columns' machinery."""
    logger = "" if event.logger is None else f" [{event.logger}]"
    fields = "".join([f" {name}={_show(value)}" for name, value in shown.items()])
    first, _, rest = event.text.partition("\n")
    line = f"{stamp} [{event.label:<9}] {first:<30}{logger}{fields}".rstrip(" ")
    return _with_more(line, rest, event)


def _with_more(line: str, rest: str, event: Event) -> str:
    """Return the line with what has lines of its own below it."""
    for more in (rest, event.stack, event.exception):
        if more:
            line = f"{line}\n{more}"
    return f"{line}\n"


def _show(value: object) -> str:
    """Return a value in one line, in quotes where it has blanks."""
    if isinstance(value, str):
        return repr(value) if _NEEDS_QUOTES(value) else value
    try:
        return repr(value)
    # Somebody's __repr__; a log line must not end a training.
    except Exception:  # noqa: BLE001
        return _text(value)


def _is_simple(value: object) -> bool:
    return isinstance(value, str | int | float) or value is None


def traceback_text(exc_info: object) -> str | None:
    """Return the traceback of what ``exc_info=`` was given; None where there is none."""
    found = to_exc_info(exc_info)
    if found is None:
        return None
    try:
        return "".join(traceback.format_exception(*found)).rstrip("\n")
    # Of an exception that cannot be formatted its kind is still worth a line.
    except Exception:  # noqa: BLE001
        return f"{found[0].__name__}, which cannot be formatted"


def to_exc_info(given: object) -> ExcInfo | None:
    """Return kind, value and traceback of what ``exc_info=`` was given."""
    if isinstance(given, BaseException):
        return type(given), given, given.__traceback__
    found = given if isinstance(given, tuple) else sys.exc_info() if given else None
    if found is None or len(found) != 3 or not isinstance(found[1], BaseException):
        return None
    return found


def _fields(event: Event, place: Place | None) -> dict[str, Any]:
    """Return the event's fields with the step; none hides what the line says itself."""
    fields = event.fields
    if not RESERVED.isdisjoint(fields):
        fields = {f"{name}_" if name in RESERVED else name: v for name, v in fields.items()}
    if place is not None and ("rank" in fields or "host" in fields):
        # The line's own rank is who speaks: what is said about another has another name.
        said: dict[str, object] = {"rank": place.rank, "host": place.host}
        fields = {
            f"{name}_" if name in said and not _is(value, said[name]) else name: value
            for name, value in fields.items()
        }
    if NOW.step is not None and "step" not in fields:
        fields = {"step": NOW.step, **fields}
    return fields


def _is(value: object, other: object) -> bool:
    return isinstance(value, int | str) and value == other


def _describe(value: object) -> object:
    """Return what JSON has no word for as text."""
    if isinstance(value, set | frozenset):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    return _item(value)


def _item(value: Any) -> object:
    """Return the number that a 0-d array or tensor holds; of anything else its text."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "dtype"):
        try:
            return value.item()
        # What only looks like one is told as text.
        except Exception:  # noqa: BLE001, S110
            pass
    return _text(value)


def _text(value: object) -> str:
    try:
        said = str(value)
    # Somebody's __str__; a log line must not end a training.
    except Exception:  # noqa: BLE001
        return f"<{type(value).__name__}, which cannot be shown>"
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."


def _plain(value: Any, depth: int) -> Any:
    """Return what orjson takes, of anything."""
    if depth > _DEEPEST:
        return "..."  # a cycle, as likely as not
    if isinstance(value, Mapping):
        return {_plain(_text(key), 0): _plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner, depth + 1) for inner in value]
    if not isinstance(value, str | int | float):
        value = value if value is None else _item(value)
    return _simple(value)


def _simple(value: object) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return int(value)
    if isinstance(value, float):
        # Python's words for the three that JSON has none for are others'.
        return float(value) if math.isfinite(value) else _NOT_FINITE[str(float(value))]
    text = value if isinstance(value, str) else _text(value)
    return text.encode("utf-8", "backslashreplace").decode()
