"""How long steps took, by the times of the records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_WAIT: Final = 16_384
_DECADES: Final = (-7, 7)
_PER_DECADE: Final = 200
_PAUSES: Final = 5

EDGES: Final = np.logspace(*_DECADES, (_DECADES[1] - _DECADES[0]) * _PER_DECADE + 1)
"""Of the histogram's bins, in seconds; each is 1.2 % wide."""


@dataclass
class Reached:
    """What one attempt recorded, as far as no later one superseded it."""

    records: int = 0
    first_step: int | None = None
    last_step: int | None = None
    last_time: float | None = None


class StepTimes:
    """Seconds a step, of all records of a run, met once and in order.

    Between the first records of two steps; where only one step in so many is recorded, their
    time divided by the steps. What lies between two attempts is no step.

    Args:
        begins: When each attempt began: seconds since 1970.
    """

    def __init__(self, begins: list[float]) -> None:
        self.histogram: NDArray[np.int64] = np.zeros(len(EDGES) - 1, np.int64)
        """How many steps took so long, by `EDGES`."""
        self.pauses: list[tuple[float, int]] = []
        """The longest: seconds, and the step that came after."""
        self.attempts = [Reached() for _ in begins] or [Reached()]
        self._begins = np.maximum.accumulate(np.array(begins[1:], np.float64))
        self._waiting: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        self._waiting_count = 0
        self._before: tuple[int, float] | None = None

    def add(self, steps: NDArray[np.int64], times: NDArray[np.float64]) -> None:
        """Take the steps and times of further records; (n,) each."""
        self._waiting.append((steps, times))
        self._waiting_count += len(steps)
        if self._waiting_count >= _WAIT:
            self.settle()

    def settle(self) -> None:
        """Count what waits: call it before reading anything."""
        if not self._waiting:
            return
        steps = np.concatenate([steps for steps, _ in self._waiting])
        times = np.concatenate([times for _, times in self._waiting])
        self._waiting.clear()
        self._waiting_count = 0
        attempts = np.searchsorted(self._begins, times, side="right")
        self._reach(steps, times, attempts)
        if self._before is not None:
            steps = np.concatenate([[self._before[0]], steps])
            times = np.concatenate([[self._before[1]], times])
        attempts = np.searchsorted(self._begins, times, side="right")
        other = (np.diff(steps) != 0) | (np.diff(attempts) != 0)
        new = np.flatnonzero(np.concatenate([[True], other]))
        steps, times, attempts = steps[new], times[new], attempts[new]
        self._before = (int(steps[-1]), float(times[-1]))
        apart, took = np.diff(steps), np.diff(times)
        told = (apart > 0) & (took >= 0) & (np.diff(attempts) == 0)
        took, apart, after = took[told], apart[told], steps[1:][told]
        if len(took):
            self.histogram += np.histogram(np.clip(took / apart, EDGES[0], EDGES[-1]), EDGES)[0]
            longest = np.argsort(took)[-_PAUSES:]
            found = zip(took[longest].tolist(), after[longest].tolist(), strict=True)
            self.pauses = sorted([*self.pauses, *found], reverse=True)[:_PAUSES]

    def _reach(
        self,
        steps: NDArray[np.int64],
        times: NDArray[np.float64],
        attempts: NDArray[np.intp],
    ) -> None:
        for attempt in np.unique(attempts).tolist():
            of = attempts == attempt
            reached = self.attempts[attempt]
            reached.records += int(of.sum())
            if reached.first_step is None:
                reached.first_step = int(steps[of][0])
            reached.last_step = int(steps[of][-1])
            reached.last_time = float(times[of][-1])

    @property
    def count(self) -> int:
        """How many times there are."""
        return int(self.histogram.sum())

    def reach(self, part: float) -> tuple[int, int]:
        """Return the first bin that has some, and the last that this part of all needs."""
        last = int(np.searchsorted(np.cumsum(self.histogram), part * self.count))
        return int(np.flatnonzero(self.histogram)[0]), last

    def quantile(self, part: float) -> float | None:
        """Return the seconds that this part of the steps took at most, to within 1 %."""
        if not self.count:
            return None
        bin_ = int(np.searchsorted(np.cumsum(self.histogram), part * self.count))
        bin_ = min(bin_, len(self.histogram) - 1)
        return float(np.sqrt(EDGES[bin_] * EDGES[bin_ + 1]))
