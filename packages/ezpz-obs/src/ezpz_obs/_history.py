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
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Self

from . import _file
from ._context import NOW, find_place, replacing, to_text
from ._errors import HistoryError

if TYPE_CHECKING:
    from ._across import Across, Exchange
    from ._sinks import Sink, SinkGroup


def call_at_exit(end: Callable[[], None]) -> Callable[[], None]:
    """Have a function called when this process ends; return what takes that back."""
    atexit.register(end)
    finalizer: Any = None
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize  # such a process has it

        # Python < 3.14 ends a process that multiprocessing has forked without calling `atexit`'s.
        # Above 0: before ezpz_dist's, which takes down what statistics go through.
        finalizer = Finalize(None, end, exitpriority=1)

    def forget() -> None:
        atexit.unregister(end)
        if finalizer is not None:
            finalizer.cancel()

    return forget


class Kept:
    """Records by the names they have, one double after the other."""

    # A million records of ten metrics take 96 MB. Integers beyond 2^53 are rounded.

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._runs: list[tuple[tuple[str, ...], array[float]]] = []
        self._values: array[float] = array("d")

    def put(self, record: Mapping[str, Any]) -> None:
        names = tuple(record)
        if names != self._names:
            self._names, self._values = names, array("d")
            self._runs.append((names, self._values))
        self._values.extend([_file.as_float(value) for value in record.values()])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Give the records in order; every metric is a float here."""
        for names, values in self._runs:
            width = len(names)
            for start in range(0, len(values), width):
                record = dict(zip(names, values[start : start + width], strict=True))
                yield {**record, "step": int(record["step"])}


_SECONDS = 1.0


class Progress:
    """Writes the highest step to the file that the launcher named, at most once a second."""

    # ezpz-launch with ``--retries`` starts a run again only while it gets somewhere.

    def __init__(self) -> None:
        self._path = os.environ.get("EZPZ_PROGRESS_FILE")
        self._highest = self._written = -1
        self._next = 0.0

    def report(self, step: int, now: float) -> None:
        self._highest = max(self._highest, step)
        if now >= self._next or self._next > now + _SECONDS:
            self._next = now + _SECONDS
            self.write()

    def write(self) -> None:
        if not self._path or self._highest <= self._written:
            return
        try:
            with replacing(Path(self._path)) as aside:
                aside.write_text(f"{self._highest}\n")
        except OSError:
            self._path = None  # the launcher has ended, or its folder is gone: nobody reads it
        self._written = self._highest


def _tell_launcher(path: Path, rank: int) -> None:
    """Say where the run's file is, in the file that ezpz-launch named, and reads."""
    if rank or not (named := os.environ.get("EZPZ_RUN_FILE")):
        return
    with suppress(OSError), replacing(Path(named)) as aside:  # no one else needs to know
        aside.write_bytes(os.fsencode(path) + b"\n")


_LEFT_OUT = {"time", "replay"}


def summarize(record: Mapping[str, Any], statistics: Mapping[str, Any] | None = None) -> str:
    """Return ``step=3 loss=0.25 lr=0.001``; of what has statistics ``loss=0.26±0.03``."""
    parts = []
    for name, value in record.items():
        if statistics and f"{name}/mean" in statistics:
            mean, std = statistics[f"{name}/mean"], statistics[f"{name}/std"]
            parts.append(f"{name}={mean:.4g}" + (f"±{std:.2g}" if std else ""))
        elif type(value) is float:
            if name != "time":
                parts.append(f"{name}={value:.4g}")
        elif name not in _LEFT_OUT:
            parts.append(f"{name}={value}")
    return " ".join(parts)


logger = logging.getLogger("ezpz_obs")
_FAR = 1 << 63
_EVENTS_OWN = _file.RESERVED - {"step", "replay"}
_OTHERS_SECONDS = 3.0  # and up to 4 for finding who of them is missing


class History:
    """Metrics by step, each record one JSON object a line, written when it is made.

    A process that is killed at any moment loses at most the line it was writing. A History in the
    folder of a run that failed or was killed resumes it. A torn line is cut off, and steps count
    on. Steps that are replayed are marked, and replace those of the earlier attempt. A run that
    another launch has finished stays as it is. A new one is made beside it, in ``outdir-2``, and a
    warning says so. What cannot be written (a full disk) is warned about once, and never ends the
    training.

    Collective with ``cross_rank``: every rank makes one, and calls `update` at every step.

    Args:
        outdir: The folder in which rank 0 writes ``metrics.jsonl``; it is made if need be. None
            writes nothing, and keeps the records in memory (8 bytes a number).
        resume: Continue in ``outdir`` even if the run there has finished.
        sinks: Where else rank 0's records go: "csv", "tensorboard", "wandb", "mlflow", "trackio",
            or objects like `Sink`. One that raises or blocks is switched off with one warning, and
            ``ezpz-obs replay`` sends it all later. Where none is named it is those of
            ``EZPZ_SINKS`` (``csv,wandb``; ``none``), else W&B's run if one is live.
        backends: Another name of ``sinks``, and ``EZPZ_TRACKER_BACKENDS`` of ``EZPZ_SINKS``.
        project_name: What W&B, MLflow and trackio group runs under; default: the script's name.
        cross_rank: Add each metric's mean, std, min, max and the ranks of these over all ranks,
            by one collective (three on more than 1,024): ``loss/mean``, ``loss/min_rank``, ...
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

    _kept: Kept | None = None  # in memory, where there is no file
    _writer: _file.Writer | None = None
    _sinks: SinkGroup | None = None
    _across: Across | None = None
    # The record that waits: what is known of it, its metrics, their copies, the other ranks'.
    _pending: tuple[dict[str, Any], dict[str, Any], _file.Copies, Exchange | None] | None = None
    _updates = 0
    _is_over = False
    _closed = ""  # why nothing more goes anywhere: "after close()"

    def __init__(
        self,
        outdir: str | os.PathLike[str] | None = None,
        *,
        resume: bool = False,
        sinks: Iterable[str | Sink] = (),
        backends: Iterable[str | Sink] = (),
        project_name: str | None = None,
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
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every}; expected 1 (each update) or more")
        self._place = place = find_place()
        first = place.rank == 0
        self.path: Path | None = None
        self._not_finite: set[str] = set()  # metrics that were warned about
        self._alone = cross_rank and place.world_size == 1  # write the statistics of one rank
        self._every, self._deferred, self._summary = every, deferred, summary
        self._last: dict[str, Any] = {}
        self._lock = RLock()  # a signal's handler may record, too
        chosen = _chosen(sinks or backends) if first else []
        before = _file.Before()
        if outdir is None:
            self._kept = Kept()
        elif first or per_rank:
            file_name = _file.FILE_NAME if first else f"metrics-rank{place.rank:05d}.jsonl"
            folder = _file.find_folder(Path(outdir).absolute(), file_name, finished=resume)
            self.path = folder / file_name
            self._writer = _file.Writer(self.path, checksum=checksum, sync=sync)
            before = self._writer.before
        self._progress = Progress() if first else None
        self._next = before.next_step
        self._replayed = before.next_step - 1
        try:
            run = name or ("run" if self.path is None else self.path.parent.name)
            header: dict[str, Any] = {}
            if self._writer is not None or chosen:  # elsewhere git need not look at the folder
                header = _file.make_header(
                    place, before, run=run, project=project_name, config=config or {}
                )
            if self._writer is not None:
                self._writer.put(header, header["time"])
                _tell_launcher(self._writer.path, place.rank)
            if cross_rank and place.world_size > 1:
                from ._across import Across  # numpy and torch, which not every History needs

                self._across = Across(place, before.next_step, timeout)
                self._next = self._across.first_step  # rank 0 goes on in its file, all with it
            # Quick: nothing to wait for, nothing to add.
            self._quick = not (deferred or self._alone or self._across is not None)
            beside = None if self.path is None else self.path.parent
            if chosen:
                from ._sinks import SinkGroup

                self._sinks = SinkGroup(chosen, header, beside)
        except BaseException:  # also Ctrl-C: the file is to be free for the next attempt
            if self._writer is not None:
                self._writer.close()
            raise
        self._forget_exit = call_at_exit(self._at_exit)
        of_parent = weakref.WeakMethod(self._disown)
        os.register_at_fork(after_in_child=lambda: (disown := of_parent()) and disown())

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
        with self._lock:  # of two threads, each gets a step of its own
            text = self._take(metrics, step)
            if text is None:
                return summarize(self._last) if self._summary else ""
            return text

    def record(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record and write as `update` does, without a summary."""
        with self._lock:
            self._take(metrics, step)

    def event(self, kind: str, message: str = "", **fields: Any) -> None:
        """Write something that happened, with the time and the last step: a checkpoint, say.

        Args:
            kind: "checkpoint", "warning", ...
            message: For people.
            fields: Anything else; what JSON does not have is written as text.

        Raises:
            HistoryError: After `close`.
            ValueError: A field is one of the file's own: event, time, crc or ezpz_obs.
        """
        self._refuse_closed(f"event {kind!r}")
        if taken := _EVENTS_OWN.intersection(fields):
            raise ValueError(
                f"an event with a field {min(taken)!r}; expected another name: History writes one "
                "of its own"
            )
        if self._writer is not None:
            now = time.time()
            line = {"event": kind, "time": now, "step": self._last.get("step"), "message": message}
            # A folder that is gone when all is over was taken away on purpose.
            self._writer.put({**line, **fields}, now, look=kind != "end")

    @property
    def history(self) -> dict[str, list[float]]:
        """What was recorded so far as lists, by metric; where there is a file it is read."""
        from ._run import read_run  # only who reads needs it

        found: dict[str, list[float]] = {}
        for record in (self._kept or ()) if self.path is None else read_run(self.path).records():
            for name, value in record.items():
                if name != "replay":
                    found.setdefault(name, []).append(value)
        return found

    def flush(self) -> None:
        """Write what is deferred. Collective with ``cross_rank``."""
        self._settle()

    def finalize(self, *, report: bool = True) -> Any:
        """Close, and return all records; rank 0 writes a report with plots beside its file.

        Not needed for the numbers, which are on disk already. Not a collective.

        Args:
            report: Write ``report/report.html`` and ``report.md`` (`write_report`), where what
                they need is installed; else one warning says what is missing.

        Returns:
            An ``xarray.Dataset`` over ``step``, with each metric's mean, std, min and max in its
            attributes. Without xarray a dict of arrays. None on ranks that write nothing.
        """
        from ._errors import ReportError
        from ._report import write_report  # above this room: reads runs
        from ._run import read_run  # only who reads needs it
        from ._table import dataset_of  # above this room: reads runs

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
        """Write what is deferred and the end; close file and sinks, within 10 s; then do nothing.

        Statistics that are deferred are waited for 3 s; `flush` waits as `update` does.
        """
        self._close("closed", sys.exc_info()[1])  # in a `finally`, what is on its way

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        self._close("closed", value)

    def _repr_html_(self) -> str:
        rows = [("file", self.path or "in memory"), ("last", summarize(self._last))]
        return _file.html_table(rows)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
        """Return the records of a run: of each step the latest attempt's.

        Raises:
            HistoryError: There is no run, or no line of it is a History's.
        """
        from ._run import read_run  # only who reads needs it

        return list(read_run(path).records())

    def _take(self, metrics: Mapping[str, Any], step: int | None) -> str | None:
        """Record one step; return the summary where it is not simply that of `last`."""
        if step is None:
            step = self._next
        elif type(step) is not int:
            step = operator.index(step)
        if not -_FAR <= step < _FAR:
            raise ValueError(f"step {step}; expected an integer of 64 bits")
        now = time.time()
        if self._quick and _file.is_quick(metrics):
            record = {"step": step, "time": now, **metrics}
            if step <= self._replayed:
                record["replay"] = True
            self._next = step + 1
            self._put(record)
            return None
        return self._take_slowly(metrics, step, now)

    def _take_slowly(self, metrics: Mapping[str, Any], step: int, now: float) -> str | None:
        quick = _file.is_quick(metrics)
        flat = dict(metrics) if quick else _file.flatten(metrics)
        self._refuse_closed(f"record of step {step}")
        if self._alone or self._across is not None:
            _file.refuse_statistics(flat)
        copies = [] if quick else _file.copy_to_host(flat)
        record: dict[str, Any] = {"step": step, "time": now}
        if step <= self._replayed:
            record["replay"] = True
        self._next = step + 1
        exchange = None
        try:
            before = self._settle()
            self._updates += 1
            if self._across is not None and (self._updates - 1) % self._every == 0:
                # The others are sent numbers, so these are waited for.
                _file.put_copies(copies, flat)
                exchange = self._across.begin(step, flat)
        except HistoryError:  # nor are this rank's numbers lost where another rank was
            _file.put_copies(copies, flat)
            self._put({**record, **flat})
            raise
        self._pending = record, flat, copies, exchange
        return before or "" if self._deferred else self._settle()

    def _settle(self, seconds: float | None = None) -> str | None:
        """Finish the record that waits, for other ranks at most so long; return its summary."""
        if self._pending is None:
            return None
        (record, flat, copies, exchange), self._pending = self._pending, None
        _file.put_copies(copies, flat)
        statistics: dict[str, Any] = {}
        try:
            if self._across is not None and exchange is not None:
                statistics, warning = self._across.end(exchange, seconds)
                if warning:
                    logger.warning("%s", warning)
                    self.event("warning", warning)
            elif self._alone and (self._updates - 1) % self._every == 0:
                each = [one for v in flat.values() for one in (v, 0.0, v, v, 0, 0)]
                statistics = dict(zip(_file.statistic_names(flat), each, strict=True))
        finally:  # this rank's own numbers are not lost where another rank is
            self._put({**record, **statistics, **flat})
        return summarize({**record, **flat}, statistics) if self._summary else ""

    def _refuse_closed(self, what: str) -> None:
        if self._closed:
            raise HistoryError(
                f"a {what} {self._closed}; expected none: make a new History in the same "
                "folder, which goes on with the file, and use it in the process that made it"
            )

    def _put(self, record: dict[str, Any]) -> None:
        step, now = record["step"], record["time"]
        if self._closed:
            self._refuse_closed(f"record of step {step}")
        if self._writer is not None:
            self._writer.put(record, now)
        elif self._kept is not None:
            self._kept.put(record)
        if self._sinks is not None:
            self._sinks.write(record)
        self._last = record
        NOW.step = step
        if self._progress is not None:
            self._progress.report(step, now)
        self._warn_if_not_finite(record)

    def _warn_if_not_finite(self, record: Mapping[str, Any]) -> None:
        """Warn once of each metric that is NaN or infinite."""
        for name, value in record.items():
            is_odd = type(value) is float and not math.isfinite(value)
            if is_odd and name not in self._not_finite:
                self._not_finite.add(name)
                message = f"{name} is {value} at step {record['step']}"
                logger.warning("%s", message)
                self.event("warning", message)

    def _close(self, cause: str, failure: BaseException | None) -> None:
        if self._is_over or self._closed:  # a forked child's are its parent's
            return
        self._is_over = True
        self._forget_exit()
        try:
            self._settle(_OTHERS_SECONDS)
        except HistoryError as error:
            # What failed is over; that the other ranks are gone is no reason to fail at the end.
            logger.warning("%s", error)
        launch = _file.find_launch()
        cause = cause if failure is None else _say(failure)
        self.event("end", cause, **({"launch": launch} if launch else {}))
        if self._progress is not None:
            self._progress.write()
        if self._writer is not None:
            self._writer.close()
        if self._sinks is not None:
            self._sinks.close()
        self._closed = "after close()"
        NOW.step = None  # what is logged now is of no step

    def _disown(self) -> None:
        """Record nothing in a process that was forked: the file is the parent's."""
        if not self._closed:
            self._closed = "in a process forked from its own"
            self._lock = RLock()  # another thread of the parent's may hold the old one for ever

    def _at_exit(self) -> None:
        # Of a script Python keeps the cause; of a function of multiprocessing it is on its way.
        value = getattr(sys, "last_value", None) or sys.exc_info()[1]
        self._close("exit", value)


def _chosen(sinks: Iterable[str | Sink]) -> list[Sink]:
    # Who wants none does not load them.
    named = sinks or os.environ.get("EZPZ_SINKS") or os.environ.get("EZPZ_TRACKER_BACKENDS")
    if not named and not sys.modules.keys() & {"wandb", "ezpz_obs._sinks"}:
        return []
    from ._sinks import make_sinks

    return make_sinks(sinks)


def _say(value: BaseException) -> str:
    if isinstance(value, SystemExit) and not value.code:
        return "exit"
    text = to_text(value).partition("\n")[0]
    return f"{type(value).__name__}: {text}" if text else type(value).__name__
