"""Which rank and which host are slow, from every rank's step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low

from ezpz_dist._ranks import fold

from .timers import in_words

_NAMED = 8
"""Slow ranks, and slow hosts, that a line names."""


@dataclass(frozen=True)
class StragglerReport:
    """One window's step times of all ranks; the same on every rank.

    Medians are low ones: of two ranks the faster is the measure of the other.

    Attributes:
        steps: Steps in the window.
        means: By rank, the mean seconds that it computed in a step.
        maxima: By rank, the seconds of its longest step.
        waits: By rank, the mean seconds of a step in which it waited for others, as far as
            they were measured.
        hosts: By rank, the name of its host.
        threshold: How many times the median counts as slow.
    """

    steps: int
    means: tuple[float, ...]
    maxima: tuple[float, ...]
    waits: tuple[float, ...]
    hosts: tuple[str, ...]
    threshold: float

    @cached_property
    def median(self) -> float:
        """The median of the ranks' means, in seconds."""
        return median_low(self.means)

    @property
    def rank(self) -> int:
        """The slowest rank."""
        return max(range(len(self.means)), key=self.means.__getitem__)

    @property
    def host(self) -> str:
        """The host of the slowest rank."""
        return self.hosts[self.rank]

    @property
    def ratio(self) -> float:
        """The slowest rank's mean as a multiple of the median."""
        return self._ratio(self.means[self.rank])

    @cached_property
    def slow_ranks(self) -> tuple[int, ...]:
        """The ranks above the threshold, slowest first."""
        slow = [r for r, mean in enumerate(self.means) if self._ratio(mean) > self.threshold]
        return tuple(sorted(slow, key=lambda rank: -self.means[rank]))

    @cached_property
    def slow_hosts(self) -> tuple[str, ...]:
        """The hosts of several ranks, all of which are above the threshold, slowest first.

        Then it is the host: its clock, its memory, its network, or what else runs there.
        """
        by_host: dict[str, list[float]] = {}
        for host, mean in zip(self.hosts, self.means, strict=True):
            by_host.setdefault(host, []).append(mean)
        fastest = {host: min(means) for host, means in by_host.items() if len(means) > 1}
        slow = [host for host, mean in fastest.items() if self._ratio(mean) > self.threshold]
        return tuple(sorted(slow, key=lambda host: -fastest[host]))

    @property
    def has_stragglers(self) -> bool:
        """Whether a rank is above the threshold."""
        return bool(self.slow_ranks)

    def __str__(self) -> str:
        """Return it in a line."""
        if len(self.means) == 1:
            return (
                f"rank 0 ({self.host}) {in_words(self.median)} a step, at most "
                f"{in_words(self.maxima[0])}; {self.steps} steps"
            )
        first = (
            f"slowest: rank {self.rank} ({self.host}) {in_words(self.means[self.rank])} a step, "
            f"{self.ratio:.2f} x the median of {len(self.means):,} ranks "
            f"({in_words(self.median)}), at most {in_words(self.maxima[self.rank])}; "
            f"{self.steps} steps"
        )
        return "".join([first, self._more(self.slow_ranks), self._of_hosts()])

    def _more(self, slow: Sequence[int]) -> str:
        if len(slow) < 2:
            return ""
        if len(slow) <= _NAMED:
            return f"; above {self.threshold:g} x: ranks {fold(slow)}"
        return f"; above {self.threshold:g} x: {len(slow):,} ranks"

    def _of_hosts(self) -> str:
        if not self.slow_hosts:
            return ""
        names = ", ".join(self.slow_hosts[:_NAMED]) + " ..." * (len(self.slow_hosts) > _NAMED)
        many = len(self.slow_hosts) > 1
        return f"; every rank of host{'s' * many} {names} is slow"

    def _ratio(self, mean: float) -> float:
        if self.median > 0:
            return mean / self.median
        return float("inf") if mean > 0 else 1.0
