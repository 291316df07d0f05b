"""Output of the launcher, on its way to the terminal, and the ranks' reports in it."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from _queue import SimpleQueue
from collections.abc import Callable
from typing import IO

from ezpz_launch._run.rank_main import write

# What rank_main.py reports, told apart from what the ranks themselves write.

Report = tuple[str, int, int]  # what happened, to which rank, with what value

_KINDS = {b"s": "start", b"e": "end", b"c": "cause", b"t": "taken"}
"""What happened, by the letter of rank_main.py: each of 120,960 ranks sends it four times."""

MAX_REPORT_BYTES = 160
"""Of a report: what is longer and has no end is none."""


class Reports:
    """Take the reports of one launch out of a stream of bytes."""

    def __init__(self, launch_id: str) -> None:
        # The chance at its end, and the attempt: as much as tells one launch in another.
        self._start = b"\x1e" + launch_id.rpartition("-")[2].encode() + b" "
        # A damaged one has a piece of another rank within, whose bytes are not ours to drop; where
        # it was cut, no end is in sight. Its second copy is whole.
        words, others = (
            rb"([sect]) (\d{1,12}) (\d{1,12})",
            rb"([^\x1e\x1f]{0,%d})" % MAX_REPORT_BYTES,
        )
        whole = words + rb"\|\1 \2 \3"
        self._report = re.compile(
            re.escape(self._start) + rb"(?:(?:%s|%s)\x1f\n?)?" % (whole, others)
        )
        self._held = b""
        self._newline_follows = False

    def feed(self, chunk: bytes) -> tuple[bytes, list[Report]]:
        """Return the bytes that the ranks wrote, and what was reported between them."""
        if self._newline_follows and chunk:
            self._newline_follows = False
            chunk = chunk.removeprefix(b"\n")
        data, found = self._held + chunk, list[Report]()
        before, separator, last = data.rpartition(b"\x1e")
        self._held = separator + last
        if self._may_go_on(self._held):
            data = before
        else:
            self._held = b""

        def take(match: re.Match[bytes]) -> bytes:
            what, rank, value, others = match.groups()
            if what:
                found.append((_KINDS[what], int(rank), int(value)))
            is_last = match.end() == len(data) and not self._held
            self._newline_follows = is_last and match[0].endswith(b"\x1f")
            return others or b""

        return self._report.sub(take, data), found

    def rest(self) -> bytes:
        """Return what was held back and, at the end of the stream, is no report."""
        held, self._held = self._held, b""
        return b"" if held.startswith(self._start) else held

    def _may_go_on(self, data: bytes) -> bool:
        """Return whether it may be the beginning of a report."""
        if not data.startswith(self._start):
            return self._start.startswith(data)
        return b"\x1f" not in data and len(data) < MAX_REPORT_BYTES


# The launcher's output, on its way to ours: every byte, as it comes.

CHUNK = 1 << 16
"""Bytes read at once."""

TAIL_BYTES = 1 << 13
"""Bytes of standard error that are kept, to see why a rank failed."""

LEFTOVER_OUTPUT_SECONDS = 2.0
"""For which what an ended launcher's ranks left behind may go on writing."""

READER_SECONDS = 1.0
"""That a reader who takes nothing has left when a signal ends us."""

_TICK = 0.02

_HYDRA_LAST_WORDS = re.compile(
    rb"\n?(={50}(={33}\n|\Z)|YOUR APPLICATION TERMINATED WITH|\[(mpiexec|proxy:[\d:]+)@\S+\] )"
)
"""How Hydra begins its last words, in pieces: of ranks that died of a signal, or of proxies that
it does not reach (MPICH 5.0.2)."""


class Output:
    """Copies two pipes to our standard output and error, and writes our own lines between."""

    def __init__(self, launch_id: str, wake: Callable[[], None]) -> None:
        """``wake`` is called, by another thread, when a report has arrived or nobody reads."""
        self.last = time.monotonic()  # when something came last
        self.nobody_reads = False  # whether our standard output is a pipe without a reader
        self.is_quiet = False  # whether we end the launcher: its words on that are left out
        self.tail = b""  # the last bytes of standard error
        self.is_a_terminal = os.isatty(1)
        self._wake = wake
        self._reports = {1: Reports(launch_id), 2: Reports(launch_id)}
        self._found: SimpleQueue[Report] = SimpleQueue()
        self._copiers: list[threading.Thread] = []
        self._messages: SimpleQueue[str] = SimpleQueue()
        self._logger: threading.Thread | None = None
        self._unwritten_messages = 0
        self._waited_for_reader = 0.0
        self._writing: set[int] = set()  # the threads that write just now, or wait to
        # Held while standard error is written to, and a terminal that is both streams: so that
        # nothing comes between looking whether a line is open and our own line.
        self._lock = threading.Lock()
        self._is_both = self.is_a_terminal and os.isatty(2)
        self._line_is_open = False
        self._has_complained = False
        self._quieted: set[int] = set()  # streams whose last words are left out

    def start_copying(self, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Start to copy the launcher's streams to ours."""
        for source, target in ((stdout, 1), (stderr, 2)):
            thread = threading.Thread(target=self._copy_stream, args=(source, target), daemon=True)
            thread.start()
            self._copiers.append(thread)

    def drain_reports(self) -> list[Report]:
        """Return the reports that have arrived since the last call."""
        return [self._found.get() for _ in range(self._found.qsize())]

    def log(self, message: str) -> None:
        """Write a line of ours to standard error, on a line of its own; nobody waits for it."""
        if self._logger is None:
            self._logger = threading.Thread(target=self._write_messages, daemon=True)
            self._logger.start()
        self._unwritten_messages += 1
        self._messages.put(message)

    @property
    def is_writing(self) -> bool:
        return bool(self._writing)

    def wait_for_pipes(self, seconds: float, is_stopping: Callable[[], object]) -> None:
        """Wait for the ends of an ended launcher's pipes, or so many seconds without a byte."""
        start = time.monotonic()
        waited = 0.0  # without our own writing
        while any(thread.is_alive() for thread in self._copiers):
            alive = next(thread for thread in self._copiers if thread.is_alive())
            alive.join(_TICK)
            if is_stopping():
                self._waited_for_reader += _TICK
            if not self.is_writing:
                waited += _TICK
            is_silent = time.monotonic() - max(self.last, start) > seconds and waited > seconds
            is_late = waited > LEFTOVER_OUTPUT_SECONDS
            if is_silent or is_late or self._waited_for_reader > READER_SECONDS:
                return

    def close(self, is_stopping: Callable[[], object]) -> None:
        """Wait until our own lines are written."""
        while self._unwritten_messages and self._waited_for_reader <= READER_SECONDS:
            time.sleep(_TICK / 10)
            if is_stopping():
                self._waited_for_reader += _TICK / 10

    def _write_messages(self) -> None:
        while True:
            message = self._messages.get()
            line = f"ezpz-launch: {message}\n".encode(errors="backslashreplace")
            self._write(2, line, on_new_line=True)
            self._unwritten_messages -= 1

    def _copy_stream(self, source: IO[bytes], target: int) -> None:
        while chunk := os.read(source.fileno(), CHUNK):
            self.last = time.monotonic()
            self._write(target, self._filter(target, chunk))
            self.last = time.monotonic()
        self._write(target, self._reports[target].rest())
        source.close()
        self._wake()

    def _filter(self, target: int, chunk: bytes) -> bytes:
        """Take reports out, and a launcher's words on an end that is our own doing."""
        # On standard output, too: some launchers can be told to merge the two.
        chunk, found = self._reports[target].feed(chunk)
        if target in self._quieted:
            chunk = b""
        elif self.is_quiet:
            last_words = _HYDRA_LAST_WORDS.search(chunk)
            if last_words:
                self._quieted.add(target)
                chunk = chunk[: last_words.start()]
        if target == 2:
            self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        for report in found:
            self._found.put(report)
        if found:
            self._wake()
        return chunk

    def _write(self, target: int, data: bytes, *, on_new_line: bool = False) -> None:
        if not data:
            return
        self._writing.add(threading.get_ident())
        try:
            if target != 2 and not self._is_both:
                write(target, data)
                return
            with self._lock:
                if on_new_line and self._line_is_open:
                    data = b"\n" + data
                self._line_is_open = not data.endswith(b"\n")
                write(target, data)
        except OSError as error:
            # Go on without: training is worth more than its output; but `| head` ends a program.
            if error.errno == errno.EPIPE and target == 1:
                self.nobody_reads = True
                self._wake()
            elif not self._has_complained and target == 1 and error.errno != errno.EIO:
                self._has_complained = True
                self.log(f"cannot write the output: {error.strerror}")
        finally:
            self._writing.discard(threading.get_ident())
