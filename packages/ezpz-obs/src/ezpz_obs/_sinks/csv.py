"""The sink "csv": one table, ``RUN/metrics.csv``, a column a metric."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from ezpz_obs._context import replacing
from ezpz_obs._errors import SinkError
from ezpz_obs._file import as_float
from ezpz_obs._run import read_run
from ezpz_obs._table import write_csv

FILE_NAME = "metrics.csv"
_SHARE = 10.0  # at most a tenth of the time goes into writing all of it again


class CsvSink:
    """Writes what `pandas.read_csv` reads: step, time, and one column a metric."""

    # What `export` writes, with rows added as they come. For a metric that appears late, and at
    # the begin of each attempt, it is exported again from the run's file.

    name = "csv"

    def __init__(self) -> None:
        self._folder = Path()
        self._file: TextIO | None = None
        self._columns: dict[str, None] = {"step": None, "time": None}
        self._last: Mapping[str, Any] | None = None
        self._is_behind = True
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

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._last = records[-1]
        self._is_behind |= self._know(records)
        if not self._is_behind and self._file is not None:
            self._add(self._file, records, header=False)
        elif time.monotonic() >= self._not_before:
            self._export()

    def close(self) -> None:
        if self._last is None:
            return
        if self._is_behind:
            self._export()
        assert self._file is not None
        self._file.close()
        if not (self._folder / FILE_NAME).exists():
            raise SinkError(f"{self._folder / FILE_NAME} was removed while it was written")

    def _know(self, records: Iterable[Mapping[str, Any]]) -> bool:
        """Take new names for columns; say whether there are some."""
        known = len(self._columns)
        for record in records:
            if not self._columns.keys() >= record.keys():
                self._columns |= dict.fromkeys(name for name in record if name != "replay")
        return len(self._columns) > known

    def _export(self) -> None:
        began = time.monotonic()
        if self._file is not None:
            self._file.close()
        with replacing(self._folder / FILE_NAME) as aside:
            file = open(aside, "w", encoding="utf-8", newline="")  # noqa: SIM115  # stays open
            try:
                self._know(self._recorded())
                self._add(file, self._recorded(), header=True)
            except BaseException:  # also Ctrl-C; raised again
                with suppress(OSError):  # what is in its buffer does not fit either
                    file.close()
                raise
        self._file, self._is_behind = file, False
        self._not_before = began + _SHARE * (time.monotonic() - began)

    def _add(self, file: TextIO, records: Iterable[Mapping[str, Any]], *, header: bool) -> None:
        write_csv(file, list(self._columns), map(_shown, records), header=header, end="\n")
        file.flush()

    def _recorded(self) -> Iterator[Mapping[str, Any]]:
        assert self._last is not None
        last = self._last["step"], self._last["time"]
        for record in read_run(self._folder).records():
            yield record
            if (record["step"], record["time"]) == last:
                return


def _shown(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        name: as_float(value) if type(value) is int and abs(value) >= 1 << 63 else value
        for name, value in record.items()
    }
