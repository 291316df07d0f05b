"""The file of a `History`: every line is one write, which training never fails for."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from ._context import open_to_append
from ._errors import HistoryError
from ._records import EVENT, FILE_NAME, HEADER, LONGEST_LINE, RECORD, decode

logger = logging.getLogger("ezpz_obs")
FINISHED: Final = ("closed", "exit")  # causes of an end that is no failure
_BLOCK: Final = 1 << 20
_END: Final = 1 << 16  # bytes at the end of a file that hold its last line: an end is short
_PROCESS_BEGAN: Final = time.time()  # nearly


@dataclass(frozen=True)
class PreviousContent:
    """What the file held when it was opened."""

    attempts: int = 0
    last_step: int | None = None  # the highest step of all

    @property
    def next_step(self) -> int:
        if self.last_step is None:
            return 0
        return self.last_step + 1


class Writer:
    """Appends lines to a run's file, under a lock.

    A last line that was torn by a crash is cut off when the file is opened. A written line is in
    the kernel: the end of the process does not lose it, the end of the host may. If a write fails
    one warning names the file, and each next line is tried again.

    Raises:
        HistoryError: The file is another's, or another History is writing it.
        OSError: It cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_warned = False
        self._missing = 0  # lines that are not in the file
        self._torn = 0  # bytes of a line at the end that are still to be cut off
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = open_to_append(path)
        try:
            _lock(self._descriptor, path)
            self.before = _read_previous_content(self._descriptor, path)
        except BaseException:  # also Ctrl-C; raised again
            os.close(self._descriptor)
            raise

    def write(self, line: bytes) -> None:
        """Write one line, with its newline."""
        try:
            self._cut_torn_line()
            written = os.write(self._descriptor, line)
            if written != len(line):
                self._torn = written
                self._cut_torn_line()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError as error:
            self._missing += 1
            self._warn(error)

    def close(self) -> None:
        """Close the file; warn of lines that are missing in it."""
        if self._missing:
            logger.warning("%d lines are missing in %s", self._missing, self.path)
        self.abandon()

    def abandon(self) -> None:
        """Close the file without a word: in a forked process it is the parent's."""
        self._missing = 0
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _cut_torn_line(self) -> None:
        if self._torn:
            size = os.fstat(self._descriptor).st_size
            os.ftruncate(self._descriptor, size - self._torn)
            self._torn = 0

    def _warn(self, error: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "metrics cannot be written to %s (%s); expected room and permission there: training "
            "goes on, and so do the attempts to write",
            self.path, error.strerror or error,
        )  # fmt: skip


def _lock(descriptor: int, path: Path) -> None:
    """Refuse a file that another History, of this process or another, is writing."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HistoryError(
            f"{path} is being written by another History; expected one writer a file: close() the "
            "other, or give each run its own outdir"
        ) from None
    except OSError:
        return  # a file system without locks: nothing can be known


_STEP_OF_RECORD = re.compile(rb'\{"step": ?(-?\d+), ?"time"').match


def _read_previous_content(descriptor: int, path: Path) -> PreviousContent:
    """Cut off a torn last line; return how many attempts there were, and how far they got."""
    attempts = 0
    last_step: int | None = None
    damaged: list[bytes] = []  # how each damaged line begins
    rest = b""
    place = 0
    while block := os.pread(descriptor, _BLOCK, place):
        place += len(block)
        *lines, rest = (rest + block).split(b"\n")
        if len(rest) > LONGEST_LINE:
            raise HistoryError(
                f"{rest[:40]!r} is longer than {LONGEST_LINE >> 20} MiB; expected lines that a "
                "History wrote: give another outdir"
            )
        for line in lines:
            record = _STEP_OF_RECORD(line)
            if record:
                step = int(record[1])
                if last_step is None or step > last_step:
                    last_step = step
            elif line.startswith(HEADER):
                attempts += 1
            elif not line.startswith(EVENT):
                damaged.append(line[:40])
    before = PreviousContent(attempts, last_step)
    _check_lines(path, before, damaged, rest)
    if rest:
        os.ftruncate(descriptor, place - len(rest))
    return before


def _check_lines(path: Path, before: PreviousContent, damaged: list[bytes], rest: bytes) -> None:
    """Refuse a file that is not ours; warn of damaged lines in one that is."""
    if before == PreviousContent() and (damaged or not _is_torn_line(rest)):
        raise HistoryError(
            f"{path} holds {(damaged or [rest[:40]])[0]!r}; expected lines that a History wrote: "
            "give another outdir"
        )
    if damaged:
        logger.warning(
            "%s: damaged lines stay as they are, and readers leave them out: %d, the first %r",
            path, len(damaged), damaged[0],
        )  # fmt: skip


def _is_torn_line(rest: bytes) -> bool:
    """Return whether the end of a file may be the beginning of a line of ours."""
    begun = rest.rstrip(b"\0")  # a host that crashes leaves zeros where it had no time to write
    return any(begun.startswith(kind[: len(begun)]) for kind in (HEADER, RECORD, EVENT))


def find_launch_id() -> str | None:
    """Return the launch that this process is of, without the number of its attempt."""
    return os.environ.get("EZPZ_LAUNCH_ID", "").rpartition(".")[0] or None


def find_folder(outdir: Path, *, resume: bool) -> Path:
    """Return the folder, or the first one beside it without a run that another launch finished."""
    if resume or not _is_from_other_launch(_read_last_line(outdir / FILE_NAME)):
        return outdir
    for number in count(2):
        folder = outdir.with_name(f"{outdir.name}-{number}")
        if not _is_from_other_launch(_read_last_line(folder / FILE_NAME)):
            break
    logger.warning(
        "%s has a finished run; this one is in %s (resume=True continues the former)",
        outdir, folder.name,
    )  # fmt: skip
    return folder


def _is_from_other_launch(end: Mapping[str, Any]) -> bool:
    """Return whether a file's last line is the end of a run that another launch has finished."""
    if end.get("event") != "end" or end.get("message") not in FINISHED:
        return False
    own = find_launch_id()
    other = end.get("launch")
    if own and other:
        return bool(own != other)
    # Without ids: an end before this process started is another's.
    return (end.get("time") or 0) < _PROCESS_BEGAN


def _read_last_line(path: Path) -> dict[str, Any]:
    """Return the last line of a file; {} if it is missing or torn."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END))
            *_, line, rest = file.read().split(b"\n")
        if rest:
            return {}
        return decode(line)
    except (OSError, ValueError, HistoryError):  # the writer reports it
        return {}
