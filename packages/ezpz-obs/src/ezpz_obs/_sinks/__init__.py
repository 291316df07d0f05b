"""Where else a run's records go: tables, TensorBoard, W&B, MLflow, trackio."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

from ezpz_obs._context import to_text
from ezpz_obs._errors import SinkError
from ezpz_obs._run import read_run

from .helper import Helper
from .libraries import LIBRARY_SINKS, Sink, check_installed, say_error

NAMES: Final = ("csv", *LIBRARY_SINKS)
SET_UP: Final[set[str]] = set()  # by `setup_mlflow`, beside those of the environment


def make_sinks(sinks: Iterable[str | Sink]) -> list[Sink]:
    """Return the sinks that are named; else those of ``EZPZ_SINKS``, else W&B's live run."""
    if isinstance(sinks, str):
        sinks = _names(sinks)
    sinks = list(sinks)
    if not sinks:
        found = os.environ.get("EZPZ_SINKS") or os.environ.get("EZPZ_TRACKER_BACKENDS") or ""
        if not found and getattr(sys.modules.get("wandb"), "run", None) is not None:
            found = "wandb"
        sinks = list(dict.fromkeys([*_names(found), *SET_UP]))
    # History is "jsonl" itself.
    return [make_sink(sink) for sink in sinks if sink not in ("jsonl", "none")]


def _names(text: str) -> list[str | Sink]:
    return [name.strip() for name in text.split(",") if name.strip()]


def make_sink(sink: str | Sink, *, own: bool = False, close_seconds: float | None = None) -> Sink:
    """Return one sink; with ``own``, never the W&B run that this process has already."""
    if not isinstance(sink, str):
        if not isinstance(sink, Sink):
            raise SinkError(
                f"{to_text(sink, repr):.200} as a sink; expected one of {', '.join(NAMES)}, or "
                "an object with name, open, write and close"
            )
        return sink
    if sink == "csv":
        from .csv import CsvSink  # and numpy

        return CsvSink()
    if sink not in LIBRARY_SINKS:
        raise SinkError(f"a sink {sink!r}; expected one of {', '.join(NAMES)}")
    check_installed(sink)
    if sink == "wandb" and not own and getattr(sys.modules.get("wandb"), "run", None) is not None:
        from .wandb import LiveWandbSink

        return LiveWandbSink()
    return Helper(sink, close_seconds=close_seconds)


logger = logging.getLogger("ezpz_obs")
_OPEN_SECONDS = 10.0
_WRITE_SECONDS = 60.0  # a server may be restarted meanwhile: training does not wait, records do
_BUSY, _IDLE = 0.02, 0.2  # between looks at the queue: to be woken by each record costs training
_BATCH = 1000


class Feeder:
    """Feeds one sink, from a thread of its own."""

    # A sink that raises or hangs is warned about once and left behind; training, the other sinks
    # and the run's file go on. Of more records than may wait, the oldest are left out and counted.

    def __init__(
        self, sink: Sink, header: Mapping[str, Any], folder: Path | None, capacity: int = 10_000
    ) -> None:
        self._sink, self._folder = sink, folder
        # A deque with a length drops its oldest by itself: no branch, no lock in `put`.
        self._queue: deque[Mapping[str, Any]] = deque(maxlen=capacity)
        self._put = 0
        self._sent = 0
        self._doing: tuple[str, float, float] | None = None
        self._lock = threading.Lock()
        self._left = self._said_end = False
        self._closing, self._ended = threading.Event(), threading.Event()
        for target, args in (self._feed, (header, folder)), (self._watch, ()):
            name = f"ezpz_obs {sink.name}"
            # Daemons: whatever they wait for, the interpreter's end does not.
            threading.Thread(target=target, args=args, name=name, daemon=True).start()

    def put(self, record: Mapping[str, Any]) -> None:
        self._queue.append(record)
        self._put += 1

    def end(self) -> None:
        """Say that nothing more comes: what waits is sent, and the sink closed."""
        self._closing.set()

    def close(self, seconds: float = 10.0) -> None:
        """Wait until all is sent, at most so long; say what was not. It may be called twice."""
        self.end()
        if not self._ended.wait(seconds):
            self._leave("has not finished in the time there is at the end of training")
        missing, self._put = self._put - self._sent, self._sent
        if missing > 0:
            what = f"{missing:,} records were not sent"
        elif self._left and not self._said_end:
            what = "what it was sent last may be missing there"
        else:
            return
        self._said_end = True
        logger.warning("sink %s: %s; %s", self._sink.name, what, self._remedy())

    def _remedy(self) -> str:
        if self._folder is None:
            return "the run has no file to replay"
        how = f"ezpz_obs.replay({str(self._folder)!r}, sink)"
        if self._sink.name in NAMES:  # the command can make those only
            how = f"ezpz-obs replay {self._folder} --to {self._sink.name}"
        return f"all are in the run's file: {how}"

    def _feed(self, header: Mapping[str, Any], folder: Path | None) -> None:
        try:
            self._begin("open", getattr(self._sink, "open_seconds", _OPEN_SECONDS))
            self._sink.open(header, folder)
            self._doing = None
            self._send_all()
            self._begin("close", float("inf"))  # `close` bounds it
            self._sink.close()
        # A sink is somebody else's code, and talks to servers and disks: whatever it raises,
        # training goes on. SystemExit is what some libraries end with.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            doing = self._doing[0] if self._doing else "write"
            self._leave(f"failed to {doing}: {say_error(error)}")
        finally:
            self._doing = None
            self._ended.set()

    def _send_all(self) -> None:
        while not self._left:
            last = self._closing.is_set()  # asked first: what is put before closing is sent
            batch = _take(self._queue)
            if batch:
                self._begin("write", _WRITE_SECONDS)
                self._sink.write(batch)
                self._doing = None
                self._sent += len(batch)
            elif last:
                return
            self._closing.wait(_BUSY if batch else _IDLE) if not last else None

    def _begin(self, what: str, seconds: float) -> None:
        self._doing = (what, time.monotonic() + seconds, seconds)

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            doing = self._doing
            if doing is not None and time.monotonic() > doing[1]:
                self._leave(f"hangs: {doing[0]} takes more than {doing[2]:.3g} s")
                return

    def _leave(self, why: str) -> None:
        with self._lock:
            if self._left:
                return
            self._left = True
        self._queue = deque(maxlen=0)  # `put` goes on, and keeps nothing
        logger.warning("sink %s %s; training goes on without it", self._sink.name, why)
        try:
            getattr(self._sink, "abandon", lambda: None)()
        except Exception as error:  # noqa: BLE001  # as above; it is left behind already
            logger.debug("sink %s: %s", self._sink.name, say_error(error))


def close_all(feeders: Sequence[Feeder], seconds: float) -> None:
    until = time.monotonic() + seconds
    for feeder in feeders:
        feeder.end()
    for feeder in feeders:
        feeder.close(max(0.0, until - time.monotonic()))


def _take(queue: deque[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    batch: list[Mapping[str, Any]] = []
    with suppress(IndexError):
        while len(batch) < _BATCH:
            batch.append(queue.popleft())
    return batch


_CLOSE_SECONDS = 3600.0  # nothing is trained meanwhile: an upload may take its time


def replay(run: str | os.PathLike[str], sink: str | Sink) -> int:
    """Send a run's records to a sink: one that failed during training, or another.

    Of steps made twice the later ones are sent. "csv" and "tensorboard" write into the run's
    folder, and replace what is there; the others begin a new run there.

    Args:
        run: The run's folder, or its file.
        sink: As for `History`.

    Returns:
        The number of records.

    Raises:
        HistoryError: There is no run, or no line of its file is a History's.
        SinkError: The sink is unknown, not installed, or failed.
    """
    found = read_run(run)
    if not found.headers and not found.damaged:
        raise SinkError(f"{found.path} has no header; expected a file that a History wrote")
    header = {"run": found.name, **(found.headers or [{}])[0], "replayed": time.time()}
    target = make_sink(sink, own=True, close_seconds=_CLOSE_SECONDS)
    sent = 0
    try:
        target.open(header, found.path.parent)
        records: Iterator[Mapping[str, Any]] = found.records()
        while batch := list(islice(records, _BATCH)):
            target.write(batch)
            sent += len(batch)
        target.close()
    except BaseException:
        # ctrl-C too: what was started is not left running.
        getattr(target, "abandon", lambda: None)()
        raise
    return sent
