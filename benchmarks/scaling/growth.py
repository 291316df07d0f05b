"""How a cost grows with the size of a job: a curve, the exponent that fits it, and the verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

NODES = (1, 10, 100, 320, 1008, 3200, 10_080)
PER_NODE = 12
"""Aurora: 10,624 nodes of 12 tiles; a job of 10,080 nodes is 120,960 ranks."""

TOLERANCE = 0.1
"""By so much an exponent may lie above its goal: over a thirtyfold, a factor of 1.4."""

LAST = 32
"""The verdict is that of sizes from the largest / LAST on: a fixed cost hides growth below."""

SHARE = 0.2
"""Where what was added since the smallest size is so much of the cost, its growth is fitted too: a
quadratic part of half the cost looks like an exponent of 1 beside the fixed half."""

_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t, two-sided 95 %, by degrees of freedom from 1."""

Kind = Literal["measured", "counted", "model", "extrapolated"]


@dataclass(frozen=True)
class Fit:
    """``cost = c * size ** exponent``, by least squares of the logarithms.

    Attributes:
        exponent: Of the size.
        low: Lower end of its 95 % interval.
        high: Upper end.
    """

    exponent: float
    low: float
    high: float


def fit(points: Sequence[tuple[float, float]]) -> Fit:
    """Fit a power of the size to points of size and cost, each above 0.

    Raises:
        ValueError: There are fewer than two sizes, or a value is not above 0.
    """
    if len({size for size, _ in points}) < 2 or any(min(point) <= 0 for point in points):
        raise ValueError(f"{points}: expected at least two sizes, and values above 0")
    xs = [math.log(size) for size, _ in points]
    ys = [math.log(cost) for _, cost in points]
    slope, start = statistics.linear_regression(xs, ys)
    free = len(points) - 2
    if not free:
        return Fit(slope, slope, slope)
    rest = sum((y - start - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    mean = statistics.fmean(xs)
    error = math.sqrt(rest / free / sum((x - mean) ** 2 for x in xs))
    reach = error * (_T95[free - 1] if free <= len(_T95) else 1.96)
    return Fit(slope, slope - reach, slope + reach)


def _fit_or_none(points: Iterable[tuple[float, float]]) -> Fit | None:
    try:
        return fit(list(points))
    except ValueError:
        return None


@dataclass(frozen=True)
class Curve:
    """One cost over the sizes of a job.

    Attributes:
        section: What it belongs to: detection, planning, groups, ...
        what: The cost, for people.
        unit: Its unit.
        of: What the size counts: nodes or ranks.
        kind: How the points came about; a model's are computed, and said to be.
        points: By size, the samples.
        goal: The largest exponent that was promised: 1 is linear, 0 constant; None is no promise.
        note: What one has to know to read it.
        extrapolated: By size, what the rule of the note gives beyond the points.
        most: What no sample may exceed: a limit of the system; None is no limit.
    """

    section: str
    what: str
    unit: str
    of: Literal["nodes", "ranks"]
    kind: Kind
    points: Mapping[int, Sequence[float]]
    goal: float | None = None
    note: str = ""
    extrapolated: Mapping[int, float] = field(default_factory=dict)
    most: float | None = None

    def at(self, size: int) -> float:
        """Return the median of the samples of a size."""
        return statistics.median(self.points[size])

    @property
    def largest(self) -> int:
        """The largest size that has samples."""
        return max(self.points)

    def fitted(self, last: float = math.inf) -> Fit | None:
        """Return the fit over the sizes within a factor of the largest; None where it has none."""
        return _fit_or_none(
            (float(size), sample)
            for size, samples in self.points.items()
            for sample in samples
            if size * last >= self.largest
        )

    @property
    def added(self) -> Fit | None:
        """The fit of what was added to the smallest size's cost; None where it is not much."""
        smallest = min(self.points)
        fixed = self.at(smallest)
        if not fixed or self.at(self.largest) - fixed < SHARE * self.at(self.largest):
            return None
        return _fit_or_none(
            (float(size - smallest), sample - fixed)
            for size, samples in self.points.items()
            for sample in samples
            # What is lost in the noise of the fixed part says nothing of its growth.
            if size * LAST >= self.largest and min(samples) > max(self.points[smallest])
        )

    @property
    def verdict(self) -> str:
        """``met``, ``MISSED``, ``unclear`` (an interval holds both), or nothing without a goal."""
        if self.most is not None and max(map(max, self.points.values())) > self.most:
            return "MISSED"
        if self.goal is None:
            return "" if self.most is None else "met"
        found = self.fitted(LAST)
        if found is None:
            return "unclear"
        limit = self.goal + TOLERANCE
        # Growth that shall be none is seen in the whole cost; what else grows, without the fixed.
        added = self.added if self.goal else None
        if found.low > limit or (added and added.low > limit):
            return "MISSED"
        # Its interval is wide: of the largest sizes alone there is much to be seen.
        is_met = found.high <= limit and (added is None or added.exponent <= limit)
        return "met" if is_met else "unclear"

    def to_json(self) -> dict[str, Any]:
        """Return what JSON can hold, the fits and the verdict with it."""
        whole, last, added = self.fitted(), self.fitted(LAST), self.added
        return {
            **asdict(self),
            "points": {str(size): list(samples) for size, samples in self.points.items()},
            "extrapolated": {str(size): cost for size, cost in self.extrapolated.items()},
            "fit": whole and asdict(whole),
            "fit_of_the_last": last and asdict(last),
            "fit_of_what_was_added": added and asdict(added),
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Fact:
    """One figure that is no curve: what every rank does, or what all of them add up to."""

    section: str
    what: str
    value: float
    unit: str
    kind: Kind = "measured"
    note: str = ""


@dataclass(frozen=True)
class Absent:
    """What could not be measured here, and why."""

    section: str
    what: str
    why: str


Found = Curve | Fact | Absent


def sampled(
    sizes: Sequence[int], runs: int, measure: Callable[[int], float]
) -> dict[int, list[float]]:
    """Measure each size so often, all sizes in turn: a machine that slows down slows all alike."""
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(runs):
        for size in sizes:
            taken[size].append(measure(size))
    return taken
