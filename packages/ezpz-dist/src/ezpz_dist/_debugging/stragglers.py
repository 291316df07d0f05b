"""The slowest rank, found while training goes on: one small collective a window."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ezpz_dist._collectives.call import Call
from ezpz_dist._collectives.exchange import exchange, payload_of
from ezpz_dist._collectives.members import find_members
from ezpz_topo import get_hostname

from .backward import BackwardWaits
from .clock import Clock, Mark, clock_for, device_here
from .straggler_report import StragglerReport

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
