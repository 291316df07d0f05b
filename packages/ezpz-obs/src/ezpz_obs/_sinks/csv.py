"""The sink "csv": one table, ``RUN/metrics.csv``, a column a metric."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ezpz_obs._errors import SinkError
from ezpz_obs._run import Run, read_run
from ezpz_obs._table import export

FILE_NAME = "metrics.csv"


class CsvSink:
    """Appends a row a record; rewrites the table from the run for a new metric, and at the end."""

    name = "csv"

    def __init__(self) -> None:
        self._path = Path()
        self._columns: list[str] = []
        self._file: TextIO | None = None  # to which rows are appended

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:  # noqa: ARG002
        if folder is None:
            raise SinkError('sink "csv" of a run without a folder; expected History(outdir=...)')
        self._path = folder / FILE_NAME
        self._columns = self._read_columns()
        if self._columns and self._columns[:2] != ["step", "time"]:
            raise SinkError(
                f"{self._path} has the columns {self._columns[:4]}; expected step, time, ...: "
                "remove it"
            )
        if self._columns:
            self._export()  # the last row may be torn

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, **metrics}
        if self._file is None or not row.keys() <= set(self._columns):
            self._export()
            # `_export` closes it.
            self._file = open(  # noqa: SIM115
                self._path, "a", buffering=1, encoding="utf-8", newline=""
            )
        else:
            csv.DictWriter(self._file, self._columns).writerow(row)

    def close(self) -> None:
        self._export()

    def _export(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        # Of damaged lines whoever writes or replays the run warns, and not each table.
        run = Run(read_run(self._path.parent).path, warn=False)
        export(run, csv=self._path)
        self._columns = self._read_columns()

    def _read_columns(self) -> list[str]:
        if not self._path.exists():
            return []
        with open(self._path, encoding="utf-8", newline="") as file:
            return next(csv.reader(file), [])
