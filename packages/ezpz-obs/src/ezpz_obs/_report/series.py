"""A metric's values, and the curve that is drawn of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ezpz_obs._records import STATISTICS
from ezpz_obs._run import Run

Floats = NDArray[np.float64]
POINTS: Final = 400  # of a curve, about one for each pixel of its width on a phone
_FEW: Final = 100  # points that are not smoothed
_WINDOW: Final = 9  # points of a running median
LARGEST: Final = 1e300  # drawn value: plotting libraries need room to compute in


@dataclass(frozen=True)
class Curve:
    """At most `POINTS` points: of each the mean, least and greatest of consecutive values."""

    steps: Floats
    mean: Floats
    least: Floats
    greatest: Floats


@dataclass(frozen=True)
class Series:
    """The steps and values of one metric, as they were recorded."""

    steps: NDArray[np.int64]
    values: Floats

    @property
    def finite(self) -> Floats:
        return self.values[np.isfinite(self.values)]

    @property
    def last(self) -> float | None:
        if not len(self.values):
            return None
        return float(self.values[-1])

    @property
    def mean(self) -> float | None:
        if not len(self.finite):
            return None
        return float(self.finite.mean())

    @property
    def is_counter(self) -> bool:
        """True if it only counts, as an epoch does: whole numbers with one distance."""
        if not np.array_equal(self.values, np.floor(self.values)):
            return False
        distances = np.unique(np.diff(self.values))
        positive = distances[distances != 0]
        return len(positive) == 1 and bool(positive[0] > 0)

    def find_extreme(self, *, greatest: bool) -> tuple[int, float] | None:
        """Return the step and value of the least or greatest finite value; None without one."""
        finite = np.isfinite(self.values)
        if not finite.any():
            return None
        values = self.values[finite]
        place = int(values.argmax() if greatest else values.argmin())
        return int(self.steps[finite][place]), float(values[place])

    def make_curve(self, points: int = POINTS) -> Curve:
        each = max(1, math.ceil(len(self.values) / points))
        starts = np.arange(0, len(self.values), each)
        finite = np.isfinite(self.values)
        numbers = np.clip(np.where(finite, self.values, np.nan), -LARGEST, LARGEST)
        count = np.add.reduceat(finite.astype(float), starts)
        with np.errstate(invalid="ignore"):  # a part without a number has no mean
            part = numbers / np.repeat(count, np.diff(np.append(starts, len(numbers))))
        mean = np.where(count > 0, np.add.reduceat(np.where(finite, part, 0.0), starts), np.nan)
        steps = self.steps.astype(float)
        ends = np.append(starts[1:], len(steps)) - 1
        return Curve(
            (steps[starts] + steps[ends]) / 2,
            mean,
            np.fmin.reduceat(numbers, starts),
            np.fmax.reduceat(numbers, starts),
        )


def read_series(run: Run) -> tuple[dict[str, Series], Series]:
    """Read a run; return its metrics by name, and the times of all records."""
    parts: dict[str, list[Series]] = {}
    times = [Series(np.empty(0, np.int64), np.empty(0))]
    for block in run.blocks():
        times.append(Series(block.steps, block.times))
        for place, name in enumerate(block.names):
            parts.setdefault(name, []).append(Series(block.steps, block.values[:, place]))
    return {name: _concatenate(found) for name, found in parts.items()}, _concatenate(times)


def _concatenate(parts: list[Series]) -> Series:
    steps = np.concatenate([part.steps for part in parts])
    return Series(steps, np.concatenate([part.values for part in parts]))


def group_metrics(series: dict[str, Series], world_size: object) -> dict[str, bool]:
    """Return the metrics, and of each whether there are statistics over ranks (not named)."""
    groups: dict[str, bool] = {}
    for name in series:
        metric, _, statistic = name.rpartition("/")
        is_statistic = statistic in STATISTICS
        if is_statistic and all(f"{metric}/{one}" in series for one in STATISTICS[:4]):
            groups[metric] = world_size != 1  # of one rank they are needless
        else:
            groups.setdefault(name, False)
    return groups


def smooth(values: Floats) -> Floats:
    """Return the running median: it follows steps, corners and both ends, without the noise."""
    known = np.isfinite(values)
    if known.sum() < _FEW:
        return values
    padded = np.pad(values[known], _WINDOW // 2, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)
    smoothed = values.copy()
    smoothed[known] = np.median(windows, axis=1)
    return smoothed
