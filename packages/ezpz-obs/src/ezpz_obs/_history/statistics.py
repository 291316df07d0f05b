"""Mean, spread and extreme ranks of metrics, and what differs between ranks, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

STATISTICS = ("mean", "std", "min", "max", "min_rank", "max_rank")
"""What follows a metric's name: ``loss/mean``, ..."""

_sum, _least, _greatest = np.add.reduce, np.minimum.reduce, np.maximum.reduce


def statistics(values: NDArray[np.float64], keys: Sequence[str]) -> dict[str, Any]:
    """Return mean, standard deviation (of the population), least and greatest, and whose they are.

    Args:
        values: (ranks, metrics).
        keys: As of `statistic_names`.
    """
    ranks = len(values)
    # Reductions by name, which are three times as quick as the methods for a few numbers.
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinities are allowed
        mean = _sum(values, 0) / ranks
        # Of the deviations from the mean, not of sums of squares: 1e5 ± 20 stays exact.
        apart = values - mean
        std = np.sqrt(_sum(apart * apart, 0) / ranks)
    numbers = np.concatenate((mean, std, _least(values, 0), _greatest(values, 0))).tolist()
    whose = np.concatenate((values.argmin(0), values.argmax(0))).tolist()
    return dict(zip(keys, numbers + whose, strict=True))


def statistic_names(metrics: Sequence[str]) -> list[str]:
    """Return ``loss/mean``, ... for all metrics, statistic by statistic."""
    return [f"{name}/{statistic}" for statistic in STATISTICS for name in metrics]


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
