"""The stream where people read: standard error, or one that was given."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO

from ezpz_obs._context import Place

from .lines import Console, Event, json_line


class Terminal:
    """A stream to which each line goes in one write; one that fails is no error.

    Args:
        stream: None: standard error as it is at each line, since tests and notebooks replace it;
            a process without one (``2>&-``, pythonw) says nothing.
        level: From which events are shown.
        as_json: JSON lines instead of text.
        env: Read for ``NO_COLOR`` and ``TERM``.
    """

    def __init__(
        self, stream: TextIO | None, *, level: int, as_json: bool, env: Mapping[str, str]
    ) -> None:
        self.level = level
        self.as_json = as_json
        self.lost: int = 0
        """How many lines it did not take since the last that it took."""
        self.trouble: Exception | None = None
        """Why the latest was not taken."""
        self._given = stream
        self._no_colours = bool(env.get("NO_COLOR")) or env.get("TERM") == "dumb"
        self._seen: TextIO | None = None
        self._is_tty = False
        self._is_torn = False
        self._console = Console(colours=False)

    def stream(self) -> TextIO | None:
        """Return where lines go at the moment."""
        return self._given if self._given is not None else sys.stderr

    def is_tty(self) -> bool:
        """Say whether a person is looking."""
        self._look(self.stream())
        return self._is_tty

    def render(self, event: Event, place: Place, now: float) -> str | bytes:
        """Return the event as this terminal shows it."""
        if self.as_json:
            return json_line(event, place, now)
        self._look(self.stream())
        return self._console.line(event, place, now)

    def write(self, line: str | bytes) -> bool:
        """Write a line; return whether it was taken."""
        stream = self.stream()
        if stream is None:
            return True  # nobody wants to know
        self._look(stream)
        try:
            if self._is_tty:
                with _without_bars(stream):
                    self._write(stream, line)
            else:
                self._write(stream, line)
        # A full disk, a reader that has gone, a stream that is closed or somebody's own object
        # that raises anything: logging must not end a training. Tried again at the next line.
        except Exception as error:  # noqa: BLE001
            self.lost += 1
            self.trouble = error
            return False
        return True

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
        if self._is_torn:
            line = b"\n" + line
        # Past Python's buffer: what cannot be written is not tried again at exit, which would
        # change the exit status to 120; and ranks that share the stream do not mix their lines.
        written = os.write(descriptor, line)
        while written < len(line):
            self._is_torn = True
            written += os.write(descriptor, line[written:])
        self._is_torn = False

    def _look(self, stream: TextIO | None) -> None:
        """See what kind of stream this is, once for each."""
        if stream is self._seen:
            return
        self._seen = stream
        try:
            self._is_tty = stream is not None and stream.isatty()
        except (OSError, ValueError, AttributeError):  # closed, or hardly a stream
            self._is_tty = False
        self._console = Console(colours=self._is_tty and not self._no_colours)


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
