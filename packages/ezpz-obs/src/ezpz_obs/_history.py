"""History: a run's metrics, compared between ranks, on disk a moment after they were made."""

from __future__ import annotations

import atexit
import logging
import math
import operator
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, Self

from ._context import NOW, find_rank_info, replacing
from ._errors import HistoryError, ReportError
from ._records import (
    FILE_NAME,
    RESERVED,
    STATISTICS,
    check_statistic_names,
    encode,
    encode_numbers,
    flatten,
    is_plain,
)
from ._tensors import Copy, copy_to_host, finish_copies
from ._text import describe_error, to_plain
from ._writer import PreviousContent, Writer, find_folder, find_launch_id

if TYPE_CHECKING:
    from ._across import Across, Exchange
    from ._sinks import Sink, SinkGroup

logger = logging.getLogger("ezpz_obs")
_LARGEST_STEP: Final = (1 << 63) - 1
_PROGRESS_SECONDS: Final = 1.0
_OWN_FIELDS: Final = RESERVED - {"step", "replay"}


@dataclass
class _PendingRecord:
    """A record that is still to be written: other ranks' numbers, or a device's, are on the way."""

    record: dict[str, Any]  # step, time, replay
    metrics: dict[str, Any]
    copies: list[Copy]
    exchange: Exchange | None


class History:
    """Metrics by step, each record one JSON object a line, written when it is made.

    A process that is killed at any moment loses at most the line it was writing. A History in the
    folder of a run that failed or was killed resumes it. A torn line is cut off, and steps count
    on. Steps that are replayed are marked, and replace those of the earlier attempt. A run that
    another launch has finished stays as it is. A new one is made beside it, in ``outdir-2``, with a
    warning. A failed write (a full disk) is warned about once, and never ends the training.

    Collective with ``cross_rank``: every rank makes one, and calls `update` at every step.

    Args:
        outdir: The folder in which rank 0 writes ``metrics.jsonl``; it is made if need be. None
            writes nothing, and keeps the records in memory.
        resume: Continue in ``outdir`` even if the run there has finished.
        sinks: Where else rank 0's records go: "csv", "tensorboard", "wandb", "mlflow", "trackio",
            or objects like `Sink`. One that raises or blocks is switched off with one warning, and
            ``ezpz-obs replay`` sends it all later. Where none is named it is those of
            ``EZPZ_SINKS`` (``csv,wandb``; ``none``), else W&B's run if one is live.
        backends: Another name of ``sinks``, and ``EZPZ_TRACKER_BACKENDS`` of ``EZPZ_SINKS``.
        project_name: What W&B, MLflow and trackio group runs under; default: the script's name.
        cross_rank: Add each metric's mean, std, min, max and the ranks of these over all ranks,
            by one collective: ``loss/mean``, ``loss/min_rank``, ... A number: at one update in so
            many.
        deferred: Wait for nothing: a record's device tensors and statistics are awaited at the next
            update, and the record is written then. A kill then loses one record more.
        config: The run's configuration; written once, in the header.

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
        resume: bool = False,
        sinks: str | Iterable[str | Sink] = (),
        backends: str | Iterable[str | Sink] = (),
        project_name: str | None = None,
        cross_rank: bool | int = False,
        deferred: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if cross_rank < 0:
            raise ValueError(f"cross_rank={cross_rank}; expected True, or 1 or more updates")
        place = find_rank_info()
        self._place = place
        self.path: Path | None = None
        chosen = choose_sinks(sinks or backends) if place.rank == 0 else []
        self._lock = RLock()  # a signal's handler may record, too
        self._every = int(cross_rank)
        self._deferred = deferred
        self._updates = 0
        self._pending: _PendingRecord | None = None
        self._last: dict[str, Any] = {}
        self._not_finite: set[str] = set()  # metrics that were warned about
        self._closed = ""  # why records are refused: "after close()"
        self._is_closing = False
        self._memory: list[dict[str, Any]] | None = None
        self._writer: Writer | None = None
        self._sinks: SinkGroup | None = None
        self._across: Across | None = None
        before = PreviousContent()
        if outdir is None:
            self._memory = []
        elif place.rank == 0:
            self.path = find_folder(Path(outdir).absolute(), resume=resume) / FILE_NAME
            self._writer = Writer(self.path)
            before = self._writer.before
        self._next_step = before.next_step
        self._replayed = before.next_step - 1
        try:
            self._begin(before, chosen, project_name, config or {})
        except BaseException:  # also Ctrl-C: the file is to be free for the next attempt
            if self._writer is not None:
                self._writer.close()
            raise
        # Nothing to wait for, nothing to add: the quick way.
        self._is_simple = not deferred and not self._every
        self._progress = Progress() if place.rank == 0 else None
        self._forget_exit = call_at_exit(self._close_at_exit)
        close_in_child = weakref.WeakMethod(self._close_in_child)
        os.register_at_fork(after_in_child=lambda: _call_if_alive(close_in_child))

    def _begin(
        self,
        before: PreviousContent,
        sinks: list[Sink],
        project: str | None,
        config: Mapping[str, Any],
    ) -> None:
        """Write the header, meet the other ranks, and open the sinks."""
        header: dict[str, Any] = {}
        if self._writer is not None or sinks:  # elsewhere git need not look at the folder
            from ._header import make_header

            run = "run" if self.path is None else self.path.parent.name
            header = make_header(self._place, before, run=run, project=project, config=config)
        if self._writer is not None:
            self._writer.write(encode(header))
            _write_run_path(self._writer.path)
        if self._every and self._place.world_size > 1:
            from ._across import Across  # numpy and torch, which not every History needs

            self._across = Across(self._place, before.next_step)
            self._next_step = self._across.first_step  # all ranks continue rank 0's file
        if sinks:
            from ._sinks import SinkGroup

            folder = self.path.parent if self.path else None
            self._sinks = SinkGroup(sinks, header, folder)

    @property
    def last(self) -> dict[str, Any]:
        """The latest record, with its step, time and statistics; empty before the first."""
        return self._last

    def update(self, metrics: Mapping[str, Any], step: int | None = None) -> str:
        """Record the metrics of one step, write them, and return a one-line summary.

        Args:
            metrics: Name to number: int, float, bool, 0-d arrays and tensors (of any device, with
                or without a gradient); or to more of such, ``{"train": {"loss": ..}}`` being
                ``train/loss``. NaN and the infinities come back from the file as they were.
            step: The step, of 64 bits; default: one more than the last.

        Returns:
            ``step=3 loss=0.25``; where deferred, of the record before.

        Raises:
            HistoryError: With ``cross_rank``, a rank did not come; where ezpz_dist has set the
                ranks up it is named. Or after `close`.
            TypeError: A metric or the step is no number, a name no string.
            ValueError: A name is History's own, such as ``step``.
        """
        with self._lock:  # two threads get two steps
            written = self._record_step(metrics, step)
            return summarize(written, has_statistics=self._every > 0)

    def record(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record and write as `update` does, without a summary."""
        with self._lock:
            self._record_step(metrics, step)

    def event(self, kind: str, message: str = "", **fields: Any) -> None:
        """Write an event, such as a checkpoint, with the time and the last step.

        Args:
            kind: "checkpoint", "warning", ...
            message: For people.
            fields: Anything else; what JSON does not have is written as text, and secrets as
                ``***``.

        Raises:
            HistoryError: After `close`.
            ValueError: A field is one of the file's own: event, time or ezpz_obs.
        """
        self._check_open(f"event {kind!r}")
        taken = _OWN_FIELDS.intersection(fields)
        if taken:
            raise ValueError(
                f"an event with a field {min(taken)!r}; expected another name: History writes one "
                "of its own"
            )
        if self._writer is not None:
            from ezpz_topo import redact  # a rank that writes nothing does without it

            line = {"event": kind, "time": time.time(), "step": self._last.get("step")}
            # By its plain form: an object's own text may hold a secret, too.
            plain = to_plain({**line, "message": message, **fields})
            self._writer.write(encode(redact(plain)))

    @property
    def history(self) -> dict[str, list[float]]:
        """All values recorded so far, as lists by metric; read from the file if there is one."""
        lists: dict[str, list[float]] = {}
        for record in self._read_records():
            for name, value in record.items():
                if name != "replay":
                    lists.setdefault(name, []).append(value)
        return lists

    def flush(self) -> None:
        """Write the deferred record. Collective with ``cross_rank``."""
        with self._lock:
            self._write_pending()

    def finalize(self, *, report: bool = True) -> Any:
        """Close, and return all records; rank 0 writes a report with plots beside its file.

        Not needed for the numbers, which are on disk already. Not a collective.

        Args:
            report: Write ``report/report.html`` and ``report.md`` (`write_report`), where the
                libraries are installed; else one warning names the missing one.

        Returns:
            An ``xarray.Dataset`` over ``step``, with each metric's mean, std, min and max in its
            attributes. Without xarray a dict of arrays. None on ranks that write nothing.
        """
        from ._run import read_run  # only reading needs it
        from ._table import dataset_of

        self.close()
        if self._memory is not None:
            return dataset_of(self._memory)
        if self.path is None:
            return None
        run = read_run(self.path)
        if report:
            from ._report import write_report  # above this module: reads runs

            try:
                write_report([run])
            except (ReportError, OSError) as error:
                logger.warning("no report: %s", error)
        return dataset_of(run)

    def close(self) -> None:
        """Write the deferred record and the end; close file and sinks, within 10 s; idempotent.

        Statistics that are deferred are waited for 3 s; `flush` waits as `update` does.
        """
        self._close("closed", sys.exc_info()[1])  # in a `finally`, the exception in flight

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        self._close("closed", value)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
        """Return the records of a run: of each step the latest attempt's.

        Raises:
            HistoryError: There is no run, or no line of it is a History's.
        """
        from ._run import read_run  # only reading needs it

        return list(read_run(path).records())

    def _read_records(self) -> Iterable[Mapping[str, Any]]:
        if self.path is None:
            return self._memory or ()
        return self.read(self.path)

    def _record_step(self, metrics: Mapping[str, Any], step: int | None) -> dict[str, Any]:
        """Record one step; return the record that was written, {} where none was yet."""
        if step is None:
            step = self._next_step
        elif type(step) is not int:
            step = operator.index(step)
        if not -_LARGEST_STEP <= step <= _LARGEST_STEP:
            raise ValueError(f"step {step}; expected an integer of 64 bits")
        record: dict[str, Any] = {"step": step, "time": time.time()}
        if step <= self._replayed:
            record["replay"] = True
        if self._is_simple and is_plain(metrics):
            record.update(metrics)
            self._next_step = step + 1
            self._write(record)
            return record
        flat = flatten(metrics)
        self._check_open(f"record of step {step}")
        if self._every:
            check_statistic_names(flat)
        copies = copy_to_host(flat)
        self._next_step = step + 1
        return self._exchange(record, flat, copies)

    def _exchange(
        self, record: dict[str, Any], metrics: dict[str, Any], copies: list[Copy]
    ) -> dict[str, Any]:
        """Send this rank's numbers, and write the record, or where deferred the one before."""
        exchange = None
        try:
            before = self._write_pending()
            is_due = self._every > 0 and self._updates % self._every == 0
            self._updates += 1
            if is_due:
                # The others are sent numbers, so these are waited for.
                finish_copies(copies, metrics)
                if self._across is not None:
                    exchange = self._across.begin(record["step"], metrics)
                else:
                    record.update(single_rank_statistics(metrics))
        except HistoryError:  # another rank is lost: this rank's numbers are still written
            finish_copies(copies, metrics)
            self._write({**record, **metrics})
            raise
        self._pending = _PendingRecord(record, metrics, copies, exchange)
        if self._deferred:
            return before
        return self._write_pending()

    def _write_pending(self, *, closing: bool = False) -> dict[str, Any]:
        """Finish and write the record that waits; return it, {} if there is none."""
        pending = self._pending
        if pending is None:
            return {}
        self._pending = None
        finish_copies(pending.copies, pending.metrics)
        record = pending.record
        try:
            if self._across is not None and pending.exchange is not None:
                statistics, warning = self._across.end(pending.exchange, closing=closing)
                record.update(statistics)
                if warning and self._place.rank == 0:
                    self._warn(warning)
        finally:  # this rank's own numbers are not lost where another rank is
            record.update(pending.metrics)
            self._write(record)
        return record

    def _write(self, record: dict[str, Any]) -> None:
        if self._closed:
            self._check_open(f"record of step {record['step']}")
        line = encode_numbers(record)
        is_odd = line is None  # a number is not finite, or has more than 64 bits
        if line is None:
            line = encode(record)
        if self._writer is not None:
            self._writer.write(line)
        elif self._memory is not None:
            self._memory.append(record)
        if self._sinks is not None:
            self._sinks.write(record)
        self._last = record
        NOW.step = record["step"]
        if self._progress is not None:
            self._progress.report(record["step"], record["time"])
        if is_odd:
            self._warn_if_not_finite(record)

    def _warn_if_not_finite(self, record: Mapping[str, Any]) -> None:
        """Warn once of each metric of this rank, on rank 0 of any rank, that is not finite."""
        for name, value in record.items():
            if not isinstance(value, float) or math.isfinite(value):
                continue
            metric, _, statistic = name.rpartition("/")
            is_statistic = statistic in STATISTICS and metric in record
            if is_statistic and self._place.rank != 0:
                continue
            if not is_statistic:
                metric = name
            if metric not in self._not_finite:
                self._not_finite.add(metric)
                self._warn(f"{name} is {value} at step {record['step']}")

    def _warn(self, message: str) -> None:
        logger.warning("%s", message)
        self.event("warning", message)

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise HistoryError(
                f"a {what} {self._closed}; expected none: make a new History in the same "
                "folder, which goes on with the file, and use it in the process that made it"
            )

    def _close(self, cause: str, failure: BaseException | None) -> None:
        if self._is_closing or self._closed:  # a forked child's are its parent's
            return
        self._is_closing = True
        self._forget_exit()
        try:
            with self._lock:
                self._write_pending(closing=True)
        except HistoryError as error:
            # Training is over: missing ranks are no reason to fail now.
            logger.warning("%s", error)
        if failure is not None:
            cause = describe_cause(failure)
        self.event("end", cause, launch=find_launch_id())
        if self._progress is not None:
            self._progress.write()
        if self._writer is not None:
            self._writer.close()
        if self._sinks is not None:
            self._sinks.close()
        self._closed = "after close()"
        NOW.step = None  # later log lines belong to no step

    def _close_at_exit(self) -> None:
        # Of a script Python keeps the cause; of a function of multiprocessing it is on its way.
        self._close("exit", getattr(sys, "last_value", None) or sys.exc_info()[1])

    def _close_in_child(self) -> None:
        """Record nothing in a process that was forked: file and lock are the parent's."""
        if not self._closed:
            self._closed = "in a process forked from its own"
            self._lock = RLock()  # another thread of the parent's may hold the old one for ever
        if self._writer is not None:
            self._writer.abandon()


def _call_if_alive(reference: weakref.WeakMethod[Callable[[], None]]) -> None:
    function = reference()
    if function is not None:
        function()


def choose_sinks(sinks: str | Iterable[str | Sink]) -> list[Sink]:
    """Return the sinks that are named, or are the default; most load nothing."""
    named = sinks or os.environ.get("EZPZ_SINKS") or os.environ.get("EZPZ_TRACKER_BACKENDS")
    if not named and not sys.modules.keys() & {"wandb", "ezpz_obs._sinks"}:
        return []
    from ._sinks import make_sinks

    return make_sinks(sinks)


def summarize(record: Mapping[str, Any], *, has_statistics: bool) -> str:
    """Return ``step=3 loss=0.25 lr=0.001``; of what has statistics ``loss=0.26±0.03``."""
    parts = []
    for name, value in record.items():
        if name in ("time", "replay"):
            continue
        if has_statistics:
            metric, _, statistic = name.rpartition("/")
            if statistic in STATISTICS and metric in record:
                continue
            if f"{name}/std" in record:
                std = record[f"{name}/std"]
                spread = f"±{std:.2g}" if std else ""
                parts.append(f"{name}={record[f'{name}/mean']:.4g}{spread}")
                continue
        if type(value) is float:
            parts.append(f"{name}={value:.4g}")
        else:
            parts.append(f"{name}={value}")
    return " ".join(parts)


def single_rank_statistics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics of a single rank, under the names that several ranks have."""
    statistics: dict[str, Any] = {}
    for name, value in metrics.items():
        numbers = (value, 0.0, value, value, 0, 0)
        for statistic, number in zip(STATISTICS, numbers, strict=True):
            statistics[f"{name}/{statistic}"] = number
    return statistics


def describe_cause(failure: BaseException) -> str:
    """Return what ended a run: ``ValueError: no such file``; ``exit`` of status 0."""
    if isinstance(failure, SystemExit) and not failure.code:
        return "exit"
    return describe_error(failure)


class Progress:
    """Writes the highest step to the file that the launcher named, at most once a second."""

    # ezpz-launch with ``--retries`` starts a run again only while it gets somewhere.

    def __init__(self) -> None:
        self._path = os.environ.get("EZPZ_PROGRESS_FILE")
        self._highest = -1
        self._written = -1
        self._due = 0.0

    def report(self, step: int, now: float) -> None:
        self._highest = max(self._highest, step)
        if now >= self._due or self._due > now + _PROGRESS_SECONDS:
            self._due = now + _PROGRESS_SECONDS
            self.write()

    def write(self) -> None:
        if not self._path or self._highest <= self._written:
            return
        try:
            with replacing(Path(self._path)) as aside:
                aside.write_text(f"{self._highest}\n")
        except OSError:
            self._path = None  # the launcher has ended, or its folder was removed
        self._written = self._highest


def _write_run_path(path: Path) -> None:
    """Write the path of the run's file to the file that ezpz-launch named."""
    named = os.environ.get("EZPZ_RUN_FILE")
    if not named:
        return
    with suppress(OSError), replacing(Path(named)) as aside:  # only the launcher reads it
        aside.write_bytes(os.fsencode(path) + b"\n")


def call_at_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Have a function called when this process ends; return what takes that back."""
    atexit.register(function)
    finalizer: Any = None
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize  # such a process has it

        # Python < 3.14 ends a process that multiprocessing has forked without calling `atexit`'s.
        # Above 0: before ezpz_dist's, which takes down what statistics go through.
        finalizer = Finalize(None, function, exitpriority=1)

    def forget() -> None:
        atexit.unregister(function)
        if finalizer is not None:
            finalizer.cancel()

    return forget
