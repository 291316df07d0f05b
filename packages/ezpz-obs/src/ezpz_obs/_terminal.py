"""Where the lines of a process go: events as text or JSON, a terminal, a log file."""

from __future__ import annotations

import io
import logging
import os
import re
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

import orjson
from structlog.dev import BLUE, BRIGHT, CYAN, DIM, MAGENTA, RESET_ALL, ConsoleRenderer

from ezpz_topo import redact

from ._context import NOW, Place, find_place, is_at, open_to_append, to_json, to_text

LEVELS = {
    "DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING,
    "ERROR": logging.ERROR, "CRITICAL": logging.CRITICAL,
}  # fmt: skip
_OTHER_NAMES = {"WARN": logging.WARNING, "FATAL": logging.CRITICAL}


def get_log_level(env: Mapping[str, str], *, rank: int) -> int:
    """Return the level from which a rank logs, as one of `logging`'s numbers.

    Raises:
        ValueError: ``EZPZ_LOG_LEVEL`` is no level.
    """
    return for_rank(to_level(env.get("EZPZ_LOG_LEVEL") or "INFO", "EZPZ_LOG_LEVEL"), env, rank)


def for_rank(level: int, env: Mapping[str, str], rank: int) -> int:
    """Return the level for this rank's terminal, where rank 0's is ``level``."""
    if rank == 0 or env.get("LOG_FROM_ALL_RANKS", "0").lower() not in ("", "0", "false", "no"):
        return level
    return max(level, logging.WARNING)


def to_level(value: str | int, said_by: str) -> int:
    if isinstance(value, int):
        return value
    level = (LEVELS | _OTHER_NAMES).get(value.upper())
    if level is None:
        raise ValueError(f"{said_by}={value.upper()!r}; expected one of {', '.join(LEVELS)}")
    return level


def wants_json(env: Mapping[str, str]) -> bool:
    said = env.get("EZPZ_LOG_FORMAT", "").lower()
    if said not in ("", "console", "json"):
        raise ValueError(f"EZPZ_LOG_FORMAT={said!r}; expected console (the default) or json")
    return said == "json"


ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]

RESERVED = frozenset(
    {"time", "timestamp", "level", "logger", "logger_name", "event", "exception", "stack"}
)
"""Names that a line uses itself; a field called so gets an underscore."""

_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
_NEEDS_QUOTES = re.compile(r"[\s='\"\x00-\x1f]|^$").search
_LONGEST = 2000  # letters of a value that is no number, string, list or mapping


@dataclass(slots=True)
class Event:
    level: int
    label: str
    logger: str | None
    text: str
    fields: dict[str, Any]
    exception: str | None = None  # the traceback, as text
    stack: str | None = None

    def redact(self) -> None:
        self.text = redact(self.text)
        self.exception = redact(self.exception)
        self.stack = redact(self.stack)
        try:
            self.fields = redact(self.fields)
        # Somebody's mapping, or an object that stands for another, may raise when it is looked at.
        except Exception:  # noqa: BLE001
            self.fields = {name: _redact_field(name, one) for name, one in self.fields.items()}


def _redact_field(name: str, value: object) -> object:
    try:
        return redact({name: value})[name]
    except Exception:  # noqa: BLE001  # as above
        return redact({name: to_text(value, repr)})[name]


def json_line(event: Event, place: Place, now: float) -> bytes:
    # What JSON has no word for is a string: NaN, infinities, integers beyond 64 bits, objects.
    microseconds = int(now * 1e6)
    stamp = f"{_utc(microseconds // 1_000_000)}.{microseconds % 1_000_000:06}+00:00"
    line: dict[str, Any] = {"time": stamp, "level": event.label}
    if event.logger is not None:
        line["logger"] = event.logger
    line["event"], line["rank"], line["host"] = event.text, place.rank, place.host
    line.update(_fields(event, place))
    if event.stack is not None:
        line["stack"] = event.stack
    if event.exception is not None:
        line["exception"] = event.exception
    try:
        written = orjson.dumps(line, _plain, _OPTIONS)
    except TypeError:  # integers beyond 64 bits, lone surrogates, cycles, a mapping's odd keys
        written = b"null"
    # NaN and the infinities were written as null, which says nothing.
    return orjson.dumps(_plain(line), option=_OPTIONS) if b"null" in written else written


# A microsecond's work each, and most lines share theirs with another.
@lru_cache(maxsize=4)
def _utc(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


@lru_cache(maxsize=4)
def _local(second: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))


# As structlog has them: of time, event, logger, a field's name, its value; and their end.
_COLOURS = (DIM, BRIGHT, BRIGHT + BLUE, CYAN, f"{RESET_ALL}={MAGENTA}", RESET_ALL)
_NO_COLOURS = ("", "", "", "", "=", "")
_OF_LEVELS = ConsoleRenderer.get_default_level_styles()


def console_line(event: Event, place: Place, now: float, *, colours: bool) -> str:
    shown = {}
    if place.world_size > 1:
        shown = {"rank": place.rank, "host": place.host}
    shown |= _fields(event, place if shown else None)
    if event.text.startswith(f"step={NOW.step} "):
        shown.pop("step", None)  # what `History.update` returned begins with it
    first, _, rest = event.text.partition("\n")
    # As structlog does, which takes 11 µs a line into files, and this 3.
    dim, bright, blue, cyan, equals, end = _COLOURS if colours else _NO_COLOURS
    level = _OF_LEVELS.get(event.label, "") + bright if colours else ""
    logger = "" if event.logger is None else f" [{blue}{event.logger}{end}]"
    fields = "".join([f" {cyan}{name}{equals}{show(value)}{end}" for name, value in shown.items()])
    line = (
        f"{dim}{_local(int(now))}{end} [{level}{event.label:<9}{end}] "
        f"{bright}{first:<30}{end}{logger}{fields}"
    ).rstrip(" ")
    for more in (rest, event.stack, event.exception):
        if more:
            line = f"{line}\n{more}"
    return f"{line}\n"


def show(value: object) -> str:
    if isinstance(value, str):
        text = value if type(value) is str else to_text(value)
        return repr(text) if _NEEDS_QUOTES(text) else text
    return to_text(value, repr)


def traceback_text(exc_info: object) -> str | None:
    found = to_exc_info(exc_info)
    if found is None:
        return None
    try:
        return "".join(traceback.format_exception(*found)).rstrip("\n")
    # Of an exception that cannot be formatted its kind is still worth a line.
    except Exception:  # noqa: BLE001
        return to_text(found[1])


def to_exc_info(given: object) -> ExcInfo | None:
    if issubclass(type(given), BaseException):
        error = cast("BaseException", given)
        return type(error), error, error.__traceback__
    if given is None or given is False:
        return None
    found = given if type(given) is tuple else sys.exc_info()
    if len(found) != 3 or not isinstance(found[1], BaseException):
        return None
    return cast("ExcInfo", found)


def _fields(event: Event, place: Place | None) -> dict[str, Any]:
    """Return the event's fields with the step; none hides what the line says itself."""
    fields = event.fields
    if not RESERVED.isdisjoint(fields):
        fields = {f"{name}_" if name in RESERVED else name: v for name, v in fields.items()}
    if place is not None and ("rank" in fields or "host" in fields):
        # The line's own rank is who speaks: what is said about another has another name.
        said: dict[str, object] = {"rank": place.rank, "host": place.host}
        fields = {
            f"{name}_"
            if name in said and not (isinstance(value, int | str) and value == said[name])
            else name: value
            for name, value in fields.items()
        }
    if NOW.step is not None and "step" not in fields:
        fields = {"step": NOW.step, **fields}
    return fields


def _plain(value: object) -> object:
    """Return a value without what JSON has no word for, which is said as text."""
    return to_json(value, _item)


def _item(value: Any) -> object:
    try:
        if getattr(value, "ndim", None) == 0 and hasattr(value, "dtype"):
            return value.item()
    # What only looks like one is told as text.
    except Exception:  # noqa: BLE001, S110
        pass
    text = to_text(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


class _Target:
    def __init__(self, level: int) -> None:
        self.level = level
        self._is_torn = False

    def _append(self, descriptor: int, line: bytes) -> None:
        if self._is_torn:
            line = b"\n" + line
        written = os.write(descriptor, line)
        while written < len(line):  # the disk, or a pipe, is nearly full
            self._is_torn = True
            written += os.write(descriptor, line[written:])
        self._is_torn = False


class Terminal(_Target):
    # Without a stream: standard error as it is at each line, since tests and notebooks replace it.

    def __init__(
        self, stream: TextIO | None, *, level: int, as_json: bool, env: Mapping[str, str]
    ) -> None:
        super().__init__(level)
        self.trouble: Exception | None = None  # why the latest line was not taken
        self.as_json = as_json
        self._given = stream
        self._no_colours = bool(env.get("NO_COLOR")) or env.get("TERM") == "dumb"
        self._seen: TextIO | None = None
        self._is_tty = False
        self._colours = False

    def stream(self) -> TextIO | None:
        return self._given if self._given is not None else sys.stderr

    def is_tty(self) -> bool:
        self._look(self.stream())
        return self._is_tty

    def render(self, event: Event, place: Place, now: float) -> str | bytes:
        if self.as_json:
            return json_line(event, place, now)
        self._look(self.stream())
        return console_line(event, place, now, colours=self._colours)

    def write(self, line: str | bytes) -> None:
        stream = self.stream()
        if stream is None:
            return  # there is no standard error
        self._look(stream)
        self.trouble = None
        try:
            with _without_bars(stream) if self._is_tty else nullcontext():
                self._write(stream, line)
        # A full disk, a reader that has gone, a stream that is closed or somebody's own object
        # that raises anything: logging must not end a training. Tried again at the next line.
        except Exception as error:  # noqa: BLE001
            self.trouble = error

    def _write(self, stream: TextIO, line: str | bytes) -> None:
        descriptor = _descriptor(stream)
        if descriptor is None:
            text = line.decode() if isinstance(line, bytes) else line
            encoding = getattr(stream, "encoding", None)
            if isinstance(encoding, str):
                text = text.encode(encoding, "backslashreplace").decode(encoding)
            stream.write(text)
            stream.flush()
            return
        if isinstance(line, str):
            line = line.encode(stream.encoding, "backslashreplace")
        stream.flush()  # what the script has printed comes first
        # Past Python's buffer: what cannot be written is not tried again at exit, which would
        # change the exit status to 120; and ranks that share the stream do not mix their lines.
        self._append(descriptor, line)

    def _look(self, stream: TextIO | None) -> None:
        """See what kind of stream this is, once for each."""
        if stream is self._seen:
            return
        self._seen = stream
        try:
            self._is_tty = stream is not None and (stream.isatty() or _is_shown(stream))
        except (OSError, ValueError, AttributeError):  # closed, or hardly a stream
            self._is_tty = False
        self._colours = self._is_tty and not self._no_colours


def _is_shown(stream: TextIO) -> bool:
    """Say whether ezpz-launch shows on a terminal what is written there."""
    told = bool(os.environ.get("EZPZ_TERMINAL"))
    return told and not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)


def _descriptor(stream: TextIO) -> int | None:
    """Return the descriptor behind a plain stream of Python's; None where somebody listens."""
    # A subclass (pytest, Jupyter) or a patched write (W&B) wants to see what is written.
    if type(stream) is not io.TextIOWrapper or "write" in vars(stream):
        return None
    raw = getattr(stream.buffer, "raw", stream.buffer)
    return raw.fileno() if type(raw) is io.FileIO else None


def _without_bars(stream: TextIO) -> AbstractContextManager[Any]:
    """Take tqdm's bars, ours and the script's own, off the terminal for the while."""
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if not getattr(tqdm, "_instances", None):
        return nullcontext()
    found: AbstractContextManager[Any] = tqdm.external_write_mode(file=stream)
    return found


_LOOK = 1.0  # seconds between two looks whether the file is still there


def file_name(rank: int) -> str:
    return f"rank-{rank:05}.jsonl"


class LogFile(_Target):
    """A file to which each line is appended."""

    # It is made again where somebody has removed it; a line that is half-written is ended first.

    def __init__(self, path: Path, *, level: int, complain: Callable[[str], None]) -> None:
        super().__init__(level)
        self.path = path
        self._complain = complain
        self._has_complained = False
        self._descriptor = -1
        self._next_look = 0.0
        # One that may be taken twice: a signal's handler may log while its thread holds it.
        self._lock = threading.RLock()

    def write(self, line: bytes, now: float) -> None:
        try:
            if not self._next_look - _LOOK <= now < self._next_look:
                self._look(now)
            self._append(self._descriptor, line)
        except OSError as error:
            self._failed(error)

    def open(self, now: float) -> None:
        """Open the file before there is something to write; complain where that is not possible."""
        try:
            self._look(now)
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def _look(self, now: float) -> None:
        with self._lock:
            self._next_look = now + _LOOK
            if self._descriptor >= 0 and is_at(self.path, self._descriptor):
                return
            was_open = self._descriptor >= 0
            self.close()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_to_append(self.path)
            size = os.fstat(self._descriptor).st_size
            self._is_torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        if was_open:
            self._say(f"{self.path} was removed; its lines are lost, and it was made again")

    def _failed(self, error: OSError) -> None:
        why = error.strerror or str(error)
        self._say(
            f"the log {self.path} cannot be written ({why}); expected room and permission there; "
            "the run goes on, and each line is tried again"
        )

    def _say(self, text: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._complain(text)


NAME = "ezpz_obs"  # the logger of what we say about ourselves


@dataclass(slots=True)
class Output:
    place: Place
    terminal: Terminal
    file: LogFile | None = None
    level: int = 0  # from which events anybody here is interested
    is_configured: bool = False  # whether `configure_logs` has made it what it is

    def __post_init__(self) -> None:
        level = self.terminal.level
        self.level = level if self.file is None else min(level, self.file.level)

    def become(self, other: Output) -> None:
        """Be what another is: loggers hold this one."""
        self.place, self.terminal, self.file = other.place, other.terminal, other.file
        self.level, self.is_configured = other.level, other.is_configured

    def send(
        self, event: Event, *, to_terminal: bool = True, on_terminal: Event | None = None
    ) -> None:
        now = time.time()
        terminal, file = self.terminal, self.file
        event.redact()
        if on_terminal is not None:
            on_terminal.redact()
        line: str | bytes = b""
        if to_terminal and event.level >= terminal.level:
            line = terminal.render(on_terminal or event, self.place, now)
            terminal.write(line)
        if file is not None and event.level >= file.level:
            if type(line) is str or not line or on_terminal is not None:
                line = json_line(event, self.place, now)
            assert isinstance(line, bytes)
            file.write(line, now)

    def complain(self, text: str) -> None:
        event = Event(logging.WARNING, "warning", NAME, text, {})
        self.terminal.write(self.terminal.render(event, self.place, time.time()))


_process: Output | None = None


def make_output(env: Mapping[str, str], stream: TextIO | None) -> Output:
    place = find_place(env)
    level = get_log_level(env, rank=place.rank)
    return Output(place, Terminal(stream, level=level, as_json=wants_json(env), env=env))


def process_output() -> Output:
    """Return the output of this process, which its loggers share."""
    # Until `configure_logs` it is as the environment says at the moment: launchers' variables may
    # come after the first logger.
    global _process
    if _process is None:
        _process = make_output(os.environ, None)
    elif not _process.is_configured:
        _process.become(make_output(os.environ, None))
    return _process
