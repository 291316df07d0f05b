"""History: a run's metrics, on disk a moment after they were made."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ezpz_obs._context import NOW, find_place
from ezpz_obs._errors import HistoryError
from ezpz_obs._records.file import Before, LineFile
from ezpz_obs._records.reader import FILE_NAME, rank_file_name, read_run

from .at_exit import call_at_exit, find_cause
from .forked import disown_in_children
from .header import make_header
from .kept import Kept
from .progress import Progress
from .recorder import Check, Places, Recorder
from .writer import Writer

if TYPE_CHECKING:
    from ezpz_obs._sinks import Sink

    from .across import Across

logger = logging.getLogger("ezpz_obs")

_OTHERS_SECONDS = 3.0  # and up to 4 for finding who of them is missing


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
            by one collective (two on more than 1,024): ``loss/mean``, ``loss/min_rank``, ...
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
        self._closed = False
        self._pid = os.getpid()
        first = place.rank == 0
        chosen = self._choose_sinks(sinks) if first else []
        places = Places(alarms=tuple(alarms), progress=Progress() if first else None)
        self._places, before = places, Before()
        if outdir is None:
            places.kept = Kept()
        elif first or per_rank:
            self.path = Path(outdir).absolute() / (
                FILE_NAME if first else rank_file_name(place.rank)
            )
            lines = LineFile(self.path)
            before = lines.before
            places.writer = Writer(lines, checksum=checksum, sync=sync)
        try:
            run = name or (Path(outdir).absolute().name if outdir is not None else "run")
            header: dict[str, Any] = {}
            if places.writer is not None or chosen:  # elsewhere git need not look at the folder
                header = make_header(place, before, run=run, config=config or {})
            if places.writer is not None:
                places.writer.put(header, header["time"])
            self._recorder = Recorder(
                places, before.last_step, every=every, deferred=deferred, summary=summary,
                across=self._meet(before, timeout) if cross_rank and place.world_size > 1 else None,
                alone=cross_rank and place.world_size == 1,
            )  # fmt: skip
            self._open_sinks(chosen, header)
        except BaseException:  # also Ctrl-C: the file is to be free for the next attempt
            if places.writer is not None:
                places.writer.close()
            raise
        self._forget_exit = call_at_exit(self._at_exit)
        disown_in_children(places)

    @property
    def last(self) -> dict[str, Any]:
        """The latest record, with its step, time and statistics; empty before the first."""
        return self._recorder.last

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
            HistoryError: With ``cross_rank``, a rank did not come; it is named. Or after `close`.
            TypeError: A metric or the step is no number, a name no string.
            ValueError: A name is History's own, such as ``step``.
        """
        with self._places.lock:  # of two threads, each gets a step of its own
            text = self._recorder.take(metrics, step)
            return self._recorder.summarize() if text is None else text

    def record(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record and write as `update` does, without a summary."""
        with self._places.lock:
            self._recorder.take(metrics, step)

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
        self._recorder.event(kind, message, **fields)

    def flush(self) -> None:
        """Write what is deferred. Collective with ``cross_rank``."""
        self._recorder.settle()

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
        if self._places.kept is not None:
            return dataset_of(self._places.kept)
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
        """Write what is deferred and the end; close file and sinks, within 10 s. Harmless twice.

        Statistics that are deferred are waited for 3 s; `flush` waits as `update` does.
        """
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

    def _meet(self, before: Before, timeout: float | None) -> Across:
        from .across import Across  # numpy and torch, which not every History needs

        return Across(self._place, 0 if before.last_step is None else before.last_step + 1, timeout)

    @staticmethod
    def _choose_sinks(sinks: Iterable[str | Sink]) -> list[Sink]:
        sinks = sinks if isinstance(sinks, str) else list(sinks)
        if not sinks:
            return []
        from ezpz_obs._sinks import make_sinks

        return make_sinks(sinks)

    def _open_sinks(self, sinks: list[Sink], header: Mapping[str, Any]) -> None:
        if sinks:
            from ezpz_obs._sinks import Feeder

            folder = None if self.path is None else self.path.parent
            self._places.feeders = [Feeder(sink, header, folder) for sink in sinks]

    def _close(self, cause: str) -> None:
        if self._closed:
            return
        self._closed = True
        self._forget_exit()
        if os.getpid() != self._pid:
            return  # a forked child: the file and the sinks are its parent's
        places = self._places
        began = time.monotonic()
        try:
            self._recorder.settle(_OTHERS_SECONDS)
        except HistoryError as error:
            # What failed is over; that the other ranks are gone is no reason to fail at the end.
            logger.warning("%s", error)
        self.event("end", cause)
        if places.progress is not None:
            places.progress.close()
        if places.writer is not None:
            places.writer.close()
            places.writer = None
        if places.feeders:
            from ezpz_obs._sinks import close_all
            from ezpz_obs._sinks.libraries import library_seconds

            # One second is left for the interpreter's own end.
            close_all(places.feeders, began + library_seconds() - 1.0 - time.monotonic())
            places.feeders = ()
        places.closed = "after close()"
        NOW.step = None  # what is logged now is of no step

    def _at_exit(self) -> None:
        value = find_cause()
        self._close("exit" if value is None else _say(value))


def _say(value: BaseException) -> str:
    if isinstance(value, SystemExit) and not value.code:
        return "exit"
    text = str(value).partition("\n")[0]
    return f"{type(value).__name__}: {text}" if text else type(value).__name__
