"""Mean, spread and extreme ranks of metrics, and what differs between ranks, in words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .names import statistic_names

FEW = 16
"""Ranks up to which Python is quicker than numpy: of 2 ranks and 10 metrics, 20 µs against 60."""


def statistics(values: NDArray[np.float64], keys: Sequence[str]) -> dict[str, Any]:
    """Return mean, standard deviation (of the population), least and greatest, and whose they are.

    Args:
        values: (ranks, metrics).
        keys: As of `statistic_names`.
    """
    if len(values) <= FEW:
        found = statistics_of_few(values.tolist(), keys)
        if found is not None:
            return found
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities are allowed
        mean = values.mean(0)
        # Of the deviations from the mean, not of sums of squares: 1e5 ± 20 stays exact.
        std = np.sqrt(np.square(values - mean).mean(0))
    rows = (mean, std, values.min(0), values.max(0), values.argmin(0), values.argmax(0))
    by_metric = zip(*(row.tolist() for row in rows), strict=True)
    return dict(zip(keys, itertools.chain.from_iterable(by_metric), strict=True))


def statistics_of_few(
    rows: Sequence[Sequence[float]], keys: Sequence[str]
) -> dict[str, Any] | None:
    """Return what `statistics` does, or None where a number is not finite.

    Args:
        rows: The metrics of each rank.
        keys: As of `statistic_names`.
    """
    ranks = len(rows)
    numbers: list[float] = []
    for column in zip(*rows, strict=True):
        mean = sum(column) / ranks
        spread = sum([(value - mean) * (value - mean) for value in column])
        if not spread < math.inf:  # NaN is not either
            return None
        least, greatest = min(column), max(column)
        numbers += (
            mean, math.sqrt(spread / ranks), least, greatest,
            column.index(least), column.index(greatest),
        )  # fmt: skip
    return dict(zip(keys, numbers, strict=True))


def by_metric(table: NDArray[np.float64], names: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """Return the statistics where ranks sent different metrics: each over those that have it.

    Args:
        table: (ranks, values): each rank's, in the order of its names.
        names: The sorted names of each rank.
    """
    places = [{name: place for place, name in enumerate(of)} for of in names]
    found: dict[str, Any] = {}
    for name in sorted({name for of in names for name in of}):
        ranks = [rank for rank, of in enumerate(places) if name in of]
        column = np.array([[table[rank, places[rank][name]]] for rank in ranks])
        of_metric = statistics(column, statistic_names([name]))
        for end in ("min_rank", "max_rank"):
            of_metric[f"{name}/{end}"] = ranks[of_metric[f"{name}/{end}"]]
        found |= of_metric
    return found


def other_names(names: Sequence[tuple[str, ...]], hosts: Sequence[str]) -> str:
    everywhere = set(names[0]).intersection(*names[1:])
    different = []
    for name in sorted({name for of in names for name in of} - everywhere):
        having = [rank for rank, of in enumerate(names) if name in of]
        lacking = [rank for rank, of in enumerate(names) if name not in of]
        few, verb = (having, "only") if len(having) <= len(lacking) else (lacking, "not")
        different.append(f"{name!r} {verb} on {_ranks(few, hosts)}")
    shown = ", ".join(different[:5]) + (f" and {len(different) - 5} more" if different[5:] else "")
    return (
        f"metrics differ between ranks: {shown}; expected the same names on every rank: the "
        "statistics of each are of the ranks that have it"
    )


def other_steps(steps: Sequence[int], hosts: Sequence[str]) -> str:
    usual = max(set(steps), key=steps.count)
    others = [rank for rank, step in enumerate(steps) if step != usual]
    at = ", ".join(f"{_ranks([rank], hosts)} at step {steps[rank]}" for rank in others[:5])
    return (
        f"ranks record different steps: {at}, the others at step {usual}; expected one step on "
        "every rank: such records have no statistics"
    )


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    shown = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks[:3])
    return shown + (f" and {len(ranks) - 3} more" if len(ranks) > 3 else "")
