"""A run on disk: its attempts, records and events, read as they are asked for."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from ezpz_topo import redact

from ._errors import HistoryError
from ._file import (
    EVENT,
    FILE_NAME,
    HEADER,
    LONGEST_LINE,
    PLAIN,
    RECORD,
    SCHEMA,
    as_float,
    decode,
    html_table,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger("ezpz_obs")
_OF_RANKS = "metrics-rank*.jsonl"
_BUFFER = 1 << 20
_AT_ONCE = 1024
_NUMBERS = 1 << 20  # of a block at most: of 10,000 metrics 16,384 rows are 5 GB


@dataclass(frozen=True)
class Block:
    names: tuple[str, ...]
    steps: NDArray[np.int64]
    times: NDArray[np.float64]  # seconds since 1970, one a record
    values: NDArray[np.float64]
    """(records, names); integers beyond 2^53 are rounded here, beyond 1.8e308 infinite."""


class Run:
    """A run's file. Nothing is read before it is asked for, and records never all at once.

    A damaged line (cut, overwritten by a file system, of another program) is left out, and a
    warning says how many there are.

    Attributes:
        path: The JSONL file.
        damaged: Why each damaged line was left out, by its number; of the lines read so far: all,
            once `records` came to its end.
    """

    def __init__(self, path: Path, *, warn: bool = True) -> None:
        self.path = path
        self.damaged: dict[int, str] = {}
        self._warn = warn
        self._warned = 0  # of how many lines

    def _repr_html_(self) -> str:
        ends = [event.get("message", "") for event in self.events if event.get("event") == "end"]
        rows = [("run", self.name), ("file", self.path), ("attempts", len(self.headers))]
        return html_table([*rows, ("ended", ends[-1] if ends else "no end was written")])

    @property
    def name(self) -> str:
        """The name that the run was given; else its folder's."""
        said = self.headers[0].get("run") if self.headers else None
        return str(said) if said else self.path.resolve().parent.name

    @property
    def headers(self) -> list[dict[str, Any]]:
        """What each attempt wrote first; one more after each restart."""
        return self._overview[0]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Warnings, ends and the user's own, in the order they were written."""
        return self._overview[1]

    @property
    def rank_files(self) -> list[Path]:
        """The files of single ranks beside this one, by rank."""
        return sorted(self.path.parent.glob(_OF_RANKS))

    def records(self) -> Iterator[dict[str, Any]]:
        """Read the records one by one: ``{"step", "time", **metrics}``.

        A restarted run replays the steps since its last checkpoint. The later attempt wins:
        of an earlier one, the steps from which a later one began again are left out.

        Raises:
            HistoryError: No line is a History's, or one is longer than 64 MiB.
        """
        _, _, ends, begins = self._overview
        attempt = 0
        waiting: list[tuple[int, bytes]] = []
        for number, line in chain(_lines(self.path), [(0, b"")]):
            if number in begins or not number or len(waiting) == _AT_ONCE:
                found = self._decode_many(waiting)
                yield from (one for one in found if one["step"] < ends[attempt])
                waiting = []
                attempt += number in begins
            if line.startswith(RECORD):
                waiting.append((number, line))
        self.warn_of_damage()

    def blocks(self, rows: int = 16_384) -> Iterator[Block]:
        """Read the records as arrays, at most so many rows at once; fewer of many metrics.

        Raises:
            HistoryError: As for `records`.
        """
        return to_blocks(self.records(), rows)

    def warn_of_damage(self) -> None:
        """Log how many lines are damaged, and the first; of the same ones once."""
        count = len(self.damaged)
        if self._warn and count > self._warned:
            number, why = min(self.damaged.items())
            logger.warning("%s: %s (line %d: %s)", self.path, say_damaged(count), number, why)
            self._warned = count

    def refuse_damage(self) -> None:
        """Raise an error that names the first damaged line, if there is one."""
        if self.damaged:
            number, why = min(self.damaged.items())
            raise HistoryError(
                f"line {number} of {self.path} is damaged ({why}), and so is all before it; "
                "expected a line that a History wrote"
            )

    def decode(self, number: int, line: bytes) -> dict[str, Any] | None:
        """Return what a line says; None where it is damaged, which is noted."""
        try:
            found = decode(line)
            if line.startswith(RECORD) and not _is_record(found):
                raise HistoryError(f"{line[:60]!r}; expected an integer step, a time and numbers")
            if not line.startswith((HEADER, RECORD, EVENT)):
                raise HistoryError(f"{line[:60]!r}; expected a line that a History wrote")
        except HistoryError as error:
            self.damaged[number] = str(error)
            return None
        return found

    def _decode_many(self, lines: list[tuple[int, bytes]]) -> list[dict[str, Any]]:
        """Decode records together: half the time of one by one, which what is odd still takes."""
        together = b"[%b]" % b",".join(line for _, line in lines)
        if b':"' not in together and b': "' not in together:  # no number in words, no checksum
            try:
                found: list[dict[str, Any]] = orjson.loads(together)
            except orjson.JSONDecodeError:
                pass  # one by one says which
            else:
                if len(found) == len(lines) and all(map(_is_record, found)):
                    return found
        each = (self.decode(number, line) for number, line in lines)
        return [record for record in each if record is not None]

    def _check_schema(self, schema: object) -> None:
        if not isinstance(schema, int) or schema > SCHEMA:
            raise HistoryError(
                f"{self.path} is of schema {schema!r}; expected at most {SCHEMA}: "
                "read it with a newer ezpz-obs"
            )

    @cached_property
    def _overview(
        self,
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[float], set[int]]:
        """Headers, events, the step from which a later attempt took over, where attempts begin."""
        headers: list[dict[str, Any]] = []
        events: list[dict[str, Any]] = []
        firsts: list[float] = [float("inf")]  # before any header: a file whose first line is lost
        begins: set[int] = set()
        latest = b""  # record
        is_lost = False  # whether there is a line since then of which nothing is known
        for number, line in _lines(self.path):
            if line.startswith(RECORD):
                if is_lost and _goes_back(latest, line):
                    firsts.append(float("inf"))  # it was a header
                    begins.add(number)
                latest = line
                is_lost = False
                if firsts[-1] == float("inf"):
                    record = self.decode(number, line)
                    firsts[-1] = float("inf") if record is None else record["step"]
                continue
            found = self.decode(number, line)
            if line.startswith(HEADER):
                firsts.append(float("inf"))
                begins.add(number)
            if found is None:
                is_lost = is_lost or not line.startswith((HEADER, EVENT))
                continue
            if line.startswith(EVENT):
                events.append(found)
                continue
            self._check_schema(found["ezpz_obs"])
            headers.append(redact(found))  # an older version wrote them
        if not headers and not events and min(firsts) == float("inf"):
            self.refuse_damage()
        ends = [float("inf")] * len(firsts)
        for later, earlier in pairwise(reversed(range(len(firsts)))):
            ends[earlier] = min(ends[later], firsts[later])
        return headers, events, ends, begins


def read_run(path: str | os.PathLike[str]) -> Run:
    """Return the run in a folder, or of a file.

    Raises:
        HistoryError: There is none.
    """
    found = Path(path)
    if found.is_dir():
        ranks = sorted(found.glob(_OF_RANKS))
        found = found / FILE_NAME if (found / FILE_NAME).exists() or not ranks else ranks[0]
    if not found.is_file():
        raise HistoryError(
            f"no run at {os.fspath(path)}; expected a folder with {FILE_NAME}, or such a file: "
            "the outdir of a History"
        )
    return Run(found)


def say_damaged(count: int) -> str:
    return "1 damaged line is left out" if count == 1 else f"{count:,} damaged lines are left out"


def _goes_back(earlier: bytes, later: bytes) -> bool:
    """Say whether the later record replays a step before the earlier one."""
    try:
        before = decode(earlier)
        after = decode(later)
    except HistoryError:
        return False
    return bool(after.get("replay")) and after["step"] < before["step"]


def follow(run: Run, *, stop: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Read a run's file as it is written; ``stop`` is asked whenever there is nothing new."""
    line, number = b"", 1
    is_history = False  # one line at least is
    with open(run.path, "rb", buffering=_BUFFER) as file:
        while True:
            line += file.readline(LONGEST_LINE)
            if line.endswith(b"\n"):
                found = run.decode(number, line[:-1])
                if found is not None:
                    is_history = True
                    yield found
                line, number = b"", number + 1
            elif len(line) >= LONGEST_LINE:
                raise _too_long(number, run.path)
            elif stop():
                return
            else:
                if not is_history:
                    run.refuse_damage()
                time.sleep(0.2)  # a file on a shared file system tells nobody that it grew


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Read whole lines, numbered from 1; a last one without a newline is left out if torn."""
    with open(path, "rb", buffering=_BUFFER) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), start=1):
            if line.endswith(b"\n"):
                yield number, line[:-1]
            elif len(line) == LONGEST_LINE:
                raise _too_long(number, path)
            else:
                try:
                    decode(line)
                except HistoryError:
                    return
                yield number, line


def _too_long(number: int, path: Path) -> HistoryError:
    return HistoryError(
        f"line {number} of {path} is longer than {LONGEST_LINE >> 20} MiB; "
        "expected lines that a History wrote"
    )


def _is_record(found: Any) -> bool:
    return (
        PLAIN.issuperset(map(type, found.values()))
        and type(found.get("step")) is int
        and "time" in found
    )


def to_blocks(records: Iterable[dict[str, Any]], rows: int = 16_384) -> Iterator[Block]:
    """Give records, whose first names are step and time, as arrays."""
    names: tuple[str, ...] = ()
    kept: list[tuple[Any, ...]] = []
    most = rows
    for record in records:
        record.pop("replay", None)
        these = tuple(record)
        if these != names or len(kept) == most:
            if kept:
                yield _block(names, kept)
            names, kept = these, []
            most = max(1, min(rows, _NUMBERS // len(names)))
        kept.append(tuple(record.values()))
    if kept:
        yield _block(names, kept)


def _block(names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Block:
    import numpy as np

    try:
        table = np.array([row[1:] for row in rows], dtype=np.float64)
    except OverflowError:  # an integer beyond 1.8e308
        table = np.array([[as_float(value) for value in row[1:]] for row in rows])
    steps = np.array([row[0] for row in rows], dtype=np.int64)
    return Block(names[2:], steps, table[:, 0], table[:, 1:])
