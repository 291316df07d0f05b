"""A run's records as a table: files for other programs, arrays for notebooks."""

from __future__ import annotations

import csv
import importlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ._context import replacing
from ._errors import ReportError, require
from ._records import as_float
from ._run import RecordBlock, Run, read_run, to_blocks

Floats = NDArray[np.float64]
_ROWS: Final = 16_384


def export(
    run: Run | str | os.PathLike[str],
    *,
    csv: str | os.PathLike[str] | None = None,
    parquet: str | os.PathLike[str] | None = None,
) -> int:
    """Write a run's records as a table: ``step``, ``time`` and a column for every metric.

    The run is read twice (first for its columns), and never all at once. Where a record lacks a
    metric its cell is empty; NaN and the infinities are ``nan``, ``inf``, ``-inf`` in CSV. In
    Parquet metrics are doubles.

    Args:
        run: As of `read_run`.
        csv: File to write; replaced when the new one is whole.
        parquet: The same; needs pyarrow.

    Returns:
        How many records were written.

    Raises:
        HistoryError: There is no such run, or no line of it is a History's.
        OSError: The file cannot be written.
        ReportError: No file is named, or pyarrow is not installed.
    """
    found = run if isinstance(run, Run) else read_run(run)
    ways: list[tuple[Path, Callable[[Run, Path, list[str]], int]]] = []
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
    columns = _find_columns(found)
    count = 0
    for path, write in ways:
        try:
            with replacing(path) as aside:
                count = write(found, aside, columns)
        except OSError as error:
            error.filename = str(path)  # the requested path
            error.filename2 = None
            raise
    return count


def _find_columns(run: Run) -> list[str]:
    # Both first, and there where there are no records.
    names: dict[str, None] = {"step": None, "time": None}
    for record in run.records():
        if not names.keys() >= record.keys():
            names |= dict.fromkeys(name for name in record if name != "replay")
    return list(names)


def _write_csv(run: Run, path: Path, columns: list[str]) -> int:
    count = 0
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        for count, record in enumerate(run.records(), start=1):  # noqa: B007  # is returned
            writer.writerow(record)
    return count


def _write_parquet(run: Run, path: Path, columns: list[str]) -> int:
    pyarrow = require("pyarrow", "an export to Parquet", "parquet")
    pq = require("pyarrow.parquet", "an export to Parquet", "parquet")
    double = dict.fromkeys(columns, pyarrow.float64())
    schema = pyarrow.schema(double | {"step": pyarrow.int64()})
    count = 0
    records = run.records()
    with pq.ParquetWriter(path, schema) as writer:
        while rows := list(islice(records, _ROWS)):
            table = {
                name: [as_float(row[name]) if name in row else None for row in rows]
                for name in columns
            }
            table["step"] = [row["step"] for row in rows]
            writer.write_table(pyarrow.Table.from_pydict(table, schema))
            count += len(rows)
    return count


def dataset_of(run: Run | Iterable[Mapping[str, Any]]) -> Any:
    """Return all records of a run; a metric that a step does not have is NaN there.

    Records of one step that follow each other and have no metric in common are one row.
    Otherwise each record is a separate row, so that nothing is lost.

    Args:
        run: As of `read_run`; or records: ``{"step", "time", **metrics}``.

    Returns:
        An ``xarray.Dataset`` over ``step``, with a variable for each metric. Its attributes are
        ``mean``, ``std``, ``min``, ``max`` and ``count`` of its finite values. ``time`` (UTC) lies
        beside the steps. Facts of the run are attributes of the whole. Where xarray cannot be
        imported, a dict of arrays, ``step``, ``time`` (seconds since 1970) and the metrics.
        Integers beyond 2^53 are rounded.

    Raises:
        HistoryError: No line is a History's.
    """
    first: dict[str, Any] = {"step": 0, "time": 0.0}  # in this order, whatever the records'
    steps, times, columns, counts = _make_arrays(
        run.blocks() if isinstance(run, Run) else to_blocks(first | {**r} for r in run)
    )
    try:
        xarray: Any = importlib.import_module("xarray")
    except ImportError:  # an extra; arrays do as well
        return {"step": steps, "time": times, **columns}
    stamps = np.round(times * 1e6).astype("int64").astype("datetime64[us]")
    return xarray.Dataset(
        {
            name: xarray.Variable("step", values, _make_attributes(values, counts[name]))
            for name, values in columns.items()
        },
        coords={"step": steps, "time": ("step", stamps.astype("datetime64[ns]"))},
        attrs=_make_facts(run) if isinstance(run, Run) else {},
    )


def _make_arrays(
    blocks: Iterable[RecordBlock],
) -> tuple[NDArray[np.int64], Floats, dict[str, Floats], Counter[str]]:
    """Return steps, times, each metric's numbers, and how many records have it."""
    placed: list[tuple[int, RecordBlock]] = []
    counts: Counter[str] = Counter()
    rows = 0
    names: set[str] = set()
    step: int | None = None
    for block in blocks:
        # Its first record may go with the last before it: train's and eval's of one step.
        joins = int(block.steps[0]) == step and names.isdisjoint(block.names)
        placed.append((rows - joins, block))
        rows += len(block.steps) - joins
        if not joins or len(block.steps) > 1:
            names = set()
        names.update(block.names)
        step = int(block.steps[-1])
        counts.update(dict.fromkeys(block.names, len(block.steps)))
    steps = np.zeros(rows, np.int64)
    times = np.zeros(rows)
    columns = {name: np.full(rows, np.nan) for name in counts}
    for start, block in placed:
        here = slice(start, start + len(block.steps))
        steps[here] = block.steps
        times[here] = block.times
        for place, name in enumerate(block.names):
            columns[name][here] = block.values[:, place]
    return steps, times, columns, counts


def _make_attributes(values: Floats, count: int) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    found: dict[str, Any] = {"count": len(finite), "not_finite": count - len(finite)}
    if len(finite):
        wide = finite.astype(np.longdouble)  # squares of 1e200 are numbers too
        found |= {
            "mean": float(wide.mean()), "std": float(wide.std()),
            "min": float(finite.min()), "max": float(finite.max()),
        }  # fmt: skip
    return found


def _make_facts(run: Run) -> dict[str, Any]:
    header = (run.headers or [{}])[-1]
    facts: dict[str, Any] = {"run": run.name, "path": str(run.path), "attempts": len(run.headers)}
    for name in ("world_size", "machine", "hosts", "git", "versions", "config", "argv"):
        value = header.get(name)
        if value is not None:
            plain = isinstance(value, str | int | float) and not isinstance(value, bool)
            facts[name] = value if plain else json.dumps(value, ensure_ascii=False, default=str)
    return facts
