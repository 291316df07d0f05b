"""All records of a run as arrays, for notebooks."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ezpz_obs._records import Block, Run

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
    dataset = xarray.Dataset(
        coords={"step": steps, "time": ("step", stamps.astype("datetime64[ns]"))},
        attrs=_facts(run) if isinstance(run, Run) else {},
    )
    for name, values in columns.items():
        attributes = _attributes(gathered.series[name])
        dataset[name] = xarray.Variable("step", values, attributes)
    return dataset


class _Columns:
    """Blocks side by side, each metric's numbers apart."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self._pieces: dict[str, list[tuple[int, NDArray[np.float64]]]] = {}
        self._steps: list[NDArray[np.int64]] = []
        self._times: list[NDArray[np.float64]] = []
        self._rows = 0
        self._last: tuple[int, set[str]] | None = None

    def add(self, block: Block) -> None:
        # A block's first record may go with the last before it: train's and eval's of one step.
        joins = (
            self._last is not None
            and self._last[0] == int(block.steps[0])
            and self._last[1].isdisjoint(block.names)
        )
        start = self._rows - int(joins)
        self._steps.append(block.steps[int(joins) :])
        self._times.append(block.times[int(joins) :])
        self._rows = start + len(block.steps)
        for column, name in enumerate(block.names):
            values = np.ascontiguousarray(block.values[:, column])
            if name not in self.series:
                self.series[name], self._pieces[name] = Series(name), []
            self.series[name].add(block.steps, values)
            self._pieces[name].append((start, values))
        before = self._last[1] if joins and len(block.steps) == 1 and self._last else set()
        self._last = (int(block.steps[-1]), before | set(block.names))

    def arrays(
        self,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], dict[str, NDArray[np.float64]]]:
        """Return steps, times and metrics, (rows,) each."""
        columns = {}
        for name in self.series:
            column = np.full(self._rows, np.nan)
            # Taken out as they are copied, so that only one metric is there twice.
            for start, values in self._pieces.pop(name):
                column[start : start + len(values)] = values
            columns[name] = column
        return (
            np.concatenate([np.empty(0, np.int64), *self._steps]),
            np.concatenate([np.empty(0), *self._times]),
            columns,
        )


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
