"""The launcher's output, on its way to ours: every byte, as it comes.

Threads do the copying: a terminal that is stopped, or a reader that is slow, must not keep the
run loop from hearing a signal.
"""

from __future__ import annotations

import errno
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from ._reports import Report, Reports

_CHUNK = 1 << 16
_TAIL = 1 << 13


class Output:
    """Copies two pipes to our standard output and error.

    Args:
        reports: What takes the ranks' reports out of the second.
        wake: Called, from another thread, when there is something to look at.

    Attributes:
        last: When something came last, by ``time.monotonic``.
        nobody_reads: Whether our own standard output is a pipe that nobody reads any more.
        tail: The last bytes of standard error.
    """

    def __init__(self, reports: Reports, wake: Callable[[], None]) -> None:
        self.last = time.monotonic()
        self.nobody_reads = False
        self.tail = b""
        self._reports = reports
        # Appended to by one thread, and taken from by another: deque's own are atomic.
        self._found: deque[Report] = deque()
        self._wake = wake
        self._threads: list[threading.Thread] = []
        self._writing = 0
        self._complained = False
        self._line_is_open = False

    def copy(self, stdout: int, stderr: int) -> None:
        """Start to copy from these pipes, and close them at their end."""
        for source, target in ((stdout, 1), (stderr, 2)):
            thread = threading.Thread(target=self._pump, args=(source, target), daemon=True)
            thread.start()
            self._threads.append(thread)

    def take_reports(self) -> list[Report]:
        """Return what has been reported since the last call, in order."""
        found = []
        while self._found:
            found.append(self._found.popleft())
        return found

    def drain(self, patience: float, is_told: Callable[[], object]) -> None:
        """Wait for the pipes' ends; no longer than this without a byte, if nothing is stuck.

        What a rank left running in the background may hold them open for ever.

        Args:
            patience: Seconds.
            is_told: Says when to give up at once.
        """
        since = time.monotonic()
        while any(thread.is_alive() for thread in self._threads) and not is_told():
            if not self._writing and time.monotonic() - max(self.last, since) > patience:
                break
            self._threads[0 if self._threads[0].is_alive() else 1].join(0.02)

    def say(self, message: str) -> None:
        """Write a line of ours to standard error, on a line of its own."""
        newline = "\n" if self._line_is_open else ""
        self._write(2, f"{newline}ezpz-launch: {message}\n".encode(errors="backslashreplace"))

    def _pump(self, source: int, target: int) -> None:
        while True:
            try:
                chunk = os.read(source, _CHUNK)
            except OSError:
                break  # closed under us: the run is over
            if not chunk:
                break
            self.last = time.monotonic()
            if target == 2:
                chunk = self._sift(chunk)
            self._write(target, chunk)
        if target == 2:
            self._write(target, self._reports.rest())
        os.close(source)
        self._wake()

    def _sift(self, chunk: bytes) -> bytes:
        chunk, found = self._reports.feed(chunk)
        self.tail = (self.tail + chunk)[-_TAIL:]
        if found:
            self._found.extend(found)
            self._wake()
        return chunk

    def _write(self, target: int, data: bytes) -> None:
        if not data:
            return
        if os.isatty(target) or target == 2:
            self._line_is_open = not data.endswith(b"\n")
        self._writing += 1
        try:
            while data:
                try:
                    data = data[os.write(target, data) :]
                except BlockingIOError:
                    # Whoever shares the terminal with us made it so.
                    select.select([], [target], [])
        except OSError as error:
            self._cannot_write(target, error)
        finally:
            self._writing -= 1

    def _cannot_write(self, target: int, error: OSError) -> None:
        """Go on without: training is worth more than its output; but `| head` ends a program."""
        if error.errno == errno.EPIPE and target == 1:
            self.nobody_reads = True
            self._wake()
        elif not self._complained and target == 1 and error.errno != errno.EIO:
            self._complained = True
            print(f"ezpz-launch: cannot write the output: {error.strerror}", file=sys.stderr)
