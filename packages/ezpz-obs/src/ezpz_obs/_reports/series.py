"""One metric of a run, told in a room that does not grow with the run."""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BUCKETS: Final = 2048
"""At most so many are kept; when there are more, each two become one."""

_WAIT: Final = 16_384
COUNT, MEAN, LEAST, GREATEST, LAST, FROM, TO, SIZE = range(8)
"""Rows of `Series.buckets`: how many finite values, their mean, min and max, the last value
(finite or not), the first and last step, how many values of any kind."""


class Series:
    """The values of a metric, met once and in order.

    Exact are the counts, the first and last value, minimum, maximum, mean and standard deviation
    (of the population, of the finite values). The curve is kept as consecutive buckets.

    Args:
        name: The metric's.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        """Values of any kind."""
        self.nan = self.infinite = 0
        self.first_odd: int | None = None
        """The step of the first NaN or infinity."""
        self.first: tuple[int, float] | None = None
        """Step and value, as `last`, `min` and `max`; these two of the finite values."""
        self.last: tuple[int, float] | None = None
        self.min: tuple[int, float] | None = None
        self.max: tuple[int, float] | None = None
        self.ranks: Counter[int] | None = None
        """How often each rank, where this is a ``/min_rank`` or ``/max_rank``."""
        if name.endswith(("/min_rank", "/max_rank")):
            self.ranks = Counter()
        # Wider than double where there is such a thing: squares of 1e200 are numbers too.
        self._mean = self._squares = np.longdouble(0)
        self._finite = 0
        self._width = 1
        self._rows: Floats = np.empty((8, 0))
        self._waiting: list[tuple[NDArray[np.int64], Floats]] = []
        self._waiting_count = 0

    def add(self, steps: NDArray[np.int64], values: Floats) -> None:
        """Take further values; (n,) each."""
        if not len(steps):
            return
        self._waiting.append((steps, values))
        self._waiting_count += len(steps)
        if self._waiting_count >= _WAIT:
            self._settle()

    @property
    def buckets(self) -> Floats:
        """The curve, (8, at most `BUCKETS`): see `COUNT` and those after it."""
        self._settle()
        return self._rows

    @property
    def width(self) -> int:
        """How many values make a bucket."""
        return self._width

    @property
    def mean(self) -> float | None:
        """The mean of the finite values; None where there are none."""
        self._settle()
        return float(self._mean) if self._finite else None

    @property
    def std(self) -> float | None:
        """The standard deviation of the finite values."""
        self._settle()
        return float(np.sqrt(self._squares / self._finite)) if self._finite else None

    def curve(self, points: int) -> Floats:
        """Return the buckets, joined until there are at most so many."""
        rows = self.buckets
        each = -(-rows.shape[1] // points)
        return rows if each <= 1 else _join(rows, np.arange(0, rows.shape[1], each))

    def settle(self) -> None:
        """Count what waits: call it before reading the counts."""
        self._settle()

    def _settle(self) -> None:
        if not self._waiting:
            return
        steps = np.concatenate([steps for steps, _ in self._waiting])
        values = np.concatenate([values for _, values in self._waiting])
        self._waiting.clear()
        self._waiting_count = 0
        finite = np.isfinite(values)
        self._measure(steps, values, finite)
        self._keep(steps, values, finite)
        self.count += len(steps)

    def _measure(self, steps: NDArray[np.int64], values: Floats, finite: NDArray[np.bool_]) -> None:
        if self.first is None:
            self.first = (int(steps[0]), float(values[0]))
        self.last = (int(steps[-1]), float(values[-1]))
        if not finite.all():
            nan = int(np.isnan(values).sum())
            self.nan += nan
            self.infinite += int((~finite).sum()) - nan
            if self.first_odd is None:
                self.first_odd = int(steps[np.argmin(finite)])
            steps, values = steps[finite], values[finite]
            if not len(values):
                return
        least, greatest = int(values.argmin()), int(values.argmax())
        if self.min is None or values[least] < self.min[1]:
            self.min = (int(steps[least]), float(values[least]))
        if self.max is None or values[greatest] > self.max[1]:
            self.max = (int(steps[greatest]), float(values[greatest]))
        if self.ranks is not None:
            of, often = np.unique(values.astype(np.int64), return_counts=True)
            for rank, count in zip(of.tolist(), often.tolist(), strict=True):
                self.ranks[rank] += count
        # Chan's way of joining two means: of deviations, so that 1e5 ± 20 stays exact.
        wide = values.astype(np.longdouble)
        mean, count = wide.mean(), len(wide)
        apart, total = mean - self._mean, self._finite + count
        wide -= mean
        self._squares += (wide * wide).sum() + apart * apart * self._finite * count / total
        self._mean += apart * count / total
        self._finite = total

    def _keep(self, steps: NDArray[np.int64], values: Floats, finite: NDArray[np.bool_]) -> None:
        numbers = values if finite.all() else np.where(finite, values, np.nan)
        ones = np.ones(len(values))
        rows = np.stack([finite, numbers, numbers, numbers, values, steps, steps, ones])
        begun = self.count % self._width
        first = self._width - begun if begun else 0
        starts = np.arange(first, len(values), self._width)
        kept = self._rows
        if begun:
            # The last bucket is not full: it is taken up again.
            rows, kept = np.concatenate([kept[:, -1:], rows], axis=1), kept[:, :-1]
            starts = np.concatenate([[0], starts + 1])
        if self._width > 1:
            rows = _join(rows, starts)
        self._rows = np.concatenate([kept, rows], axis=1)
        while self._rows.shape[1] > BUCKETS:
            self._rows = _join(self._rows, np.arange(0, self._rows.shape[1], 2))
            self._width *= 2


def _join(rows: Floats, starts: NDArray[np.int64]) -> Floats:
    """Return one bucket for all from each start to the next."""
    ends = np.append(starts[1:], rows.shape[1])
    count = np.add.reduceat(rows[COUNT], starts)
    # Each value's part of its mean, rather than sums: those of large numbers have no double.
    part = rows[COUNT] / np.repeat(np.maximum(count, 1), ends - starts)
    mean = np.add.reduceat(np.where(rows[COUNT] > 0, rows[MEAN] * part, 0.0), starts)
    return np.stack(
        [
            count,
            np.where(count > 0, mean, np.nan),
            np.fmin.reduceat(rows[LEAST], starts),
            np.fmax.reduceat(rows[GREATEST], starts),
            rows[LAST, ends - 1],
            np.minimum.reduceat(rows[FROM], starts),
            np.maximum.reduceat(rows[TO], starts),
            np.add.reduceat(rows[SIZE], starts),
        ]
    )
