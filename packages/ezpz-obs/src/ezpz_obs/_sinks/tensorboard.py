"""The sink "tensorboard": event files in ``RUN/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ezpz_obs._errors import SinkError
from ezpz_obs._file import as_float

from .libraries import metrics_of

FOLDER = "tensorboard"
_FLUSH_SECONDS = 10


class TensorboardSink:
    # Each attempt adds a file to the folder; of each step the latest is shown, in 32 bits.

    name = "tensorboard"

    def __init__(self, *_: Any) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries, self._make = event_pb2, summary_pb2, EventFileWriter
        self._writer: Any = None
        self._begins = False

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:
        if folder is None:
            raise SinkError(
                'sink "tensorboard" of a run without a folder; expected History(outdir=...)'
            )
        self._writer = self._make(
            str(folder / FOLDER), max_queue_size=1000, flush_secs=_FLUSH_SECONDS
        )
        self._begins = bool(header.get("attempt")) or "replayed" in header

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        if self._begins:
            # Tells TensorBoard to leave out what earlier files have from this step on.
            log = self._events.SessionLog(status=self._events.SessionLog.START)
            first = records[0]
            self._writer.add_event(
                self._events.Event(session_log=log, step=first["step"], wall_time=first["time"])
            )
            self._begins = False
        value = self._summaries.Summary.Value
        for record in records:
            numbers = metrics_of(record)
            values = [value(tag=name, simple_value=as_float(number)) for name, number in numbers]
            self._add(values, record["step"], record["time"])

    def _add(self, values: list[Any], step: int, seconds: float) -> None:
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(summary=summary, step=step, wall_time=seconds))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            folder = Path(self._writer.get_logdir())
            if not any(folder.glob("events.*")):
                raise SinkError(f"the events in {folder} were removed while they were written")
