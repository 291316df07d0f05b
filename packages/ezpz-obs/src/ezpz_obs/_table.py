"""A run's records as a table: files for other programs, arrays for notebooks."""

from __future__ import annotations

import csv
import importlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
from numpy.typing import NDArray

from ._context import replacing
from ._errors import ReportError, require
from ._run import Block, Run, read_run, to_blocks

Floats = NDArray[np.float64]
_ROWS: Final = 16_384
_KINDS: Final = ("bool", "int", "float", "text")  # each holds those before it


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
        try:
            with replacing(path) as aside:
                count = write(found, aside, columns)
        except OSError as error:
            error.filename, error.filename2 = str(path), None  # what was asked for
            raise
    return count


def lists_of(records: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.items():
            if name != "replay":
                found.setdefault(name, []).append(value)
    return found


def _columns(run: Run) -> dict[str, str]:
    kinds: dict[str, set[str]] = {}
    for record in run.records():
        for name, value in record.items():
            kinds.setdefault(name, set()).add(_kind(value))
    kinds.pop("replay", None)
    # Both first, and there where there are no records.
    kinds = {"step": kinds.pop("step", {"int"}), "time": kinds.pop("time", {"float"}), **kinds}
    return {name: max(of, key=_KINDS.index) for name, of in kinds.items()}


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if -(1 << 63) <= value < 1 << 63 else "text"
    return "float"


def _write_csv(run: Run, path: Path, columns: dict[str, str]) -> int:
    with open(path, "w", newline="", encoding="utf-8") as file:
        return write_csv(file, list(columns), run.records(), header=True, end="\r\n")


def write_csv(
    file: TextIO,
    columns: Sequence[str],
    records: Iterable[Mapping[str, Any]],
    *,
    header: bool,
    end: str,
) -> int:
    """Write rows of these columns, below a header or to go on with a table; return how many."""
    writer = csv.writer(file, lineterminator=end)
    if header:
        writer.writerow(columns)
    count = 0
    for count, record in enumerate(records, start=1):  # noqa: B007  # is returned
        writer.writerow([record.get(name, "") for name in columns])
    return count


def _write_parquet(run: Run, path: Path, columns: dict[str, str]) -> int:
    pyarrow = require("pyarrow", "an export to Parquet", "parquet")
    pq = require("pyarrow.parquet", "an export to Parquet", "parquet")
    kinds: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "bool": (bool, pyarrow.bool_()), "int": (int, pyarrow.int64()),
        "float": (float, pyarrow.float64()), "text": (str, pyarrow.string()),
    }  # fmt: skip
    schema = pyarrow.schema([(name, kinds[kind][1]) for name, kind in columns.items()])
    count, records = 0, run.records()
    with pq.ParquetWriter(path, schema) as writer:
        while rows := list(islice(records, _ROWS)):
            table = {
                name: [kinds[kind][0](row[name]) if name in row else None for row in rows]
                for name, kind in columns.items()
            }
            writer.write_table(pyarrow.Table.from_pydict(table, schema))
            count += len(rows)
    return count


def dataset_of(run: Run | Iterable[Mapping[str, Any]]) -> Any:
    """Return all records of a run; a metric that a step does not have is NaN there.

    Records of one step that follow each other and have no metric in common are one row.
    Otherwise each record is a row of its own, so that nothing is lost.

    Args:
        run: As of `read_run`; or records: ``{"step", "time", **metrics}``.

    Returns:
        An ``xarray.Dataset`` over ``step``, with a variable for each metric. Its attributes are
        ``mean``, ``std``, ``min``, ``max`` and ``count`` of its finite values. ``time`` (UTC) lies
        beside the steps. Facts of the run are attributes of the whole. Where xarray cannot be
        imported, a dict of arrays, ``step``, ``time`` (seconds since 1970) and the metrics. It
        takes 8 bytes a number, and integers beyond 2^53 are rounded.

    Raises:
        HistoryError: A line is damaged.
    """
    gathered = _Columns()
    first: dict[str, Any] = {"step": 0, "time": 0.0}  # in this order, whatever the records'
    for block in run.blocks() if isinstance(run, Run) else to_blocks(first | {**r} for r in run):
        gathered.add(block)
    steps, times, columns = gathered.arrays()
    try:
        xarray: Any = importlib.import_module("xarray")
    except ImportError:  # an extra; arrays do as well
        return {"step": steps, "time": times, **columns}
    stamps = np.round(times * 1e6).astype("int64").astype("datetime64[us]")
    return xarray.Dataset(
        {
            name: xarray.Variable("step", values, _attributes(values, gathered.counts[name]))
            for name, values in columns.items()
        },
        coords={"step": steps, "time": ("step", stamps.astype("datetime64[ns]"))},
        attrs=_facts(run) if isinstance(run, Run) else {},
    )


class _Columns:
    """Blocks side by side, each metric's numbers apart."""

    # In arrays that the system lengthens where they are: nothing is ever there twice.

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # of records that have the metric
        self._columns: dict[str, array[float]] = {}
        self._steps: array[int] = array("q")
        self._times: array[float] = array("d")
        self._last: tuple[int, set[str]] | None = None

    def add(self, block: Block) -> None:
        # A block's first record may go with the last before it: train's and eval's of one step.
        before = self._last if self._last and self._last[0] == int(block.steps[0]) else None
        joins = int(before is not None and before[1].isdisjoint(block.names))
        start = len(self._steps) - joins
        self._steps.frombytes(block.steps[joins:].tobytes())
        self._times.frombytes(block.times[joins:].tobytes())
        for place, name in enumerate(block.names):
            self.counts[name] += len(block.steps)
            column = self._columns.setdefault(name, array("d"))
            _lengthen(column, start)
            column.frombytes(block.values[:, place].tobytes())
        names = set(block.names)
        if joins and before is not None and len(block.steps) == 1:
            names |= before[1]
        self._last = (int(block.steps[-1]), names)

    def arrays(self) -> tuple[NDArray[np.int64], Floats, dict[str, Floats]]:
        for column in self._columns.values():
            _lengthen(column, len(self._steps))
        return (
            np.frombuffer(self._steps, np.int64),
            np.frombuffer(self._times, np.float64),
            {name: np.frombuffer(column, np.float64) for name, column in self._columns.items()},
        )


def _lengthen(column: array[float], count: int) -> None:
    if len(column) < count:
        column.frombytes(np.full(count - len(column), np.nan).tobytes())


def _attributes(values: Floats, count: int) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    found: dict[str, Any] = {"count": len(finite), "not_finite": count - len(finite)}
    if len(finite):
        wide = finite.astype(np.longdouble)  # squares of 1e200 are numbers too
        found |= {
            "mean": float(wide.mean()), "std": float(wide.std()),
            "min": float(finite.min()), "max": float(finite.max()),
        }  # fmt: skip
    return found


def _facts(run: Run) -> dict[str, Any]:
    header = run.headers[-1] if run.headers else {}
    facts: dict[str, Any] = {"run": run.name, "path": str(run.path), "attempts": len(run.headers)}
    for name in ("world_size", "machine", "hosts", "git", "versions", "config", "argv"):
        value = header.get(name)
        if value is not None:
            plain = isinstance(value, str | int | float) and not isinstance(value, bool)
            facts[name] = value if plain else json.dumps(value, ensure_ascii=False, default=str)
    return facts
