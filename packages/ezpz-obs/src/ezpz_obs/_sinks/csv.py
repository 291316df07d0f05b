"""The sink "csv": one table, ``RUN/metrics.csv``, a column a metric."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ezpz_obs._errors import SinkError

from .libraries import as_float

FILE_NAME = "metrics.csv"
_SHARE = 10.0  # at most a tenth of the time goes into rewriting


class CsvSink:
    """Writes what `pandas.read_csv` reads: step, time, and one column a metric."""

    # A metric that appears late makes the file be written anew, with a column more; rows that have
    # no such metric have an empty field. Of steps that a restarted run makes again the later ones
    # are kept. Booleans are True and False; NaN and the infinities nan, inf, -inf; integers beyond
    # 64 bits are rounded.

    name = "csv"

    def __init__(self) -> None:
        self._path = Path(FILE_NAME)
        self._file: IO[str] | None = None
        self._columns: list[str] = []
        self._known: frozenset[str] = frozenset()
        self._held: list[Mapping[str, Any]] = []
        self._not_before = 0.0
        self._begins = False

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:  # noqa: ARG002
        """Open the table, an earlier attempt's where there is one."""
        if folder is None:
            raise SinkError('sink "csv" of a run without a folder; expected History(outdir=...)')
        self._path = folder / FILE_NAME
        self._begins = True
        if self._path.exists() and self._path.stat().st_size:
            self._columns = _read_columns(self._path)
        self._know(self._columns or ["step", "time"])

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add rows."""
        self._held.extend(records)
        if self._begins:
            # Of an earlier attempt, what is made again goes.
            self._rewrite(below=min(int(record["step"]) for record in records))
            self._begins = False
        elif self._find_new() and time.monotonic() < self._not_before:
            return
        self._flush()

    def close(self) -> None:
        """Write what is held back for want of a column."""
        if self._file is not None:
            self._flush()
            self._file.close()
            self._file = None
            if not self._path.exists():
                raise SinkError(f"{self._path} was removed while it was written")

    def _flush(self) -> None:
        if self._find_new():
            began = time.monotonic()
            self._rewrite()
            took = time.monotonic() - began
            self._not_before = began + _SHARE * took
        assert self._file is not None
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerows([_cell(record.get(name)) for name in self._columns] for record in self._held)
        self._held = []
        self._file.write(text.getvalue())
        self._file.flush()

    def _find_new(self) -> list[str]:
        """Return the names that are no columns yet."""
        new: dict[str, None] = {}
        for record in self._held:
            if not self._known.issuperset(record):
                new.update(dict.fromkeys(name for name in record if name not in self._known))
        return list(new)

    def _know(self, columns: list[str]) -> None:
        self._columns, self._known = columns, frozenset((*columns, "replay"))

    def _rewrite(self, below: float = float("inf")) -> None:
        """Write the file anew: with the new columns, and of old rows those below this step."""
        before = len(self._columns)
        self._know([*self._columns, *self._find_new()])
        more = "," * (len(self._columns) - before)
        if self._file is not None:
            self._file.close()
        anew = self._path.with_suffix(".csv.new")
        file = open(anew, "w", encoding="utf-8", newline="")  # noqa: SIM115  # stays open
        try:
            csv.writer(file, lineterminator="\n").writerow(self._columns)
            if self._path.exists():
                with open(self._path, encoding="utf-8", newline="") as old:
                    _skip_header(old)
                    for line in old:
                        # A row has numbers only: no quotes, no newlines. A torn last one goes.
                        if line.endswith("\n") and int(line.partition(",")[0]) < below:
                            file.write(f"{line[:-1]}{more}\n")
            file.flush()
            os.replace(anew, self._path)
        except BaseException:
            file.close()
            anew.unlink(missing_ok=True)
            raise
        self._file = file


def _cell(value: Any) -> Any:
    """Return what stands in the table; one integer beyond 64 bits makes a column text to pandas."""
    if type(value) is int and abs(value) >= 1 << 63:
        return as_float(value)
    return value


def _read_columns(path: Path) -> list[str]:
    """Return the names in a table's first line."""
    with open(path, encoding="utf-8", newline="") as file:
        columns = next(csv.reader(file), [])
    if columns[:2] != ["step", "time"]:
        raise SinkError(
            f"{path} has the columns {columns[:4]}; expected step, time, ...: remove it"
        )
    return columns


def _skip_header(file: IO[str]) -> None:
    """Read past the first row, whose names may have newlines in them."""
    quotes = 0
    for line in file:
        quotes += line.count('"')
        if quotes % 2 == 0:
            return
