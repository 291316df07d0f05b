"""A rank's log file: a line a write, so that a kill loses nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from ezpz_obs._descriptors import is_at, open_to_append

_LOOK = 1.0  # seconds between two looks whether the file is still there


def file_name(rank: int) -> str:
    """Return the name of a rank's log."""
    return f"rank-{rank:05}.jsonl"


class LogFile:
    """A file to which each line is appended by one ``os.write``; one that fails is no error.

    It is made when it is opened, and again where somebody has removed it. A line that an earlier
    process left half-written is ended first.

    Args:
        path: Where; its folder is made too.
        level: From which events are written.
        complain: Told what is wrong, once.
    """

    def __init__(self, path: Path, *, level: int, complain: Callable[[str], None]) -> None:
        self.path = path
        self.level = level
        self.lost: int = 0
        """How many lines it did not take since the last that it took."""
        self.trouble: Exception | None = None
        """Why the latest was not taken."""
        self._complain = complain
        self._has_complained = False
        self._descriptor = -1
        self._is_torn = False
        self._next_look = 0.0
        # One that may be taken twice: a signal's handler may log while its thread holds it.
        self._lock = threading.RLock()

    def write(self, line: bytes, now: float) -> bool:
        """Append a line; return whether it was taken.

        Args:
            line: With its newline.
            now: Seconds since 1970.
        """
        try:
            if not self._next_look - _LOOK <= now < self._next_look:
                self._look(now)
            if self._is_torn:
                line = b"\n" + line
            written = os.write(self._descriptor, line)
            self._is_torn = written < len(line)
            while written < len(line):  # the disk is nearly full
                written += os.write(self._descriptor, line[written:])
            self._is_torn = False
        except OSError as error:
            self._failed(error)
            return False
        return True

    def open(self, now: float) -> None:
        """Open the file before there is something to write; complain where that is not possible."""
        try:
            self._look(now)
        except OSError as error:
            self._failed(error)
            self.lost = 0

    def close(self) -> None:
        """Close the file. Harmless twice."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def _look(self, now: float) -> None:
        """Open the file where it is not open, or no longer the one at its path."""
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
            self._say(f"{self.path} was removed; its lines are lost, and it was made anew")

    def _failed(self, error: OSError) -> None:
        self.lost += 1
        self.trouble = error
        why = error.strerror or str(error)
        self._say(
            f"the log {self.path} cannot be written ({why}); expected room and permission there; "
            "the run goes on, and each line is tried again"
        )

    def _say(self, text: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._complain(text)
