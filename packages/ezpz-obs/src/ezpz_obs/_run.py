"""A run on disk: its attempts, records and events, read as they are asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from ezpz_topo import redact

from ._errors import HistoryError
from ._file import (
    EVENT,
    FILE_NAME,
    HEADER,
    LONGEST_LINE,
    MEDIA,
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

    Attributes:
        path: The JSONL file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

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
        """Warnings, alarms, ends and the user's own, in the order they were written."""
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
            HistoryError: A line is damaged.
        """
        ends = self._overview[2]
        attempt, waiting = 0, []
        for number, line in chain(_lines(self.path), [(0, HEADER)]):  # as before another attempt
            if line.startswith(RECORD):
                waiting.append((number, line))
                if len(waiting) < _AT_ONCE:
                    continue
            elif not line.startswith(HEADER):
                continue
            found = _decode_many(waiting, self.path)
            yield from (one for one in found if one["step"] < ends[attempt])
            waiting = []
            attempt += line.startswith(HEADER)

    def blocks(self, rows: int = 16_384) -> Iterator[Block]:
        """Read the records as arrays, at most so many rows at once; fewer of many metrics.

        Raises:
            HistoryError: A line is damaged.
        """
        return to_blocks(self.records(), rows)

    @cached_property
    def _overview(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[float]]:
        """Headers, events, and for each attempt the step from which a later one took over."""
        headers: list[dict[str, Any]] = []
        events: list[dict[str, Any]] = []
        firsts: list[float] = [float("inf")]  # before any header: a file whose first line is lost
        for number, line in _lines(self.path):
            if line.startswith(RECORD):
                if firsts[-1] == float("inf"):
                    firsts[-1] = _record(line, number, self.path)["step"]
            elif line.startswith(HEADER):
                header = _decoded(line, number, self.path)
                schema = header["ezpz_obs"]
                if not isinstance(schema, int) or schema > SCHEMA:
                    raise HistoryError(
                        f"{self.path} is of schema {schema!r}; expected at most {SCHEMA}: "
                        "read it with a newer ezpz-obs"
                    )
                headers.append(redact(header))  # an older version wrote them
                firsts.append(float("inf"))
            elif line.startswith(EVENT):
                events.append(_decoded(line, number, self.path))
            else:
                raise HistoryError(
                    f"line {number} of {self.path} is {line[:60]!r}; expected a line that a "
                    "History wrote"
                )
        ends = [float("inf")] * len(firsts)
        for later, earlier in pairwise(reversed(range(len(firsts)))):
            ends[earlier] = min(ends[later], firsts[later])
        return headers, events, ends


class Shown(NamedTuple):
    """An image, text or table that a run has in a file."""

    kind: str  # of `MEDIA`
    name: str
    step: int
    time: float  # seconds since 1970
    path: Path
    caption: str


def shown_of(run: Run) -> list[Shown]:
    """Return what a run's events name, by step; of two in one file the later."""
    found: dict[str, Shown] = {}
    for event in run.events:
        if is_shown(event):
            said = (str(event["event"]), str(event["name"]), event["step"], event["time"])
            path = run.path.parent / "media" / Path(event["file"]).name  # never another folder's
            found[event["file"]] = Shown(*said, path, str(event.get("message") or ""))
    return sorted(found.values(), key=lambda one: one.step)


def is_shown(event: Mapping[str, Any]) -> bool:
    known = (("file", str), ("name", str), ("step", int), ("time", int | float))
    return event["event"] in MEDIA and all(isinstance(event.get(n), kind) for n, kind in known)


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


def follow(path: str | os.PathLike[str], *, stop: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Read a run's file as it is written; ``stop`` is asked whenever there is nothing new."""
    run = read_run(path)
    line, number = b"", 1
    with open(run.path, "rb", buffering=_BUFFER) as file:
        while True:
            line += file.readline(LONGEST_LINE)
            if line.endswith(b"\n"):
                yield _decoded(line[:-1], number, run.path)
                line, number = b"", number + 1
            elif len(line) >= LONGEST_LINE:
                raise _too_long(number, run.path)
            elif stop():
                return
            else:
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


def _decoded(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        return decode(line)
    except HistoryError as error:
        raise HistoryError(f"line {number} of {path}: {error}") from None


def _too_long(number: int, path: Path) -> HistoryError:
    return HistoryError(
        f"line {number} of {path} is longer than {LONGEST_LINE >> 20} MiB; "
        "expected lines that a History wrote"
    )


def _decode_many(lines: list[tuple[int, bytes]], path: Path) -> list[dict[str, Any]]:
    """Decode records together: half the time of one by one, which whatever is odd still takes."""
    together = b"[%b]" % b",".join(line for _, line in lines)
    if b':"' not in together and b': "' not in together:  # no number in words, no checksum
        try:
            found: list[dict[str, Any]] = orjson.loads(together)
        except orjson.JSONDecodeError:
            pass  # one by one says which
        else:
            if all(map(_is_record, found)):
                return found
    return [_record(line, number, path) for number, line in lines]


def _record(line: bytes, number: int, path: Path) -> dict[str, Any]:
    found = _decoded(line, number, path)
    if not _is_record(found):
        raise HistoryError(
            f"line {number} of {path} is {line[:60]!r}; expected a line that a "
            "History wrote: an integer step, a time and numbers"
        )
    return found


def _is_record(found: Any) -> bool:
    return (
        PLAIN.issuperset(map(type, found.values()))
        and type(found["step"]) is int
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
