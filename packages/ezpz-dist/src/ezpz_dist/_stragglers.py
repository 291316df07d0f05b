"""The slowest rank, found while training goes on: one small collective a window."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low
from typing import Any, NamedTuple

import torch

from ezpz_device import Clock
from ezpz_topo import get_hostname

from ._errors import fold
from ._members import Call, exchange, find_members, payload_of
from ._timers import Span, clock_here, in_words

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
        slow, hosts = self.slow_ranks, self.slow_hosts
        if len(slow) > 1:
            which = f"ranks {fold(slow)}" if len(slow) <= _NAMED else f"{len(slow):,} ranks"
            first += f"; above {self.threshold:g} x: {which}"
        if hosts:
            names = ", ".join(hosts[:_NAMED]) + " ..." * (len(hosts) > _NAMED)
            first += f"; every rank of host{'s' * (len(hosts) > 1)} {names} is slow"
        return first

    def _ratio(self, mean: float) -> float:
        if self.median > 0:
            return mean / self.median
        return float("inf") if mean > 0 else 1.0


# The part of a backward in which a rank only waits for the others' gradients.


class BackwardWaits:
    """Measures, in each backward of a model, from its last gradient to the end of the wait."""

    # DistributedDataParallel waits for its all-reduces in a callback that autograd's engine runs
    # when the whole backward is done (torch 2.6 to 2.13: reducer.cpp, finalize_backward). A
    # callback of ours that is queued when the backward begins runs before it; one that this one
    # queues runs after it.

    def __init__(self, model: torch.nn.Module) -> None:
        self.waits: list[Span] = []
        self._is_queued = False
        self._hook = model.register_forward_hook(self._after_forward)

    def remove(self) -> None:
        self._hook.remove()

    def _after_forward(self, _model: torch.nn.Module, _arguments: Any, output: Any) -> None:
        # A backward that failed has not run its callbacks.
        self._is_queued = False
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._at_backward)

    def _at_backward(self, _gradient: torch.Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            _at_end(self._when_computed)

    def _when_computed(self) -> None:
        self._is_queued = False
        clock = clock_here()
        start = clock.mark()
        _at_end(lambda: self.waits.append((clock, start, clock.mark())))


def _at_end(callback: Any) -> None:
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001  # as FSDP itself does
    engine.queue_callback(callback)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model's output: of mappings and sequences, however deep."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (Mapping, list, tuple)):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(part)


# Windows of steps.

logger = logging.getLogger(__name__)

_TIMES = struct.Struct("=3d")
"""Mean, maximum and mean wait of a window's steps."""


class _Step(NamedTuple):
    """The spans of one step, whose lengths a device may tell only later."""

    whole: Span
    computed: list[Span]
    waited: list[Span]

    def seconds(self) -> tuple[float, float]:
        """Return how long it computed (what the caller marked so, if any), and how long waited."""
        waited = _sum(self.waited)
        own = _sum(self.computed) if self.computed else _sum([self.whole]) - waited
        return max(0.0, own), waited


def _now() -> tuple[Clock, Any]:
    clock = clock_here()
    return clock, clock.mark()


def _sum(spans: list[Span]) -> float:
    return sum(clock.seconds(start, end) for clock, start, end in spans)


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
        self._computed: list[Span] = []
        self._waited: list[Span] = []
        self._last: tuple[Clock, Any] | None = None

    def step(self) -> StragglerReport | None:
        """Say that a step is over; every ``window`` steps return a report.

        Collective once a window: every rank calls this at the end of each step. The first
        call only starts the clock: a loop's first step warms up.

        Raises:
            NotSetUpError: There are several ranks and `setup_torch` was not called.
            HangError: A rank did not come to the exchange.
            MismatchError: Other ranks called something else, or have another window.
        """
        clock, now = _now()
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
        clock, start = _now()
        yield
        self._computed.append((clock, start, clock.mark()))

    @contextmanager
    def communication(self) -> Iterator[None]:
        """Leave out what is done in here: it waits for other ranks."""
        clock, start = _now()
        yield
        self._waited.append((clock, start, clock.mark()))

    def close(self) -> None:
        """Take our hook off the model."""
        if self._backward is not None:
            self._backward.remove()

    def _begin(self, at: tuple[Clock, Any]) -> None:
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
        mine = sum(own) / len(own), max(own), waited / len(own)
        call = Call(f"Stragglers(window={self._window}).step()")
        members = find_members(call.name, None)
        rows, hosts = [mine], [get_hostname()]
        if members is not None:
            every = exchange(call, members, _TIMES.pack(*mine))
            rows = [_TIMES.unpack_from(payload_of(place, every)) for place in members.ranks]
            hosts = [members.world.hosts[rank] for rank in members.ranks]
        means, maxima, waits = zip(*rows, strict=True)
        self.report = StragglerReport(len(own), means, maxima, waits, tuple(hosts), self._threshold)
        if self.report.has_stragglers and (members is None or members.world.info.rank == 0):
            logger.warning("%s", self.report)
        if self._last is not None:
            # The exchange itself belongs to no step.
            self._begin(_now())
        return self.report
