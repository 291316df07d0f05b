"""From the metrics of a step to a record: flat, compared between ranks, written, shown."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol

from ezpz_obs._context import NOW
from ezpz_obs._errors import HistoryError
from ezpz_obs._records.fetch import Copies
from ezpz_obs._records.lines import is_quick
from ezpz_obs._records.numbers import RESERVED, flatten

from .names import refuse_statistics
from .summary import summarize, summarize_ranks

if TYPE_CHECKING:
    from ezpz_obs._sinks import Feeder

    from .across import Across
    from .exchange import Exchange, Reduced
    from .kept import Kept
    from .progress import Progress
    from .writer import Writer

logger = logging.getLogger("ezpz_obs")

_FAR = 1 << 63
_EVENTS_OWN = RESERVED - {"step", "replay"}


class Check(Protocol):
    """What looks at every record: `Alarms`, or anything of the same form."""

    def check(self, record: Mapping[str, Any]) -> str | None:
        """Return what is wrong, or None."""


@dataclass
class Places:
    """Where the records of this rank go; None or empty: not there.

    Attributes:
        writer: The file.
        kept: Memory, where there is no file.
        feeders: The sinks, each with a thread of its own.
        progress: The launcher's file.
        alarms: What looks at every record.
        closed: Why nothing more goes anywhere: "after close()".
        lock: Held by the thread that records.
    """

    writer: Writer | None = None
    kept: Kept | None = None
    feeders: Sequence[Feeder] = ()
    progress: Progress | None = None
    alarms: Sequence[Check] = ()
    closed: str = ""
    lock: RLock = field(default_factory=RLock)  # a signal's handler may record, too


class Recorder:
    """Makes the records of one `History`.

    Args:
        places: Where they go.
        before: The highest step of earlier attempts.
        across: The exchange with the other ranks, if any.
        alone: Write the statistics of one rank.
        every: Statistics at one update in so many.
        deferred: Finish a record at the next one.
        summary: Make summaries.
    """

    def __init__(
        self,
        places: Places,
        before: int | None,
        *,
        across: Across | None,
        alone: bool,
        every: int,
        deferred: bool,
        summary: bool,
    ) -> None:
        self.places = places
        self.last: dict[str, Any] = {}
        self._next = 0 if before is None else before + 1
        if across is not None:
            # Rank 0 goes on in its file, and the others with it.
            self._next = across.first_step
        self._replayed = -1 if before is None else before
        self._across, self._alone, self._every = across, alone, every
        self._deferred, self._summary = deferred, summary
        # Quick: nothing to wait for, nothing to add.
        self._quick = not (deferred or alone or across is not None)
        self._updates = 0
        self._pending: _Pending | None = None

    def summarize(self) -> str:
        """Return the line of the last record."""
        return summarize(self.last) if self._summary else ""

    def event(self, kind: str, message: str, **fields: Any) -> None:
        """Write something that happened."""
        self._refuse_closed(f"event {kind!r}")
        if taken := _EVENTS_OWN.intersection(fields):
            raise ValueError(
                f"an event with a field {min(taken)!r}; expected another name: History writes one "
                "of its own"
            )
        if self.places.writer is not None:
            now = time.time()
            line = {"event": kind, "time": now, "step": self.last.get("step"), "message": message}
            # A folder that is gone when all is over was taken away on purpose.
            self.places.writer.put({**line, **fields}, now, look=kind != "end")

    def take(self, metrics: Mapping[str, Any], step: int | None) -> str | None:
        """Record one step; return the summary where it is not simply that of `last`."""
        if step is None:
            step = self._next
        elif type(step) is not int:
            step = operator.index(step)
        if not -_FAR <= step < _FAR:
            raise ValueError(f"step {step}; expected an integer of 64 bits")
        now = time.time()
        if self._quick and is_quick(metrics):
            record = {"step": step, "time": now, **metrics}
            if step <= self._replayed:
                record["replay"] = True
            self._next = step + 1
            self._put(record)
            return None
        return self._take_slowly(metrics, step, now)

    def _take_slowly(self, metrics: Mapping[str, Any], step: int, now: float) -> str | None:
        quick = is_quick(metrics)
        flat = dict(metrics) if quick else flatten(metrics)
        self._refuse_closed(f"record of step {step}")
        if self._alone or self._across is not None:
            refuse_statistics(flat)
        copies = None if quick else Copies(flat)
        record: dict[str, Any] = {"step": step, "time": now}
        if step <= self._replayed:
            record["replay"] = True
        self._next = step + 1
        exchange = None
        try:
            before = self.settle()
            self._updates += 1
            if self._across is not None and (self._updates - 1) % self._every == 0:
                # The others are to be sent numbers, so these are waited for.
                exchange = self._across.begin(step, copies.settle() if copies else flat)
        except HistoryError:  # nor are this rank's numbers lost where another rank was
            self._put({**record, **(copies.settle() if copies else flat)})
            raise
        self._pending = _Pending(record, flat, copies, exchange)
        if self._deferred:
            return before or ""
        return self.settle()

    def settle(self, seconds: float | None = None) -> str | None:
        """Finish the record that waits; return its summary.

        Args:
            seconds: How long to wait for the other ranks, where that is less than their time-out.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        flat = pending.copies.settle() if pending.copies else pending.flat
        record = {**pending.record, **flat}
        statistics: dict[str, Any] = {}
        try:
            if pending.exchange is not None:
                statistics, warning = pending.exchange.end(seconds)
                if warning:
                    logger.warning("%s", warning)
                    self.event("warning", warning)
            elif self._alone and (self._updates - 1) % self._every == 0:
                statistics = _of_one_rank(flat)
        finally:  # this rank's own numbers are not lost where another rank is
            self._put({**record, **statistics, **flat})
        if not self._summary:
            return ""
        return summarize_ranks(record, statistics) if statistics else summarize(record)

    def _refuse_closed(self, what: str) -> None:
        if self.places.closed:
            raise HistoryError(
                f"a {what} {self.places.closed}; expected none: make a new History in the same "
                "folder, which goes on with the file, and use it in the process that made it"
            )

    def _put(self, record: dict[str, Any]) -> None:
        step, now = record["step"], record["time"]
        places = self.places
        if places.closed:
            self._refuse_closed(f"record of step {step}")
        if places.writer is not None:
            places.writer.put(record, now)
        elif places.kept is not None:
            places.kept.put(record)
        for feeder in places.feeders:
            feeder.put(record)
        self.last = record
        NOW.step = step
        if places.progress is not None:
            places.progress.report(step, now)
        for alarm in places.alarms:
            message = alarm.check(record)
            if message is not None:
                logger.warning("%s", message)
                self.event("alarm", message)


@dataclass(slots=True)
class _Pending:
    """A record whose numbers are on their way."""

    record: dict[str, Any]
    flat: dict[str, Any]
    copies: Copies | None
    exchange: Exchange | Reduced | None


def _of_one_rank(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics in a world of one, so that a script's records have the same names."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        found |= {
            f"{name}/mean": value, f"{name}/std": 0.0, f"{name}/min": value,
            f"{name}/max": value, f"{name}/min_rank": 0, f"{name}/max_rank": 0,
        }  # fmt: skip
    return found
