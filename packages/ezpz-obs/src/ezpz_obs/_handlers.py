"""Where lines go: handlers of the standard library for the terminal and for a log file."""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, TextIO

from ._context import open_to_append


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Writes to standard error as it is at each line: tests and notebooks replace it."""

    def __init__(
        self, plain: logging.Formatter, colored: logging.Formatter, env: Mapping[str, str]
    ) -> None:
        logging.Handler.__init__(self)
        self._plain = plain
        self._colored = colored
        self._allows_colors = not env.get("NO_COLOR") and env.get("TERM") != "dumb"
        self.failed = False  # whether the latest line was not taken
        self._checked: TextIO | None = None  # the stream that was looked at last
        self._is_terminal = False

    @property
    def stream(self) -> TextIO | None:  # type: ignore[override]  # StreamHandler keeps one
        return sys.stderr

    def format(self, record: logging.LogRecord) -> str:
        if self._allows_colors and self._is_terminal:
            return self._colored.format(record)
        return self._plain.format(record)

    def emit(self, record: logging.LogRecord) -> None:
        stream = self.stream
        if stream is None or _is_shown_by_other_handler(record, stream):
            return
        if stream is not self._checked:
            self._is_terminal = is_terminal(stream)
            self._checked = stream
        self.failed = False
        try:
            line = self.format(record) + self.terminator
            with _hide_bars(stream) if self._is_terminal else nullcontext():
                _write_past_buffer(stream, line)
        except Exception:  # noqa: BLE001 - a formatter or a user's stream may raise anything
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignore a full disk or a closed pipe: they must not end a training."""
        self.failed = True
        if not isinstance(sys.exc_info()[1], OSError | ValueError):  # ValueError: it is closed
            super().handleError(record)


class LogFileHandler(WatchedFileHandler):
    """Appends to a file; one warning names it where that is not possible."""

    def __init__(self, path: Path, terminal: logging.Handler) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path)
        self._terminal = terminal
        self._has_warned = False

    def _open(self) -> Any:
        return open(open_to_append(Path(self.baseFilename)), "a", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the folder was removed
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Warn once of a file that cannot be written; each line is tried again."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_warned:
            self._has_warned = True
            warn_of_file(self._terminal, self.baseFilename, error)

    def close(self) -> None:
        with suppress(OSError):  # what could not be written still cannot
            super().close()


def warn_of_file(terminal: logging.Handler, path: object, error: object) -> None:
    """Write on the terminal that a log cannot be written."""
    reason = getattr(error, "strerror", None) or error
    text = (
        f"the log {path} cannot be written ({reason}); expected room and permission there; the "
        "run goes on, and each line is tried again"
    )
    terminal.handle(logging.LogRecord("ezpz_obs", logging.WARNING, "", 0, text, (), None))


class ForeignHandler(logging.Handler):
    """Hands records of the standard library's loggers to ours."""

    def __init__(self, handlers: list[logging.Handler]) -> None:
        super().__init__()
        self._handlers = handlers

    def emit(self, record: logging.LogRecord) -> None:
        for handler in self._handlers:
            if record.levelno >= handler.level:
                handler.handle(record)


def iterate_user_handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """Yield the handlers that somebody has put on a logger or above it."""
    current: logging.Logger | None = logger
    while current is not None:
        for handler in current.handlers:
            if not isinstance(handler, ForeignHandler):
                yield handler
        current = current.parent if current.propagate else None


def writes_to(handler: logging.Handler, stream: TextIO | None) -> bool:
    """Return whether a handler writes to this very stream."""
    return stream is not None and getattr(handler, "stream", None) is stream


def _is_shown_by_other_handler(record: logging.LogRecord, stream: TextIO) -> bool:
    if isinstance(record.msg, dict):  # an event of ours
        return False
    for handler in iterate_user_handlers(logging.getLogger(record.name)):
        if record.levelno >= handler.level and writes_to(handler, stream):
            return True
    return False


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a person sees this stream: on a terminal, or through ezpz-launch."""
    try:
        if stream is None:
            return False
        if stream.isatty():
            return True
        is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        return bool(os.environ.get("EZPZ_TERMINAL")) and not is_file
    except (OSError, ValueError, AttributeError):  # closed, or hardly a stream
        return False


def _write_past_buffer(stream: TextIO, line: str) -> None:
    """Write a line at once, so that lines of ranks that share the stream stay whole."""
    # A replacement of sys.stderr may have no encoding.
    encoding = getattr(stream, "encoding", None) or "utf-8"
    encoded = line.encode(encoding, "backslashreplace")
    descriptor = _find_descriptor(stream)
    if descriptor is None:
        stream.write(encoded.decode(encoding))
        stream.flush()
        return
    stream.flush()  # what the script has printed comes first
    # What Python's buffer cannot write it tries again at exit, which makes the exit status 120.
    while encoded:
        written = os.write(descriptor, encoded)
        encoded = encoded[written:]


def _find_descriptor(stream: TextIO) -> int | None:
    """Return the descriptor of standard error; None if the stream only replaces it."""
    if stream is not sys.__stderr__:
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError):  # closed
        return None


def _hide_bars(stream: TextIO) -> AbstractContextManager[Any]:
    """Take tqdm's bars, ours and the script's own, off the terminal for the while."""
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if not getattr(tqdm, "_instances", None):
        return nullcontext()
    mode: AbstractContextManager[Any] = tqdm.external_write_mode(file=stream)
    return mode
