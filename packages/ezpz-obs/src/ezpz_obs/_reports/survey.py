"""A run, read once from end to end, and told in little room."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ezpz_obs._run import Run

from .notices import Notices, collect
from .numbers import NOTHING, moment, seconds
from .series import Series
from .step_times import Reached, StepTimes

_SPEAK: Final = 2.0
"""Seconds between words about a long reading."""

STATISTICS: Final = ("mean", "std", "min", "max")


@dataclass(frozen=True)
class Attempt:
    """One start of a run."""

    number: int
    begun: float | None
    """Seconds since 1970."""
    reached: Reached
    replayed: int
    """Steps that an earlier attempt had done already."""
    end: str | None
    """Its cause as it was written; None where none was."""
    ended: float | None

    @property
    def span(self) -> float | None:
        """Seconds from its begin to the last that is known of it."""
        last = self.ended if self.ended is not None else self.reached.last_time
        if last is None or self.begun is None:
            return None
        return max(0.0, last - self.begun)


@dataclass
class Survey:
    """What a report says of one run."""

    run: Run
    label: str
    header: dict[str, Any]
    """Of the last attempt."""
    attempts: list[Attempt]
    series: dict[str, Series]
    """By metric, in the order of their first records."""
    step_times: StepTimes
    notices: Notices
    records: int
    age: float
    """Seconds from the last write to the file until this survey."""

    @cached_property
    def groups(self) -> dict[str, bool]:
        """Names of metrics, and whether there are statistics over ranks; these not by themselves.

        With one rank the statistics say nothing, and are left out.
        """
        found: dict[str, bool] = {}
        alone = self.header.get("world_size") == 1
        for name in self.series:
            base, _, last = name.rpartition("/")
            parts = (*STATISTICS, "min_rank", "max_rank")
            if base and last in parts and has_spread(self, base):
                found[base] = not alone
            else:
                found.setdefault(name, False)
        return found

    @property
    def last_step(self) -> int | None:
        """The last step of the run."""
        steps = [a.reached.last_step for a in self.attempts if a.reached.last_step is not None]
        return steps[-1] if steps else None

    @property
    def span(self) -> float:
        """Seconds that the attempts lasted, together."""
        return sum(attempt.span or 0.0 for attempt in self.attempts)

    @property
    def outcome(self) -> tuple[str, str]:
        """How it ended: "good", "bad" or "open", and in words."""
        end = self.attempts[-1].end if self.attempts else None
        return say_end(end, self.age, last=True)


def survey(run: Run, label: str | None = None, say: Callable[[str], None] | None = None) -> Survey:
    """Read a run.

    Args:
        run: As of `read_run`.
        label: What to call it; default: its name.
        say: Told every 2 s how far the reading is.

    Raises:
        HistoryError: A line of it is damaged.
    """
    label = run.name if label is None else label
    headers = run.headers
    begins = [_time(header.get("time")) for header in headers]
    times = StepTimes([0.0 if begin is None else begin for begin in begins])
    series: dict[str, Series] = {}
    records, next_word = 0, time.monotonic() + _SPEAK
    for block in run.blocks():
        records += len(block.steps)
        times.add(block.steps, block.times)
        for column, name in enumerate(block.names):
            known = series.get(name)
            if known is None:
                known = series[name] = Series(name)
            known.add(block.steps, block.values[:, column])
        if say is not None and time.monotonic() >= next_word:
            next_word = time.monotonic() + _SPEAK
            say(f"{label}: {records:,} records read")
    times.settle()
    for known in series.values():
        known.settle()
    return Survey(
        run=run,
        label=label,
        header=headers[-1] if headers else {},
        attempts=_attempts(headers, begins, run.events, times),
        series=series,
        step_times=times,
        notices=collect(run.events, run.path.parent),
        records=records,
        age=max(0.0, time.time() - run.path.stat().st_mtime),
    )


def has_spread(surveyed: Survey, name: str) -> bool:
    """Say whether a metric has its statistics over the ranks."""
    return all(f"{name}/{statistic}" in surveyed.series for statistic in STATISTICS)


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
        while ends and (_time(ends[0].get("time")) or 0.0) < until:
            end = ends.pop(0)
        continues = headers[number].get("continues") if headers else None
        replayed = 0
        if isinstance(continues, int) and reached.first_step is not None:
            replayed = max(0, continues - reached.first_step + 1)
        found.append(
            Attempt(
                number, begun, reached, replayed,
                None if end is None else str(end.get("message", "")),
                None if end is None else _time(end.get("time")),
            )
        )  # fmt: skip
    return found


def _time(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or moment(value) == NOTHING:
        return None
    return float(value)
