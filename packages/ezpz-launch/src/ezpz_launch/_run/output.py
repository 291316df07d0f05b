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

# What the ranks' shims report, told apart from what the ranks themselves write.

Report = tuple[str, int, int]  # what happened, to which rank, with what value

_WORDS = {b"s": "start", b"e": "end", b"c": "cause", b"t": "taken"}
"""What happened, by the letter that a shim says: each of 120,960 ranks says it four times."""

_LONGEST = 160  # bytes of the longest report: what is longer and not ended is none


class Reports:
    """Take the reports of one launch out of a stream of bytes."""

    def __init__(self, launch_id: str) -> None:
        # The chance at its end, and the attempt: as much as tells one launch in another.
        self._start = b"\x1e" + launch_id.rpartition("-")[2].encode() + b" "
        # A damaged one has a piece of another rank within, whose bytes are not ours to drop; where
        # it was cut, no end is in sight. Its second copy is whole.
        words, others = rb"([sect]) (\d{1,12}) (\d{1,12})", rb"([^\x1e\x1f]{0,%d})" % _LONGEST
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
                found.append((_WORDS[what], int(rank), int(value)))
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
        return b"\x1f" not in data and len(data) < _LONGEST


# The launcher's output, on its way to ours: every byte, as it comes.

_CHUNK = 1 << 16
_TAIL = 1 << 13
_TICK = 0.02

_OF_THE_END = re.compile(
    rb"\n?(={50}(={33}\n|\Z)|YOUR APPLICATION TERMINATED WITH|\[(mpiexec|proxy:[\d:]+)@\S+\] )"
)
"""How Hydra begins its last words, in pieces: of ranks that died of a signal, or of proxies that
it does not reach (MPICH 5.0.2)."""

_LEFT_BEHIND = 2.0  # seconds for which what an ended launcher's ranks left behind may go on writing
_TOLD = 1.0  # seconds that a reader has who takes nothing, when we are told to end


class Output:
    """Copies two pipes to our standard output and error, and says what we have to say."""

    def __init__(self, launch_id: str, wake: Callable[[], None]) -> None:
        self.last = time.monotonic()  # when something came last
        self.nobody_reads = False  # whether our standard output is a pipe without a reader
        self.hushes = False  # whether we end the launcher: its words on that are left out
        self.tail = b""  # the last bytes of standard error
        self._reports = {1: Reports(launch_id), 2: Reports(launch_id)}
        self._found: SimpleQueue[Report] = SimpleQueue()
        self._wake = wake
        self._threads: list[threading.Thread] = []
        self._messages: SimpleQueue[str] = SimpleQueue()
        self._speaker: threading.Thread | None = None
        self._unsaid = 0
        self._waited_when_told = 0.0
        self._writing = set[int]()  # the threads that write just now, or wait to
        # Then our own lines appear below what it shows.
        self.is_a_terminal = os.isatty(1)
        # Held while standard error is written to, and a terminal that is both streams: so that
        # nothing comes between looking whether a line is open and our own line.
        self._lock = threading.Lock()
        self._is_both = self.is_a_terminal and os.isatty(2)
        self._complained = self._line_is_open = False
        self._hushed: set[int] = set()

    def copy(self, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        for source, target in ((stdout, 1), (stderr, 2)):
            thread = threading.Thread(target=self._pump, args=(source, target), daemon=True)
            thread.start()
            self._threads.append(thread)

    def take_reports(self) -> list[Report]:
        return [self._found.get() for _ in range(self._found.qsize())]

    def say(self, message: str) -> None:
        """Write a line of ours to standard error, on a line of its own."""
        if self._speaker is None:
            self._speaker = threading.Thread(target=self._speak, daemon=True)
            self._speaker.start()
        self._unsaid += 1
        self._messages.put(message)

    @property
    def is_writing(self) -> bool:
        return bool(self._writing)

    def drain(self, patience: float, is_told: Callable[[], object]) -> None:
        """Wait for the ends of an ended launcher's pipes, or PATIENCE seconds without a byte."""
        began, free = time.monotonic(), 0.0
        while any(thread.is_alive() for thread in self._threads):
            self._threads[0 if self._threads[0].is_alive() else 1].join(_TICK)
            self._waited_when_told += _TICK if is_told() else 0.0
            free += 0.0 if self.is_writing else _TICK
            silent = time.monotonic() - max(self.last, began) > patience and free > patience
            if silent or free > _LEFT_BEHIND or self._waited_when_told > _TOLD:
                return

    def close(self, is_told: Callable[[], object]) -> None:
        while self._unsaid and self._waited_when_told <= _TOLD:
            time.sleep(_TICK / 10)
            self._waited_when_told += _TICK / 10 if is_told() else 0.0

    def _speak(self) -> None:
        while True:
            message = self._messages.get()
            line = f"ezpz-launch: {message}\n".encode(errors="backslashreplace")
            self._write(2, line, on_new_line=True)
            self._unsaid -= 1

    def _pump(self, source: IO[bytes], target: int) -> None:
        while chunk := os.read(source.fileno(), _CHUNK):
            self.last = time.monotonic()
            self._write(target, self._sift(target, chunk))
            self.last = time.monotonic()
        self._write(target, self._reports[target].rest())
        source.close()
        self._wake()

    def _sift(self, target: int, chunk: bytes) -> bytes:
        # On standard output, too: some launchers can be told to merge the two.
        chunk, found = self._reports[target].feed(chunk)
        if target in self._hushed:
            chunk = b""
        elif self.hushes and (last := _OF_THE_END.search(chunk)):
            self._hushed.add(target)
            chunk = chunk[: last.start()]
        if target == 2:
            self.tail = (self.tail + chunk)[-_TAIL:]
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
            elif not self._complained and target == 1 and error.errno != errno.EIO:
                self._complained = True
                self.say(f"cannot write the output: {error.strerror}")
        finally:
            self._writing.discard(threading.get_ident())
