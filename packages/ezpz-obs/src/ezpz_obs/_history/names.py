"""What statistics over ranks are called."""

from __future__ import annotations

from collections.abc import Collection, Iterable

STATISTICS = ("mean", "std", "min", "max", "min_rank", "max_rank")
"""What follows a metric's name: ``loss/mean``, ..."""


def statistic_names(metrics: Iterable[str]) -> list[str]:
    """Return ``loss/mean``, ``loss/std``, ... metric by metric."""
    return [f"{name}/{statistic}" for name in metrics for statistic in STATISTICS]


def refuse_statistics(metrics: Collection[str]) -> None:
    """Refuse metrics whose names those of statistics would be.

    Raises:
        ValueError: There is one, such as ``loss/mean`` beside ``loss``.
    """
    for name in metrics:
        of, _, statistic = name.rpartition("/")
        if statistic in STATISTICS and of in metrics:
            raise ValueError(
                f"a metric called {name!r} beside {of!r}; expected another name: cross_rank=True "
                f"writes the {statistic} of {of!r} under that one"
            )
