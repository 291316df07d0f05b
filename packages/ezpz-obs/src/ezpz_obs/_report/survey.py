"""A run, read once from end to end, and told in little room."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from ezpz_obs._file import LONGEST_LINE
from ezpz_obs._file import STATISTICS as ALL_STATISTICS
from ezpz_obs._run import Block, Run

from .words import NOTHING, moment, seconds

ROOM: Final = 200  # different messages that are kept, of the first and of the last each
GRAVE: Final = frozenset({"warning", "error", "critical", "exception", "fatal"})
_LIGHT: Final = (b'"level":"info"', b'"level":"debug"')
_ENOUGH: Final = 300
_MOST_DAMAGED: Final = 5  # lines that are named; all are counted


@dataclass
class Notice:
    kind: str
    text: str
    time: float | None  # of the first time: seconds since 1970
    step: int | None
    ranks: set[int]
    times: int = 1


class Notices:
    """What was said, the first and the last of many."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Notice] = {}
        self.left_out = 0  # different ones between the first and the last of those shown

    def put(self, notice: Notice) -> None:
        known = self._kept.setdefault((notice.kind, notice.text), notice)
        if known is not notice:
            known.times += notice.times
            known.ranks |= notice.ranks
        elif len(self._kept) > 2 * ROOM:
            del self._kept[next(islice(self._kept, ROOM, None))]
            self.left_out += 1

    @property
    def shown(self) -> list[Notice]:
        kept = self._kept.values()
        return sorted(kept, key=lambda one: float("inf") if one.time is None else one.time)


def collect(events: Iterable[dict[str, Any]], folder: Path) -> Notices:
    """Read what a run's events and ``folder/logs/*.jsonl`` say, from WARNING upward."""
    found = Notices()
    for event in events:
        if event["event"] != "end":
            found.put(_of_event(event))
    for path in filter(Path.is_file, sorted((folder / "logs").glob("*.jsonl"))):
        for line in _lines(path):
            found.put(line)
    return found


def _of_event(event: dict[str, Any]) -> Notice:
    known = {"event", "time", "step", "message", "crc"}
    more = [f"{name}={value}" for name, value in event.items() if name not in known]
    text = " ".join(part for part in (str(event.get("message") or ""), *more) if part)
    return Notice(
        str(event["event"]), text[:_ENOUGH], _seconds(event.get("time")),
        _whole(event.get("step")), set(),
    )  # fmt: skip


def _lines(path: Path) -> Iterator[Notice]:
    """Give what a log says from WARNING upward; a line that is no log's says nothing."""
    with open(path, "rb", buffering=1 << 20) as file:
        # In parts where it is longer than any log's: those are no JSON.
        for line in iter(lambda: file.readline(LONGEST_LINE), b""):
            if any(light in line for light in _LIGHT):
                continue
            try:
                said = orjson.loads(line)
                level = str(said.get("level", "")).lower()
            except (orjson.JSONDecodeError, AttributeError):
                continue
            if level in GRAVE:
                yield _of_line(level, said)


def _of_line(level: str, said: dict[str, Any]) -> Notice:
    exception = str(said.get("exception") or "").strip()
    text = str(said.get("event") or "")
    if exception:
        # The last line of a traceback is what went wrong.
        text = f"{text}: {exception.splitlines()[-1]}" if text else exception.splitlines()[-1]
    rank = _whole(said.get("rank"))
    return Notice(
        level, text[:_ENOUGH], _seconds(said.get("time")), _whole(said.get("step")),
        set() if rank is None else {rank},
    )  # fmt: skip


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _seconds(value: Any) -> float | None:
    """Return seconds since 1970, of such a number or of a date as logs write it."""
    try:
        is_number = isinstance(value, int | float)
        found = float(value) if is_number else datetime.fromisoformat(str(value)).timestamp()
    except (ValueError, OverflowError):
        return None
    return None if moment(found) == NOTHING else found


Floats = NDArray[np.float64]
Steps = NDArray[np.int64]

_AT_ONCE: Final = 1 << 18  # numbers


def _columns(blocks: Iterable[Block]) -> Iterator[tuple[str, Steps, Floats]]:
    """Give steps and values of each metric and of "time", those of many short blocks together."""
    waiting: dict[str, list[tuple[Steps, Floats]]] = {}
    count = 0

    def together() -> Iterator[tuple[str, Steps, Floats]]:
        for name, parts in waiting.items():
            steps, values = zip(*parts, strict=True)
            yield name, np.concatenate(steps), np.concatenate(values)
        waiting.clear()

    for block in blocks:
        columns = {"time": block.times, **dict(zip(block.names, block.values.T, strict=True))}
        for name, values in columns.items():
            waiting.setdefault(name, []).append((block.steps, values))
            count += len(values)
        if count >= _AT_ONCE:
            yield from together()
            count = 0
    yield from together()


BUCKETS: Final = 2048  # at most so many are kept; when there are more, each two become one
COUNT, MEAN, LEAST, GREATEST, FROM, TO, SIZE = range(7)
"""Rows of `Series.buckets`: how many finite values, their mean, min and max, the first and last
step, how many values of any kind."""


class Series:
    """The values of a metric, met once and in order."""

    # Exact are the counts, the last value, minimum, maximum, mean and standard deviation (of the
    # population, of the finite values). The curve is kept as consecutive buckets.

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0  # values of any kind
        self.nan = self.infinite = 0
        self.first_odd: int | None = None  # the step of the first NaN or infinity
        # Step and value; the least and greatest of the finite ones.
        self.last = self.min = self.max = cast("tuple[int, float] | None", None)
        is_rank = name.endswith(("/min_rank", "/max_rank"))
        self.ranks: Counter[int] | None = Counter() if is_rank else None  # how often each
        # Wider than double where there is such a thing: squares of 1e200 are numbers too.
        self._mean = self._squares = np.longdouble(0)
        self._finite = 0
        self.width = 1  # how many values make a bucket
        self.buckets: Floats = np.empty((7, 0))
        """The curve, (7, at most `BUCKETS`): see `COUNT` and those after it."""

    @property
    def mean(self) -> float | None:
        return float(self._mean) if self._finite else None

    @property
    def std(self) -> float | None:
        return float(np.sqrt(self._squares / self._finite)) if self._finite else None

    def curve(self, points: int) -> Floats:
        rows = self.buckets
        each = -(-rows.shape[1] // points)
        return rows if each <= 1 else _join(rows, np.arange(0, rows.shape[1], each))

    def add(self, steps: Steps, values: Floats) -> None:
        finite = np.isfinite(values)
        self._keep(steps, values, finite)
        self.count += len(steps)
        self.last = (int(steps[-1]), float(values[-1]))
        if not finite.all():
            nan = int(np.isnan(values).sum())
            self.nan += nan
            self.infinite += int((~finite).sum()) - nan
            if self.first_odd is None:
                self.first_odd = int(steps[np.argmin(finite)])
            steps, values = steps[finite], values[finite]
            if not len(values):
                return
        least, greatest = int(values.argmin()), int(values.argmax())
        if self.min is None or values[least] < self.min[1]:
            self.min = (int(steps[least]), float(values[least]))
        if self.max is None or values[greatest] > self.max[1]:
            self.max = (int(steps[greatest]), float(values[greatest]))
        if self.ranks is not None:
            of, often = np.unique(values.astype(np.int64), return_counts=True)
            for rank, count in zip(of.tolist(), often.tolist(), strict=True):
                self.ranks[rank] += count
        # Chan's way of joining two means: of deviations, so that 1e5 ± 20 stays exact.
        wide = values.astype(np.longdouble)
        mean, count = wide.mean(), len(wide)
        apart, total = mean - self._mean, self._finite + count
        wide -= mean
        self._squares += (wide * wide).sum() + apart * apart * self._finite * count / total
        self._mean += apart * count / total
        self._finite = total

    def _keep(self, steps: Steps, values: Floats, finite: NDArray[np.bool_]) -> None:
        numbers = values if finite.all() else np.where(finite, values, np.nan)
        ones = np.ones(len(values))
        rows = np.stack([finite, numbers, numbers, numbers, steps, steps, ones])
        begun = self.count % self.width
        first = self.width - begun if begun else 0
        starts = np.arange(first, len(values), self.width)
        kept = self.buckets
        if begun:
            # The last bucket is not full: it is taken up again.
            rows, kept = np.concatenate([kept[:, -1:], rows], axis=1), kept[:, :-1]
            starts = np.concatenate([[0], starts + 1])
        if self.width > 1:
            rows = _join(rows, starts)
        self.buckets = np.concatenate([kept, rows], axis=1)
        while self.buckets.shape[1] > BUCKETS:
            self.buckets = _join(self.buckets, np.arange(0, self.buckets.shape[1], 2))
            self.width *= 2


def _join(rows: Floats, starts: NDArray[np.int64]) -> Floats:
    """Return one bucket for all from each start to the next."""
    ends = np.append(starts[1:], rows.shape[1])
    count = np.add.reduceat(rows[COUNT], starts)
    # Each value's part of its mean, rather than sums: those of large numbers have no double.
    part = rows[COUNT] / np.repeat(np.maximum(count, 1), ends - starts)
    mean = np.add.reduceat(np.where(rows[COUNT] > 0, rows[MEAN] * part, 0.0), starts)
    return np.stack([
        count, np.where(count > 0, mean, np.nan), np.fmin.reduceat(rows[LEAST], starts),
        np.fmax.reduceat(rows[GREATEST], starts),
        np.minimum.reduceat(rows[FROM], starts), np.maximum.reduceat(rows[TO], starts),
        np.add.reduceat(rows[SIZE], starts),
    ])  # fmt: skip


_DECADES: Final = (-7, 7)
_PER_DECADE: Final = 200

EDGES: Final = np.logspace(*_DECADES, (_DECADES[1] - _DECADES[0]) * _PER_DECADE + 1)
"""Of the histogram's bins, in seconds; each is 1.2 % wide."""


@dataclass
class Reached:
    first_step: int | None = None
    last_step: int | None = None
    last_time: float | None = None


class StepTimes:
    """Seconds a step, of all records of a run, met once and in order."""

    # Between the first records of two steps; where only one step in so many is recorded, their time
    # divided by the steps. What lies between two attempts is no step.

    def __init__(self, begins: list[float]) -> None:
        self.histogram: NDArray[np.int64] = np.zeros(len(EDGES) - 1, np.int64)  # by `EDGES`
        self.attempts = [Reached() for _ in begins] or [Reached()]
        self._begins = np.maximum.accumulate(np.array(begins[1:], np.float64))
        self._before: tuple[Steps, Floats] = np.empty(0, np.int64), np.empty(0)

    def add(self, steps: Steps, times: Floats) -> None:
        attempts = np.searchsorted(self._begins, times, side="right")
        for attempt in np.unique(attempts).tolist():
            of, reached = attempts == attempt, self.attempts[attempt]
            if reached.first_step is None:
                reached.first_step = int(steps[of][0])
            reached.last_step, reached.last_time = int(steps[of][-1]), float(times[of][-1])
        steps = np.concatenate([self._before[0], steps])
        times = np.concatenate([self._before[1], times])
        attempts = np.searchsorted(self._begins, times, side="right")
        other = (np.diff(steps) != 0) | (np.diff(attempts) != 0)
        new = np.flatnonzero(np.concatenate([[True], other]))
        steps, times, attempts = steps[new], times[new], attempts[new]
        self._before = steps[-1:], times[-1:]
        apart, took = np.diff(steps), np.diff(times)
        told = (apart > 0) & (took >= 0) & (np.diff(attempts) == 0)
        took, apart = took[told], apart[told]
        if len(took):
            self.histogram += np.histogram(np.clip(took / apart, EDGES[0], EDGES[-1]), EDGES)[0]

    @property
    def count(self) -> int:
        return int(self.histogram.sum())

    def reach(self, part: float) -> tuple[int, int]:
        """Return the first bin that has some, and the last that this part of all needs."""
        last = int(np.searchsorted(np.cumsum(self.histogram), part * self.count))
        return int(np.flatnonzero(self.histogram)[0]), last

    def quantile(self, part: float) -> float | None:
        """Return the seconds that this part of the steps took at most, to within 1 %."""
        if not self.count:
            return None
        bin_ = int(np.searchsorted(np.cumsum(self.histogram), part * self.count))
        bin_ = min(bin_, len(self.histogram) - 1)
        return float(np.sqrt(EDGES[bin_] * EDGES[bin_ + 1]))


_SPEAK: Final = 2.0  # seconds between words about a long reading
STATISTICS: Final = ALL_STATISTICS[:4]  # mean, std, min and max


class Attempt(NamedTuple):
    number: int
    begun: float | None  # seconds since 1970
    reached: Reached
    replayed: int  # steps that an earlier attempt had done already
    end: str | None  # its cause as it was written; None where none was
    ended: float | None
    fault: str  # whose its end was, as ezpz-launch told the next one; empty where it did not

    @property
    def span(self) -> float | None:
        last = self.ended if self.ended is not None else self.reached.last_time
        if last is None or self.begun is None:
            return None
        return max(0.0, last - self.begun)


@dataclass
class Survey:
    run: Run
    label: str
    header: dict[str, Any]  # of the last attempt
    attempts: list[Attempt]
    series: dict[str, Series]  # by metric, in the order of their first records
    step_times: StepTimes
    notices: Notices
    records: int
    age: float  # seconds from the last write to the file until this survey
    damaged: int  # lines that are left out

    @cached_property
    def groups(self) -> dict[str, bool]:
        """Names of metrics, and whether there are statistics over ranks (not named themselves)."""
        # With one rank the statistics say nothing, and are left out.
        found: dict[str, bool] = {}
        alone = self.header.get("world_size") == 1
        for name in self.series:
            base, _, last = name.rpartition("/")
            is_part = base and last in ALL_STATISTICS
            if is_part and all(f"{base}/{part}" in self.series for part in STATISTICS):
                found[base] = not alone
            else:
                found.setdefault(name, False)
        return found

    @property
    def last_step(self) -> int | None:
        steps = [a.reached.last_step for a in self.attempts if a.reached.last_step is not None]
        return steps[-1] if steps else None

    @property
    def span(self) -> float:
        return sum(attempt.span or 0.0 for attempt in self.attempts)

    @property
    def outcome(self) -> tuple[str, str]:
        """How it ended: "good", "bad" or "open", and in words."""
        end = self.attempts[-1].end if self.attempts else None
        return say_end(end, self.age, last=True)


def survey(run: Run, label: str | None = None, say: Callable[[str], None] | None = None) -> Survey:
    """Read a run; ``say`` is told every 2 s how far the reading is."""
    label = run.name if label is None else label
    headers = run.headers
    begins = [_seconds(header.get("time")) for header in headers]
    times = StepTimes([0.0 if begin is None else begin for begin in begins])
    series: dict[str, Series] = {}
    records, next_word = 0, time.monotonic() + _SPEAK
    for name, steps, values in _columns(run.blocks()):
        if name != "time":
            series.setdefault(name, Series(name)).add(steps, values)
            continue
        times.add(steps, values)
        records += len(steps)
        if say is not None and time.monotonic() >= next_word:
            next_word = time.monotonic() + _SPEAK
            say(f"{label}: {records:,} records read")
    notices = collect(run.events, run.path.parent)
    for number, why in sorted(run.damaged.items())[:_MOST_DAMAGED]:
        text = f"line {number} of {run.path.name} is left out: {why}"
        notices.put(Notice("damaged", text[:_ENOUGH], None, None, set()))
    return Survey(
        run=run, label=label, header=headers[-1] if headers else {},
        attempts=_attempts(headers, begins, run.events, times), series=series,
        step_times=times,
        notices=notices, records=records,
        age=max(0.0, time.time() - run.path.stat().st_mtime),
        damaged=len(run.damaged),
    )  # fmt: skip


def say_end(end: str | None, age: float, *, last: bool) -> tuple[str, str]:
    """Say a cause of end in words: "good", "bad" or "open", and the words."""
    if end == "closed":
        return "good", "finished"
    if end == "exit":
        return "good", "finished: the script ended"
    if end is not None:
        return "bad", f"failed: {end}" if end else "failed"
    if not last:
        return "bad", "killed: no end was written"
    if age < 60:
        return "open", "running, or killed just now: no end was written yet"
    return "bad", f"killed, or stuck: no end was written, and nothing for {seconds(age)}"


def _attempts(
    headers: list[dict[str, Any]],
    begins: list[float | None],
    events: list[dict[str, Any]],
    times: StepTimes,
) -> list[Attempt]:
    ends = [event for event in events if event["event"] == "end"]
    found = []
    for number, reached in enumerate(times.attempts):
        begun = begins[number] if begins else None
        until = next((t for t in begins[number + 1 :] if t is not None), float("inf"))
        end = None
        while ends and (_seconds(ends[0].get("time")) or 0.0) < until:
            end = ends.pop(0)
        continues = headers[number].get("continues") if headers else None
        replayed = 0
        if isinstance(continues, int) and reached.first_step is not None:
            replayed = max(0, continues - reached.first_step + 1)
        found.append(
            Attempt(
                number, begun, reached, replayed,
                None if end is None else str(end.get("message", "")),
                None if end is None else _seconds(end.get("time")),
                _fault(headers[number : number + 2]),
            )
        )  # fmt: skip
    return found


def _fault(headers: list[dict[str, Any]]) -> str:
    """Return whose fault the end of the first of two was, as its launch's very next was told."""
    if len(headers) < 2:
        return ""
    own, other = (str(each.get("launch_attempt")) for each in headers)
    launch, _, number = own.rpartition(".")
    is_next = number.isdecimal() and other == f"{launch}.{int(number[:9]) + 1}"
    return str(headers[1].get("last_fault") or "") if is_next else ""
