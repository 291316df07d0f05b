"""The file of one writer: every line one write, whatever was there before continued."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_obs._context import is_at, open_to_append
from ezpz_obs._errors import HistoryError

from .lines import EVENT, HEADER, LONGEST_LINE, RECORD, decode

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Before:
    """What earlier attempts left in a file."""

    attempts: int = 0
    last_step: int | None = None
    """The highest step of all."""


class LineFile:
    """A file that only grows, one whole line at a time.

    A last line that was torn by a crash is cut off when the file is opened. What has been
    written is in the kernel: the end of the process, of whatever kind, does not lose it; the
    end of the host may, unless ``sync`` is called (fdatasync, about 130 µs on a local disk).

    Raises:
        HistoryError: What is there was not written by a History, or another one is writing it.
        OSError: The folder cannot be made, or the file not opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = open_to_append(path)
        self._torn = 0  # bytes of a line at the end that are still to be cut off
        try:
            _claim(self._fd, path)
            self.before = _survey(self._fd, path)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, line: bytes) -> None:
        """Append a line by one write.

        Raises:
            OSError: It is not in the file; nothing of it is.
        """
        if self._torn:
            self._cut()
        written = os.write(self._fd, line)
        if written != len(line):
            self._torn = written
            self._cut()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _cut(self) -> None:
        """Cut off what a full disk took of a line, so that the next one begins a line."""
        os.ftruncate(self._fd, os.fstat(self._fd).st_size - self._torn)
        self._torn = 0

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        getattr(os, "fdatasync", os.fsync)(self._fd)  # macOS has fsync only

    def is_there(self) -> bool:
        """Say whether the path still leads to this file."""
        return is_at(self.path, self._fd)

    def restore(self) -> None:
        """Make the file anew where somebody removed it, with all that was in it.

        Raises:
            OSError: It cannot be made.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        anew = open_to_append(self.path, anew=True)
        try:
            _claim(anew, self.path)
            os.lseek(self._fd, 0, os.SEEK_SET)
            with open(self._fd, "rb", closefd=False) as old, open(anew, "wb", closefd=False) as new:
                shutil.copyfileobj(old, new, _BLOCK)
        except BaseException:
            os.close(anew)
            raise
        os.close(self._fd)
        self._fd = anew

    def close(self) -> None:
        """Close the file. Harmless twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _claim(fd: int, path: Path) -> None:
    """Refuse a file that another History, of this process or another, is writing.

    Raises:
        HistoryError: One is.
    """
    try:
        import fcntl
    except ImportError:  # no such thing outside POSIX
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HistoryError(
            f"{path} is being written by another History; expected one writer a file: close() the "
            "other, or give each run its own outdir (where every rank is to write: per_rank=True)"
        ) from None
    except OSError:
        return  # a file system without locks: nothing can be known


def _survey(fd: int, path: Path) -> Before:
    """Cut off a torn last line; return how many attempts there were, and how far they got.

    Raises:
        HistoryError: What is there was not written by a History.
    """
    attempts = 0
    last: int | None = None
    refused = f"{path} holds {{!r}}; expected lines that a History wrote: give another outdir"

    def see(line: bytes) -> None:
        nonlocal attempts, last
        if line.startswith(HEADER):
            attempts += 1
        elif line.startswith(RECORD):
            step = _step_of(line)
            last = step if last is None else max(last, step)
        elif not line.startswith(EVENT):
            raise HistoryError(refused.format(line[:40]))

    torn = _each_line(fd, see)
    if torn:
        # A host that crashes leaves zeros where it had no time to write.
        begun = torn.rstrip(b"\0")
        if not any(begun.startswith(kind[: len(begun)]) for kind in (HEADER, RECORD, EVENT)):
            raise HistoryError(refused.format(torn[:40]))
        os.ftruncate(fd, os.fstat(fd).st_size - len(torn))
    return Before(attempts, last)


def _each_line(fd: int, see: Callable[[bytes], Any]) -> bytes:
    """Show every whole line, and return what follows the last newline."""
    rest, place = b"", 0
    while block := os.pread(fd, _BLOCK, place):
        place += len(block)
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        if len(rest) > LONGEST_LINE:
            raise HistoryError(
                f"{rest[:40]!r} is longer than {LONGEST_LINE >> 20} MiB; expected lines that a "
                "History wrote: give another outdir"
            )
        for line in lines:
            see(line)
    return rest


def _step_of(line: bytes) -> int:
    """Return the step of a record's line without reading the rest of it.

    Raises:
        HistoryError: There is none.
    """
    digits = line[len(RECORD) : line.find(b",", len(RECORD))]
    try:
        return int(digits)
    except ValueError:
        step = decode(line)["step"]
    if type(step) is not int:
        raise HistoryError(f"{line[:60]!r}; expected a step that is an integer")
    return step
