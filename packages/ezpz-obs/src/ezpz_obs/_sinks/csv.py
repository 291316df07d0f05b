"""The sink "csv": one table, ``RUN/metrics.csv``, a column a metric."""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ezpz_obs._errors import SinkError
from ezpz_obs._run import Run, read_run
from ezpz_obs._table import export

FILE_NAME = "metrics.csv"
_SHARE = 50.0  # a fiftieth of the time at most goes into writing the table


class CsvSink:
    """Exports the run's file, again and again while records come, and at the end."""

    name = "csv"

    def __init__(self) -> None:
        self._folder = Path()
        self._is_behind = False
        self._not_before = 0.0

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:  # noqa: ARG002
        if folder is None:
            raise SinkError('sink "csv" of a run without a folder; expected History(outdir=...)')
        self._folder, path = folder, folder / FILE_NAME
        if path.exists() and path.stat().st_size:
            with open(path, encoding="utf-8", newline="") as file:
                columns = next(csv.reader(file), [])
            if columns[:2] != ["step", "time"]:
                raise SinkError(
                    f"{path} has the columns {columns[:4]}; expected step, time, ...: remove it"
                )

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:  # noqa: ARG002 - from the file
        self._is_behind = True
        if time.monotonic() >= self._not_before:
            self._export()

    def close(self) -> None:
        if self._is_behind:
            self._export()

    def _export(self) -> None:
        began = time.monotonic()
        # Of damaged lines whoever writes or replays the run warns, and not each table.
        run = Run(read_run(self._folder).path, warn=False)
        export(run, csv=self._folder / FILE_NAME)
        self._is_behind = False
        self._not_before = began + _SHARE * (time.monotonic() - began)
