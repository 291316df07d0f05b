"""A run's records as a table for other programs."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from ezpz_obs._errors import ReportError
from ezpz_obs._run import Run, read_run

from .extras import require

_ROWS: Final = 16_384
_INT64: Final = range(-(1 << 63), 1 << 63)


def export(
    run: Run | str | os.PathLike[str],
    *,
    csv: str | os.PathLike[str] | None = None,
    parquet: str | os.PathLike[str] | None = None,
) -> int:
    """Write a run's records as a table: ``step``, ``time`` and a column for every metric.

    The run is read twice (first for its columns), and never all at once. Where a record lacks a
    metric its cell is empty; NaN and the infinities are ``nan``, ``inf``, ``-inf`` in CSV. In
    Parquet a column is of integers, booleans or doubles, and of text where integers need more
    than 64 bits.

    Args:
        run: As of `read_run`.
        csv: File to write; replaced when the new one is whole.
        parquet: The same; needs pyarrow.

    Returns:
        How many records were written.

    Raises:
        HistoryError: There is no such run, or it is damaged.
        OSError: The file cannot be written.
        ReportError: No file is named, or pyarrow is not installed.
    """
    found = run if isinstance(run, Run) else read_run(run)
    ways: list[tuple[Path, Callable[[Run, Path, dict[str, str]], int]]] = []
    if csv is not None:
        ways.append((Path(csv), _write_csv))
    if parquet is not None:
        require("pyarrow.parquet", "an export to Parquet", "parquet")
        ways.append((Path(parquet), _write_parquet))
    if not ways:
        raise ReportError("no file to export to; expected csv=FILE, parquet=FILE or both")
    for path, _ in ways:
        if path.exists() and path.samefile(found.path):
            raise ReportError(f"{path} is the run itself; expected another file")
        if path.is_dir():
            raise ReportError(f"{path} is a folder; expected a file")
    columns = _columns(found)
    count = 0
    for path, write in ways:
        aside = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            count = write(found, aside, columns)
            os.replace(aside, path)
        except OSError as error:
            error.filename, error.filename2 = str(path), None  # what was asked for
            raise
        finally:
            aside.unlink(missing_ok=True)
    return count


def _columns(run: Run) -> dict[str, str]:
    """Return step, time, all metrics, and what holds each: "bool", "int", "float" or "text"."""
    kinds: dict[str, set[str]] = {}
    for record in run.records():
        for name, value in record.items():
            kinds.setdefault(name, set()).add(_kind(value))
    kinds.pop("replay", None)
    # Both first, and there where there are no records.
    kinds = {"step": kinds.pop("step", {"int"}), "time": kinds.pop("time", {"float"}), **kinds}
    return {name: _joint(of) for name, of in kinds.items()}


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if value in _INT64 else "text"
    return "float"


def _joint(kinds: set[str]) -> str:
    if "text" in kinds:
        return "text"
    if "float" in kinds:
        return "float"
    return "bool" if kinds == {"bool"} else "int"


def _write_csv(run: Run, path: Path, columns: dict[str, str]) -> int:
    count = 0
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(list(columns))
        for record in run.records():
            writer.writerow([record.get(name, "") for name in columns])
            count += 1
    return count


def _write_parquet(run: Run, path: Path, columns: dict[str, str]) -> int:
    pyarrow = require("pyarrow", "an export to Parquet", "parquet")
    pq = require("pyarrow.parquet", "an export to Parquet", "parquet")
    types = {
        "bool": pyarrow.bool_(), "int": pyarrow.int64(), "float": pyarrow.float64(),
        "text": pyarrow.string(),
    }  # fmt: skip
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
    makers: dict[str, Callable[[Any], Any]] = {
        "bool": bool, "int": int, "float": float, "text": str,
    }  # fmt: skip
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        for rows in _batches(run):
            table: dict[str, list[Any]] = {}
            for name, kind in columns.items():
                make = makers[kind]
                table[name] = [None if name not in row else make(row[name]) for row in rows]
            writer.write_table(pyarrow.Table.from_pydict(table, schema))
            count += len(rows)
    return count


def _batches(run: Run) -> Iterator[list[dict[str, Any]]]:
    rows = []
    for record in run.records():
        rows.append(record)
        if len(rows) == _ROWS:
            yield rows
            rows = []
    if rows:
        yield rows
