"""One update of `History` on its way between the ranks: gathered, or reduced."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .statistics import (
    FEW,
    by_metric,
    other_names,
    other_steps,
    statistics,
    statistics_of_few,
)

if TYPE_CHECKING:
    from .across import Across
    from .reduced import Sent

HEAD = 4
"""What each rank sends before its values: digest of their names, how many, step, bytes of names."""


class Answer(NamedTuple):
    """What came of one exchange."""

    values: dict[str, Any]
    """``{"loss/mean": .., "loss/std": .., ...}``; empty where the ranks were at different steps."""
    warning: str | None
    """What differs between ranks, in words; said once for each difference."""


class Plan(NamedTuple):
    """What does not change while the same names are recorded in the same order."""

    names: tuple[str, ...]
    order: list[str]
    head: tuple[float, int]
    text: bytes
    keys: list[str]


class Exchange:
    """One update on its way to the others."""

    def __init__(self, across: Across, plan: Plan, mine: list[Any], step: int, work: Any) -> None:
        self._across, self._plan, self._mine = across, plan, mine
        self._step, self._work = step, work

    def end(self, seconds: float | None = None) -> Answer:
        """Wait for the other ranks. Collective.

        Args:
            seconds: At most so long.

        Raises:
            HistoryError: A rank did not come; it is named, with its host and last step.
        """
        across, plan, step = self._across, self._plan, self._step
        table = across.receive(self._work, step, seconds)
        found = self._alike(table)
        if found is not None:
            return Answer(found, None)
        most = int(table[:, 1].max())
        if most > across.fits:
            # All ranks see that, make room, and send once more.
            across.make_room(max(most, 2 * across.fits))
            return across.begin(step, dict(zip(plan.order, self._mine, strict=True))).end(seconds)
        steps = table[:, 2].astype(np.int64).tolist()
        across.last_steps = steps
        names = across.names_of(table, plan)
        if len(set(steps)) > 1:
            new = across.is_new(tuple(other - steps[0] for other in steps))
            return Answer({}, other_steps(steps, across.hosts) if new else None)
        new = across.is_new(tuple(table[:, 0].tolist()))
        values = by_metric(table[:, HEAD:], names)
        return Answer(values, other_names(names, across.hosts) if new else None)

    def _alike(self, table: NDArray[np.float64]) -> dict[str, Any] | None:
        """Return the statistics where all ranks sent the same metrics of the same step."""
        across, plan = self._across, self._plan
        count = len(plan.order)
        if count > across.fits:  # nobody has sent so many
            return None
        if across.ranks <= FEW:
            rows = table[:, : HEAD + count].tolist()
            head = rows[0][:3]
            alike = all(row[:3] == head for row in rows)
        else:
            alike = bool((table[:, :3] == table[0, :3]).all())
        if not alike:
            return None
        across.last_steps = [self._step] * across.ranks
        found = None
        if across.ranks <= FEW:
            found = statistics_of_few([row[HEAD:] for row in rows], plan.keys)
        return found or statistics(table[:, HEAD : HEAD + count], plan.keys)


class Reduced:
    """One update on its way, by all-reduces."""

    def __init__(self, across: Across, plan: Plan, mine: list[Any], step: int, sent: Sent) -> None:
        self._across, self._plan, self._mine = across, plan, mine
        self._step, self._sent = step, sent

    def end(self, seconds: float | None = None) -> Answer:
        """Do what `Exchange.end` does."""
        across, plan, step = self._across, self._plan, self._step
        assert across.reduction is not None
        until = time.monotonic() + (seconds or 0.0)

        def left() -> float | None:
            return None if seconds is None else max(until - time.monotonic(), 0.001)

        found = across.reduction.end(self._sent, lambda work: across.wait(work, step, left()))
        if found is None:
            # Every rank finds that, and all gather: who differs is named, and whose number is NaN.
            return across.gather(plan, self._mine, step).end(left())
        across.last_steps = [step] * across.ranks
        return Answer(dict(zip(plan.keys, found, strict=True)), None)
