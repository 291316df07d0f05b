"""What a launcher is told of how far a run got: the contract of ``EZPZ_PROGRESS_FILE``."""

from __future__ import annotations

import os

_SECONDS = 1.0


class Progress:
    """Writes the highest step to the file that the launcher named, at most once a second.

    ezpz-launch with ``--retries`` starts a run again only while it gets somewhere.
    """

    def __init__(self) -> None:
        self._path = os.environ.get("EZPZ_PROGRESS_FILE")
        self._highest = self._written = -1
        self._next = 0.0

    def report(self, step: int, now: float) -> None:
        """Remember a step, and write it when it is time."""
        self._highest = max(self._highest, step)
        if now >= self._next or self._next > now + _SECONDS:
            self._next = now + _SECONDS
            self._write()

    def close(self) -> None:
        """Write the last one."""
        self._write()

    def _write(self) -> None:
        if not self._path or self._highest <= self._written:
            return
        try:
            # Whole or not at all: beside it, then renamed over it.
            with open(f"{self._path}.new", "w") as file:
                file.write(f"{self._highest}\n")
            os.replace(f"{self._path}.new", self._path)
        except OSError:
            self._path = None  # the launcher has ended, or its folder is gone: nobody reads it
        self._written = self._highest
