"""All records of a run as arrays, for notebooks."""

from __future__ import annotations

import importlib
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ezpz_obs._run import Block, Run

from .series import Series

_ROWS = 16_384


def dataset_of(run: Run | Iterable[Mapping[str, Any]]) -> Any:
    """Return all records of a run; a metric that a step does not have is NaN there.

    Records of one step that follow each other and have no metric in common are one row; else
    each record is a row of its own, so that nothing is lost.

    Args:
        run: As of `read_run`; or records: ``{"step", "time", **metrics}``.

    Returns:
        An ``xarray.Dataset`` over ``step``: a variable a metric, with ``mean``, ``std``, ``min``,
        ``max`` and ``count`` of its finite values as attributes; ``time`` (UTC) beside the steps;
        what is known of the run as attributes of the whole. A dict of arrays, ``step``, ``time``
        (seconds since 1970) and the metrics, where xarray cannot be imported. It takes 8 bytes a
        number, and integers beyond 2^53 are rounded.

    Raises:
        HistoryError: A line is damaged.
    """
    gathered = _Columns()
    for block in run.blocks() if isinstance(run, Run) else _blocks(run):
        gathered.add(block)
    steps, times, columns = gathered.arrays()
    try:
        xarray: Any = importlib.import_module("xarray")
    except ImportError:  # an extra; arrays do as well
        return {"step": steps, "time": times, **columns}
    stamps = np.round(times * 1e6).astype("int64").astype("datetime64[us]")
    return xarray.Dataset(
        {
            name: xarray.Variable("step", values, _attributes(gathered.series[name]))
            for name, values in columns.items()
        },
        coords={"step": steps, "time": ("step", stamps.astype("datetime64[ns]"))},
        attrs=_facts(run) if isinstance(run, Run) else {},
    )


class _Columns:
    """Blocks side by side, each metric's numbers apart.

    In arrays that the system lengthens where they are: nothing is ever there twice.
    """

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
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
            if name not in self.series:
                self.series[name], self._columns[name] = Series(name), array("d")
            column = self._columns[name]
            self.series[name].add(block.steps, block.values[:, place])
            _lengthen(column, start)
            column.frombytes(block.values[:, place].tobytes())
        names = set(block.names)
        if joins and before is not None and len(block.steps) == 1:
            names |= before[1]
        self._last = (int(block.steps[-1]), names)

    def arrays(
        self,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], dict[str, NDArray[np.float64]]]:
        """Return steps, times and metrics, (rows,) each."""
        for column in self._columns.values():
            _lengthen(column, len(self._steps))
        return (
            np.frombuffer(self._steps, np.int64),
            np.frombuffer(self._times, np.float64),
            {name: np.frombuffer(column, np.float64) for name, column in self._columns.items()},
        )


def _lengthen(column: array[float], count: int) -> None:
    """Fill a column up with NaN."""
    if len(column) < count:
        column.frombytes(np.full(count - len(column), np.nan).tobytes())


def _blocks(records: Iterable[Mapping[str, Any]]) -> Iterator[Block]:
    names: tuple[str, ...] = ()
    rows: list[Mapping[str, Any]] = []
    for record in records:
        these = tuple(name for name in record if name not in ("step", "time", "replay"))
        if these != names or len(rows) == _ROWS:
            if rows:
                yield _block(names, rows)
            names, rows = these, []
        rows.append(record)
    if rows:
        yield _block(names, rows)


def _block(names: tuple[str, ...], rows: list[Mapping[str, Any]]) -> Block:
    return Block(
        names,
        np.array([row["step"] for row in rows], np.int64),
        np.array([row["time"] for row in rows], np.float64),
        np.array([[row[name] for name in names] for row in rows], np.float64).reshape(
            len(rows), len(names)
        ),
    )


def _attributes(series: Series) -> dict[str, Any]:
    series.settle()
    finite = series.count - series.nan - series.infinite
    found: dict[str, Any] = {"count": finite, "not_finite": series.count - finite}
    if series.mean is not None and series.min is not None and series.max is not None:
        found |= {
            "mean": series.mean, "std": series.std, "min": series.min[1], "max": series.max[1],
        }  # fmt: skip
    return found


def _facts(run: Run) -> dict[str, Any]:
    """Return what the last header says, in types that NetCDF takes."""
    header = run.headers[-1] if run.headers else {}
    facts: dict[str, Any] = {"run": run.name, "path": str(run.path), "attempts": len(run.headers)}
    for name in ("world_size", "machine", "hosts", "git", "versions", "config", "argv"):
        value = header.get(name)
        if value is not None:
            plain = isinstance(value, str | int | float) and not isinstance(value, bool)
            facts[name] = value if plain else json.dumps(value, ensure_ascii=False, default=str)
    return facts
