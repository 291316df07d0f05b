"""The sink "tensorboard": event files in ``RUN/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ezpz_obs._errors import SinkError
from ezpz_obs._records import as_float

FOLDER = "tensorboard"
_FLUSH_SECONDS = 10


class TensorboardSink:
    """Each attempt adds a file to the folder; of each step the latest is shown, in 32 bits."""

    name = "tensorboard"

    def __init__(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events = event_pb2
        self._summaries = summary_pb2
        self._make_writer = EventFileWriter
        self._writer: Any = None
        self._is_continued = False

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:
        if folder is None:
            raise SinkError(
                'sink "tensorboard" of a run without a folder; expected History(outdir=...)'
            )
        # The library's own thread writes; its queue has no limit, so that training never waits.
        self._writer = self._make_writer(
            str(folder / FOLDER), max_queue_size=0, flush_secs=_FLUSH_SECONDS
        )
        self._is_continued = bool(header.get("attempt")) or "replayed" in header

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        seconds = metrics["time"]
        if self._is_continued:
            # Makes TensorBoard drop the records of earlier files from this step on.
            log = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(
                self._events.Event(session_log=log, step=step, wall_time=seconds)
            )
            self._is_continued = False
        value = self._summaries.Summary.Value
        values = [
            value(tag=name, simple_value=as_float(number))
            for name, number in metrics.items()
            if name != "time"
        ]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(summary=summary, step=step, wall_time=seconds))

    def close(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        folder = Path(self._writer.get_logdir())
        if not any(folder.glob("events.*")):
            raise SinkError(f"the events in {folder} were removed while they were written")
