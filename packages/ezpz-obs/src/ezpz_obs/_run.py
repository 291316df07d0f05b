"""A run on disk: its attempts, records and events, read as they are needed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from ezpz_topo import redact

from ._errors import HistoryError
from ._records import (
    EVENT,
    FILE_NAME,
    HEADER,
    LONGEST_LINE,
    RECORD,
    SCHEMA,
    as_float,
    decode,
    is_record,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger("ezpz_obs")
_BUFFER: Final = 1 << 20
_LINES: Final = 1024  # that are decoded together: half the time of one by one
_NUMBERS: Final = 1 << 20  # of a block at most: of 10,000 metrics 16,384 rows are 5 GB
_POLL_SECONDS: Final = 0.2  # shared file systems do not notify of changes


@dataclass(frozen=True)
class RecordBlock:
    """Consecutive records of the same metrics, as arrays."""

    names: tuple[str, ...]
    steps: NDArray[np.int64]
    times: NDArray[np.float64]  # seconds since 1970, one a record
    values: NDArray[np.float64]
    """(records, names); integers beyond 2^53 are rounded here, beyond 1.8e308 infinite."""


@dataclass(frozen=True)
class _Attempt:
    """Where an attempt begins in the file, and the step from which a later one took over."""

    first_line: int
    end_step: float


class Run:
    """A run's file. Nothing is read before it is needed, and records never all at once.

    A damaged line (cut, overwritten by a file system, of another program) is left out, and a
    warning counts them.

    Attributes:
        path: The JSONL file.
        damaged: Why each damaged line was left out, by its number; of the lines read so far, which
            is all of them after `records`.
    """

    def __init__(self, path: Path, *, warn: bool = True) -> None:
        self.path = path
        self.damaged: dict[int, str] = {}
        self._warn = warn
        self._warned = 0  # of how many lines

    @property
    def name(self) -> str:
        """The name in its first header, which is its folder's; else the folder's now."""
        named = (self.headers or [{}])[0].get("run")
        return str(named or self.path.resolve().parent.name)

    @property
    def headers(self) -> list[dict[str, Any]]:
        """What each attempt wrote first; one more after each restart."""
        return self._overview[0]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Warnings, ends and the user's own, in the order they were written."""
        return self._overview[1]

    def records(self) -> Iterator[dict[str, Any]]:
        """Read the records one by one: ``{"step", "time", **metrics}``.

        A restarted run replays the steps since its last checkpoint. The later attempt wins:
        of an earlier one, the steps that a later one repeats are left out.

        Raises:
            HistoryError: No line is a History's, or one is longer than 64 MiB.
        """
        attempts = list(self._overview[2])
        current = attempts.pop(0)
        waiting: list[tuple[int, bytes]] = []
        for number, line in _read_lines(self.path):
            is_next_attempt = bool(attempts) and number == attempts[0].first_line
            if is_next_attempt or len(waiting) == _LINES:
                yield from self._decode_records(waiting, current.end_step)
                waiting = []
            if is_next_attempt:
                current = attempts.pop(0)
            if line.startswith(RECORD):
                waiting.append((number, line))
        yield from self._decode_records(waiting, current.end_step)
        self.warn_of_damage()

    def blocks(self, rows: int = 16_384) -> Iterator[RecordBlock]:
        """Read the records as arrays of at most ``rows`` rows; fewer of many metrics.

        Raises:
            HistoryError: As for `records`.
        """
        return to_blocks(self.records(), rows)

    def warn_of_damage(self) -> None:
        """Log how many lines are damaged, and the first; of the same ones once."""
        count = len(self.damaged)
        if self._warn and count > self._warned:
            number, reason = min(self.damaged.items())
            logger.warning(
                "%s: %s (line %d: %s)", self.path, describe_damage(count), number, reason
            )
            self._warned = count

    def refuse_damage(self) -> None:
        """Raise an error that names the first damaged line, if there is one."""
        if self.damaged:
            number, reason = min(self.damaged.items())
            raise HistoryError(
                f"line {number} of {self.path} is damaged ({reason}), and so is all before it; "
                "expected a line that a History wrote"
            )

    def decode(self, number: int, line: bytes) -> dict[str, Any] | None:
        """Return what a line holds; None where it is damaged, which is noted."""
        try:
            return decode(line)
        except HistoryError as error:
            self.damaged[number] = str(error)
            return None

    def _decode_records(
        self, lines: list[tuple[int, bytes]], end_step: float
    ) -> Iterator[dict[str, Any]]:
        together = b"[%b]" % b",".join(line for _, line in lines)
        records: list[dict[str, Any] | None] = []
        if b':"' not in together and b': "' not in together:  # no number in words
            try:
                records = orjson.loads(together)
            except orjson.JSONDecodeError:
                records = []  # one by one shows which
        if len(records) != len(lines) or not all(map(is_record, records)):
            records = [self.decode(number, line) for number, line in lines]
        for record in records:
            if record is not None and record["step"] < end_step:
                yield record

    @cached_property
    def _overview(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[_Attempt]]:
        """Read headers, events, and where attempts begin and end."""
        headers: list[dict[str, Any]] = []
        events: list[dict[str, Any]] = []
        first_lines = [0]  # before any header: if the first line is lost
        first_steps = [float("inf")]
        for number, line in _read_lines(self.path):
            if line.startswith(RECORD):
                if first_steps[-1] == float("inf"):
                    record = self.decode(number, line)
                    if record is not None:
                        first_steps[-1] = record["step"]
                continue
            found = self.decode(number, line)
            if line.startswith(HEADER):
                first_lines.append(number)
                first_steps.append(float("inf"))
            if found is None:
                continue
            if line.startswith(EVENT):
                events.append(found)
            else:
                self._check_schema(found["ezpz_obs"])
                headers.append(redact(found))  # another program may have written it
        if not headers and not events and min(first_steps) == float("inf"):
            self.refuse_damage()
        attempts = []
        end_step = float("inf")
        for first_line, first_step in zip(
            reversed(first_lines), reversed(first_steps), strict=True
        ):
            attempts.append(_Attempt(first_line, end_step))
            end_step = min(end_step, first_step)
        return headers, events, attempts[::-1]

    def _check_schema(self, schema: object) -> None:
        if not isinstance(schema, int) or schema > SCHEMA:
            raise HistoryError(
                f"{self.path} is of schema {schema!r}; expected at most {SCHEMA}: "
                "read it with a newer ezpz-obs"
            )


def read_run(path: str | os.PathLike[str]) -> Run:
    """Return the run in a folder, or of a file.

    Raises:
        HistoryError: There is none.
    """
    found = Path(path)
    if found.is_dir():
        found = found / FILE_NAME
    if not found.is_file():
        raise HistoryError(
            f"no run at {os.fspath(path)}; expected a folder with {FILE_NAME}, or such a file: "
            "the outdir of a History"
        )
    return Run(found)


def describe_damage(count: int) -> str:
    """Return ``1 damaged line is left out``."""
    if count == 1:
        return "1 damaged line is left out"
    return f"{count:,} damaged lines are left out"


def iterate_new_lines(run: Run, *, stop: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Read a run's file as it is written; ``stop`` is called whenever there is nothing new."""
    line = b""
    number = 1
    is_history = False  # one line at least is
    with open(run.path, "rb", buffering=_BUFFER) as file:
        while True:
            line += file.readline(LONGEST_LINE)
            if line.endswith(b"\n"):
                found = run.decode(number, line[:-1])
                if found is not None:
                    is_history = True
                    yield found
                line = b""
                number += 1
            elif len(line) >= LONGEST_LINE:
                raise _line_too_long(number, run.path)
            elif stop():
                return
            else:
                if not is_history:
                    run.refuse_damage()
                time.sleep(_POLL_SECONDS)


def _read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield whole lines, numbered from 1; a last one without a newline is left out if torn."""
    with open(path, "rb", buffering=_BUFFER) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), start=1):
            if line.endswith(b"\n"):
                yield number, line[:-1]
            elif len(line) == LONGEST_LINE:
                raise _line_too_long(number, path)
            elif _is_whole(line):
                yield number, line


def _is_whole(line: bytes) -> bool:
    try:
        decode(line)
    except HistoryError:
        return False
    return True


def _line_too_long(number: int, path: Path) -> HistoryError:
    return HistoryError(
        f"line {number} of {path} is longer than {LONGEST_LINE >> 20} MiB; "
        "expected lines that a History wrote"
    )


def to_blocks(records: Iterable[dict[str, Any]], rows: int = 16_384) -> Iterator[RecordBlock]:
    """Yield records as arrays; their first names are step and time."""
    names: tuple[str, ...] = ()
    waiting: list[tuple[Any, ...]] = []
    most = rows
    for record in records:
        record.pop("replay", None)
        if tuple(record) != names or len(waiting) == most:
            if waiting:
                yield _make_block(names, waiting)
            names = tuple(record)
            waiting = []
            most = max(1, min(rows, _NUMBERS // len(names)))
        waiting.append(tuple(record.values()))
    if waiting:
        yield _make_block(names, waiting)


def _make_block(names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> RecordBlock:
    import numpy as np

    try:
        table = np.array([row[1:] for row in rows], dtype=np.float64)
    except OverflowError:  # an integer beyond 1.8e308
        table = np.array([list(map(as_float, row[1:])) for row in rows])
    steps = np.array([row[0] for row in rows], dtype=np.int64)
    return RecordBlock(names[2:], steps, table[:, 0], table[:, 1:])
