"""History: a run's metrics, on disk a moment after they were made."""

from __future__ import annotations

import atexit
import logging
import operator
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from ezpz_obs._context import NOW, find_place
from ezpz_obs._errors import HistoryError
from ezpz_obs._records.fetch import Copies
from ezpz_obs._records.file import Before, LineFile
from ezpz_obs._records.lines import is_quick
from ezpz_obs._records.numbers import flatten
from ezpz_obs._records.reader import FILE_NAME, rank_file_name, read_run

from .header import make_header
from .kept import Kept
from .progress import Progress
from .summary import summarize, summarize_ranks
from .writer import Writer

if TYPE_CHECKING:
    from ezpz_obs._sinks import Sink

    from .across import Exchange

logger = logging.getLogger("ezpz_obs")


class Check(Protocol):
    """What looks at every record: `Alarms`, or anything of the same form."""

    def check(self, record: Mapping[str, Any]) -> str | None:
        """Return what is wrong, or None."""


class History:
    """Metrics by step, each record one JSON object a line, written when it is made.

    A process that is killed at any moment loses at most the line it was writing. A History in a
    folder that has one already goes on with it: a torn line is cut off, steps count on, and those
    that are replayed after a restart are marked; of the earlier attempt they are superseded.
    What cannot be written (a full disk) is warned about once, and never ends the training.

    Collective with ``cross_rank``: every rank makes one, and calls `update` at every step.

    Args:
        outdir: The folder in which rank 0 writes ``metrics.jsonl``; it is made if need be. None
            writes nothing, and keeps the records in memory (8 bytes a number).
        sinks: Where else rank 0's records go: "csv", "tensorboard", "wandb", "mlflow", "trackio",
            or objects like `Sink`. Each has a thread of its own; one that fails or hangs is left
            behind, and can be made good from the file (``ezpz-obs replay``).
        cross_rank: Add each metric's mean, std, min, max and the ranks of these over all ranks,
            by one collective: ``loss/mean``, ``loss/min_rank``, ...
        every: With ``cross_rank``, at one update in so many.
        per_rank: Every rank writes a file of its own; those beyond 0 ``metrics-rank00001.jsonl``.
        deferred: Wait for nothing: a record's device tensors and statistics are awaited at the next
            update, and the record is written then. A kill then loses one record more.
        summary: False: `update` returns "" and saves the time of writing it (6 µs for ten).
        checksum: Add a checksum to each line, which readers verify: about 1 µs a record.
        sync: Have the disk confirm: True each record (130 µs and more), a number at most once in so
            many seconds. Without it a record survives the process, but not a crash of its host.
        timeout: With ``cross_rank``, seconds to wait for the other ranks; None: torch's time-out.
        name: What reports call the run; default: the folder's name.
        config: What is worth knowing of this run; written once, in the header.
        alarms: Each looks at every record; what it says is logged, and written as an event.

    Raises:
        HistoryError: The folder holds something else, or another History is writing there; or
            ``cross_rank`` without torch.distributed.
        OSError: The folder cannot be made or written.
        SinkError: A sink is unknown, or what it needs is not installed.
        ezpz_topo.TopoError: The rank cannot be known.

    >>> history = History()
    >>> history.update({"loss": 0.5, "lr": 1e-3})
    'step=0 loss=0.5 lr=0.001'
    """

    def __init__(
        self,
        outdir: str | os.PathLike[str] | None = None,
        *,
        sinks: Iterable[str | Sink] = (),
        cross_rank: bool = False,
        every: int = 1,
        per_rank: bool = False,
        deferred: bool = False,
        summary: bool = True,
        checksum: bool = False,
        sync: bool | float = False,
        timeout: float | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        alarms: Sequence[Check] = (),
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every}; expected 1 (each update) or more")
        self._place = place = find_place()
        self.path: Path | None = None
        self.last: dict[str, Any] = {}
        """The latest record."""
        self._kept = Kept() if outdir is None else None
        self._writer: Writer | None = None
        before = Before()
        if outdir is not None and (place.rank == 0 or per_rank):
            file = FILE_NAME if place.rank == 0 else rank_file_name(place.rank)
            self.path = Path(outdir).absolute() / file
            lines = LineFile(self.path)
            before = lines.before
            self._writer = Writer(lines, checksum=checksum, sync=sync)
        self._next = 0 if before.last_step is None else before.last_step + 1
        self._replayed = -1 if before.last_step is None else before.last_step
        self._summary, self._deferred, self._every = summary, deferred, every
        self._alarms = tuple(alarms)
        self._updates = 0
        self._pending: _Pending | None = None
        self._progress = Progress() if place.rank == 0 else None
        self._feeders: list[Any] = []
        self._across = None
        self._closed = False
        self._pid = os.getpid()
        run = name or (Path(outdir).absolute().name if outdir is not None else "run")
        header = make_header(place, before, run=run, config=config or {})
        if self._writer is not None:
            self._writer.put(header, header["time"])
        if place.rank == 0:
            self._open_sinks(sinks, header)
        if cross_rank and place.world_size > 1:
            from .across import Across

            self._across = Across(place, self._next, timeout)
            # Rank 0 goes on in its file, and the others with it.
            self._next = self._across.first_step
        self._alone = cross_rank and place.world_size == 1
        # Quick: nothing to wait for, nothing to add.
        self._quick = not (deferred or cross_rank)
        atexit.register(self._at_exit)

    def update(self, metrics: Mapping[str, Any], step: int | None = None) -> str:
        """Record the metrics of one step, write them, and return a one-line summary.

        Args:
            metrics: Name to number: int, float, bool, 0-d arrays and tensors (of any device, with
                or without a gradient); or to more of such, ``{"train": {"loss": ..}}`` being
                ``train/loss``. NaN and the infinities come back from the file as they were.
            step: The step, any integer; default: one more than the last.

        Returns:
            ``step=3 loss=0.25``; where deferred, of the record before.

        Raises:
            HistoryError: With ``cross_rank``, a rank did not come; it is named.
            TypeError: A metric or the step is no number, a name no string.
            ValueError: A name is History's own, such as ``step``.
        """
        text = self._take(metrics, step)
        return text if text is not None else summarize(self.last) if self._summary else ""

    def record(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record and write as `update` does, without a summary."""
        self._take(metrics, step)

    def event(self, kind: str, message: str = "", **fields: Any) -> None:
        """Write something that happened, with the time and the last step: a check-point, say.

        Args:
            kind: "checkpoint", "warning", ...
            message: For people.
            fields: Anything else; what JSON does not have is written as text.
        """
        line = {"event": kind, "time": time.time(), "step": self.last.get("step"),
                "message": message, **fields}  # fmt: skip
        if self._writer is not None:
            self._writer.put(line, line["time"])

    def flush(self) -> None:
        """Write what is deferred. Collective with ``cross_rank``."""
        self._settle()

    def finalize(self, *, report: bool = True) -> Any:
        """Close, and return all records; rank 0 writes a report with plots beside its file.

        Not needed for the numbers, which are on disk already. Not a collective.

        Args:
            report: Write ``report/index.html`` and ``report.md`` (`write_report`), where what
                they need is installed; else one warning says what is missing.

        Returns:
            An ``xarray.Dataset`` over ``step``, with each metric's mean, std, min and max in its
            attributes; a dict of arrays where xarray is not installed; None on ranks that
            write nothing.
        """
        from ezpz_obs._errors import ReportError
        from ezpz_obs._reports import dataset_of, write_report  # above this room: reads runs

        self.close()
        if self._kept is not None:
            return dataset_of(self._kept)
        if self.path is None:
            return None
        run = read_run(self.path)
        if report and self._place.rank == 0:
            try:
                write_report([run])
            except (ReportError, OSError) as error:
                logger.warning("no report: %s", error)
        return dataset_of(run)

    def close(self) -> None:
        """Write what is deferred and the end; close file and sinks, within 10 s. Harmless twice."""
        self._close("closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close("closed" if value is None else _say(value))

    @staticmethod
    def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
        """Return the records of a run: of each step the latest attempt's.

        Raises:
            HistoryError: There is no run, or a line other than the last is damaged.
        """
        return list(read_run(path).records())

    def _take(self, metrics: Mapping[str, Any], step: int | None) -> str | None:
        """Record one step; return the summary where it is not simply that of `last`."""
        if step is None:
            step = self._next
        elif type(step) is not int:
            step = operator.index(step)
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
        before = self._settle()
        record: dict[str, Any] = {"step": step, "time": now}
        if step <= self._replayed:
            record["replay"] = True
        self._next = step + 1
        self._updates += 1
        copies = None if quick else Copies(flat)
        exchange = None
        if self._across is not None and (self._updates - 1) % self._every == 0:
            # The others are to be sent numbers, so these are waited for.
            exchange = self._across.begin(step, copies.settle() if copies else flat)
        self._pending = _Pending(record, flat, copies, exchange)
        if self._deferred:
            return before or ""
        return self._settle()

    def _settle(self) -> str | None:
        """Finish the record that waits; return its summary."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        flat = pending.copies.settle() if pending.copies else pending.flat
        record = {**pending.record, **flat}
        statistics: dict[str, Any] = {}
        try:
            if pending.exchange is not None:
                statistics, warning = pending.exchange.end()
                if warning:
                    logger.warning("%s", warning)
                    self.event("warning", warning)
            elif self._alone and (self._updates - 1) % self._every == 0:
                statistics = _of_one_rank(flat)
        finally:  # this rank's own numbers are not lost where another rank is
            self._put({**record, **statistics})
        if not self._summary:
            return ""
        return summarize_ranks(record, statistics) if statistics else summarize(record)

    def _put(self, record: dict[str, Any]) -> None:
        step, now = record["step"], record["time"]
        if self._writer is not None:
            self._writer.put(record, now)
        elif self._kept is not None:
            self._kept.put(record)
        for feeder in self._feeders:
            feeder.put(record)
        self.last = record
        NOW.step = step
        if self._progress is not None:
            self._progress.report(step, now)
        for alarm in self._alarms:
            message = alarm.check(record)
            if message is not None:
                logger.warning("%s", message)
                self.event("alarm", message)

    def _open_sinks(self, sinks: Iterable[str | Sink], header: Mapping[str, Any]) -> None:
        if sinks := list(sinks):
            from ezpz_obs._sinks import Feeder, make_sinks

            folder = None if self.path is None else self.path.parent
            self._feeders = [Feeder(sink, header, folder) for sink in make_sinks(sinks)]

    def _close(self, cause: str) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if os.getpid() != self._pid:
            return  # a forked child: the file and the sinks are its parent's
        try:
            self._settle()
        except HistoryError as error:
            # What failed is over; that the other ranks are gone is no reason to fail at the end.
            logger.warning("%s", error)
        self.event("end", cause)
        if self._progress is not None:
            self._progress.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        until = time.monotonic() + 10.0
        for feeder in self._feeders:
            feeder.close(max(0.1, until - time.monotonic()))
        self._feeders = []

    def _at_exit(self) -> None:
        # Python keeps what ended a script; ezpz_dist and launchers may have ended it otherwise.
        value = getattr(sys, "last_value", None)
        self._close("exit" if value is None else _say(value))


@dataclass(slots=True)
class _Pending:
    """A record whose numbers are on their way."""

    record: dict[str, Any]
    flat: dict[str, Any]
    copies: Copies | None
    exchange: Exchange | None


def _of_one_rank(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics in a world of one, so that a script's records have the same names."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        found |= {
            f"{name}/mean": value, f"{name}/std": 0.0, f"{name}/min": value,
            f"{name}/max": value, f"{name}/min_rank": 0, f"{name}/max_rank": 0,
        }  # fmt: skip
    return found


def _say(value: BaseException) -> str:
    text = str(value).partition("\n")[0]
    return f"{type(value).__name__}: {text}" if text else type(value).__name__
