"""The slowest rank, found while training goes on: one small collective a window."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low

import torch

from ezpz_topo import get_hostname

from ._errors import fold
from ._members import Call, exchange, find_members, payload_of
from ._timers import BackwardWaits, Clock, Mark, clock_for, device_here, in_words

# Which rank and which host are slow, from every rank's step times.

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


# The slowest rank, found while training goes on: one small collective a window.

logger = logging.getLogger(__name__)

_Span = tuple[Clock, Mark, Mark]

_TIMES = struct.Struct("=3d")
"""Mean, maximum and mean wait of a window's steps."""


class _Step:
    """The spans of one step, whose lengths may be known later only: a device works on its own.

    Attributes:
        whole: From the last step's end to this one's.
        computed: What the caller says is the rank's own work; if any, it alone counts.
        waited: What it spent waiting for others.
    """

    def __init__(self, whole: _Span, computed: list[_Span], waited: list[_Span]) -> None:
        self.whole, self.computed, self.waited = whole, computed, waited

    def seconds(self) -> tuple[float, float]:
        """Return how long it computed, and how long it waited."""
        waited = _sum(self.waited)
        own = _sum(self.computed) if self.computed else _sum([self.whole]) - waited
        return max(0.0, own), waited


class Stragglers:
    """Names the slowest rank, and the slowest host, over windows of steps.

        stragglers = Stragglers(model)      # the model that is called: DDP's wrapper
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
            stragglers.step()

    In synchronous training every rank's step takes equally long, because the fast ones wait
    for the slow one: what differs is how long each computes. So of each step the time is
    taken in which the rank has work of its own, data loading included:

    - With ``model``, the wait for gradients at the end of each backward of
      DistributedDataParallel is left out by itself. Nothing is sent or waited for to
      measure it; on CUDA and XPU events are recorded.
    - What else waits for other ranks, `all_reduce` of a loss or a barrier, belongs in
      ``with stragglers.communication():``.
    - FSDP and tensor parallelism wait for others inside forward and backward, which cannot
      be taken apart from here: put what does not communicate (data loading, a part of the
      model) into ``with stragglers.compute():``, which then alone counts. So it is for a DDP
      model with buffers, whose forward waits for rank 0, if rank 0 may be slow.

    Every ``window`` steps there is one small collective. Rank 0 logs a warning if a rank
    is above the threshold.

    Args:
        model: The model that is called in each step; None: nothing is left out by itself.
        window: Steps of which the mean is taken.
        threshold: How many times the median counts as slow.

    Attributes:
        report: The last window's, the same on every rank; None before there is one.

    Raises:
        ValueError: ``window`` is below 1, or ``threshold`` not above 1.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, *, window: int = 50, threshold: float = 1.2
    ) -> None:
        if window < 1 or not threshold > 1:
            raise ValueError(
                f"Stragglers(window={window}, threshold={threshold}); expected a window of at "
                "least 1 step and a threshold above 1"
            )
        self.report: StragglerReport | None = None
        self._window, self._threshold = window, threshold
        self._backward = None if model is None else BackwardWaits(model)
        self._steps: list[_Step] = []
        self._seconds: list[tuple[float, float]] = []
        self._computed: list[_Span] = []
        self._waited: list[_Span] = []
        self._last: tuple[Clock, Mark] | None = None

    def step(self) -> StragglerReport | None:
        """Say that a step is over; every ``window`` steps return a report.

        Collective once a window: every rank calls this at the end of each step. The first
        call only starts the clock: a loop's first step warms up.

        Raises:
            NotSetUpError: There are several ranks and `setup_torch` was not called.
            HangError: A rank did not come to the exchange.
            MismatchError: Other ranks called something else, or have another window.
        """
        clock, now = self._now()
        if self._last is not None and self._last[0] is clock:
            waited = [*self._waited, *(self._backward.waits if self._backward else ())]
            span = (clock, self._last[1], now)
            self._steps.append(_Step(span, self._computed, waited))
        self._begin((clock, now))
        return self._report()

    def record(self, seconds: float) -> StragglerReport | None:
        """Count a step that the caller has measured, instead of `step`.

        Collective once a window: every rank calls this at the end of each step.

        Args:
            seconds: How long this rank computed, without waiting for others.

        Raises:
            NotSetUpError: As `step`.
            HangError: As `step`.
        """
        self._seconds.append((seconds, 0.0))
        return self._report()

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Count only what is done in here; where a step has several, their sum."""
        clock, start = self._now()
        yield
        self._computed.append((clock, start, clock.mark()))

    @contextmanager
    def communication(self) -> Iterator[None]:
        """Leave out what is done in here: it waits for other ranks."""
        clock, start = self._now()
        yield
        self._waited.append((clock, start, clock.mark()))

    def close(self) -> None:
        """Take our hook off the model."""
        if self._backward is not None:
            self._backward.remove()

    def _now(self) -> tuple[Clock, Mark]:
        clock = clock_for(device_here(), exact=False)
        return clock, clock.mark()

    def _begin(self, at: tuple[Clock, Mark]) -> None:
        self._last = at
        # New lists: the step that has ended keeps the old ones.
        self._computed, self._waited = [], []
        if self._backward is not None:
            self._backward.waits = []

    def _report(self) -> StragglerReport | None:
        if len(self._steps) + len(self._seconds) < self._window:
            return None
        times = [*self._seconds, *(step.seconds() for step in self._steps)]
        self._seconds.clear()
        self._steps.clear()
        own = [seconds for seconds, _ in times]
        waited = sum(seconds for _, seconds in times)
        mine = _TIMES.pack(sum(own) / len(own), max(own), waited / len(own))
        call = Call(f"Stragglers(window={self._window}).step()")
        members = find_members(call.name, None)
        rows, hosts = [_TIMES.unpack(mine)], [get_hostname()]
        if members is not None:
            every = exchange(call, members, mine)
            rows = [_TIMES.unpack_from(payload_of(place, every)) for place in members.ranks]
            hosts = [members.world.hosts[rank] for rank in members.ranks]
        means, maxima, waits = zip(*rows, strict=True)
        self.report = StragglerReport(len(own), means, maxima, waits, tuple(hosts), self._threshold)
        if self.report.has_stragglers and (members is None or members.world.info.rank == 0):
            logger.warning("%s", self.report)
        if self._last is not None:
            # The exchange itself is nobody's step.
            self._begin(self._now())
        return self.report


def _sum(spans: list[_Span]) -> float:
    return sum(clock.seconds(start, end) for clock, start, end in spans)
