"""Timers that know that devices work asynchronously, and which rank is the slowest."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median_low
from typing import Any, ParamSpec, Self, TypeVar, cast

import torch

from ezpz_device import Clock, find_clock
from ezpz_topo import get_hostname, get_rank

from ._errors import fold, grouped
from ._members import Call, exchange, find_members, payload_of
from ._world import find_world

Span = tuple[Clock, Any, Any]  # a clock, and its marks at a start and an end


def clock_here(device: torch.device | None = None, *, synchronize: bool = False) -> Clock:
    """Return a device's clock; default: this rank's, before set-up what torch already uses."""
    world = find_world()
    where = world.device if device is None and world is not None else device
    return find_clock(where, synchronize=synchronize) or cast("Clock", find_clock("cpu"))


def in_words(seconds: float) -> str:
    if abs(seconds) >= 999.5:
        return f"{seconds:,.0f} s"
    # As it will be shown: 999.6 us are a millisecond.
    size = abs(float(f"{seconds:.3g}"))
    scale, unit = (1.0, "s") if size >= 1 else (1e3, "ms") if size >= 1e-3 else (1e6, "us")
    return f"{seconds * scale:.3g} {unit}"


# The time of a function or a block, logged by one rank.

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def timed(
    name: str, rank: int | None = None, *, level: int = logging.INFO, log: logging.Logger = logger
) -> Iterator[Timer]:
    """Log how long a block took, on one rank; yields its `Timer`.

    The device is waited for before and after, on that rank alone: the time is that of the
    work, not of putting it into a queue.

    Args:
        name: What to call it.
        rank: Which rank measures and logs; default: rank 0.
        level: A level of `logging`.
        log: Where to.
    """
    world = find_world()
    here = get_rank() if world is None else world.info.rank
    timer = Timer(name, enabled=here == (rank or 0))
    failed = ""
    try:
        with timer:
            yield timer
    except BaseException as error:
        failed = f" and raised {type(error).__name__}"
        raise
    finally:
        if timer.enabled and timer.timing.count:
            took = in_words(timer.timing.last)
            log.log(level, "%s took %s on rank %d%s", name, took, here, failed)


def timeitlogit(
    rank: int | None = None, *, level: int = logging.INFO
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Log how long each call of a function takes, on one rank.

    ``@timeitlogit()`` logs on rank 0. ``@timeitlogit(rank=ezpz.get_rank())`` names each rank
    itself, so that all of them log; a logger that shows rank 0's lines only shows one.

    The line comes from the logger of the function's module. The device is waited for before
    and after, on the rank that logs. Of an ``async def`` the time until it returns is taken.

    Args:
        rank: Which rank measures and logs; default: rank 0.
        level: A level of `logging`.

    Raises:
        TypeError: The function is a generator: its call ends before its work begins.
    """
    if callable(rank):
        raise TypeError(
            f"@timeitlogit on {getattr(rank, '__name__', rank)}; expected @timeitlogit()"
        )

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = getattr(function, "__qualname__", repr(function))
        log = logging.getLogger(function.__module__)
        each = partial(timed, name, rank, level=level, log=log)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"timeitlogit of the generator {name}; expected a function: a generator's call "
                "returns before its work begins; time what consumes it, in `with timed(...)`"
            )

        if not inspect.iscoroutinefunction(function):
            return each()(function)

        @functools.wraps(function)
        async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
            with each():
                return await function(*args, **kwargs)

        return cast("Callable[P, R]", awaited)

    return decorate


# Timers that add up what they measure.


@dataclass(frozen=True, slots=True)
class Timing:
    """What a timer has measured.

    Attributes:
        count: How many times.
        total: Seconds in all.
        mean: Seconds of one; NaN where there is none, as for the next three.
        min: Seconds of the shortest.
        max: Seconds of the longest.
        last: Seconds of the last.
    """

    count: int
    total: float
    mean: float
    min: float
    max: float
    last: float

    def __str__(self) -> str:
        if not self.count:
            return "not used"
        return (
            f"{self.count} x {in_words(self.mean)} ({in_words(self.min)} to {in_words(self.max)}), "
            f"{in_words(self.total)} in all"
        )


class Timer:
    """A context manager that measures what stands in it, again and again.

    >>> timer = Timer("forward")
    >>> with timer:
    ...     _ = sum(range(1000))
    >>> timer.timing.count
    1

    May be nested in itself. What ends in an exception counts too. For one thread. Disabled it
    costs less than a microsecond, on a CPU a few.

    Args:
        name: What it measures; an attribute too, as is ``enabled``.
        synchronize: Wait for the device before and after: the time is exact, and the queue
            runs empty. False: CUDA and XPU events are recorded instead, and read later.
        enabled: Whether it measures.
        device: What the work runs on; default: this rank's device.
    """

    def __init__(
        self, name: str = "", *, synchronize: bool = True, enabled: bool = True,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        self.name: str = name
        self.enabled: bool = enabled
        self._device = None if device is None else torch.device(device)
        self._synchronize = synchronize
        self._open: list[tuple[Clock, Any] | None] = []
        self._pending: deque[Span] = deque()
        self.reset()

    def reset(self) -> None:
        """Forget what has been measured; what is being measured goes on."""
        self._pending.clear()
        self._count, self._total, self._last = 0, 0.0, math.nan
        self._min, self._max = math.inf, -math.inf

    @property
    def timing(self) -> Timing:
        """What has been measured; waits for a device that is not through with it."""
        self._settle(wait=True)
        if not self._count:
            return Timing(0, 0.0, *[math.nan] * 4)
        mean = self._total / self._count
        return Timing(self._count, self._total, mean, self._min, self._max, self._last)

    def __enter__(self) -> Self:
        if not self.enabled:
            self._open.append(None)
            return self
        clock = clock_here(self._device, synchronize=self._synchronize)
        self._open.append((clock, clock.mark()))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        begun = self._open.pop()
        if begun is None:
            return
        clock, start = begun
        # A device that has failed cannot be asked, and the first error is the better one.
        with suppress(RuntimeError) if kind else nullcontext():
            self._pending.append((clock, start, clock.mark()))
        self._settle(wait=False)

    def _settle(self, *, wait: bool) -> None:
        while self._pending and (wait or self._pending[0][0].has_passed(self._pending[0][2])):
            clock, start, end = self._pending.popleft()
            self._last = seconds = clock.seconds(start, end)
            self._count += 1
            self._total += seconds
            self._min, self._max = min(self._min, seconds), max(self._max, seconds)


class Timers:
    """Timers by name, made when they are first used.

    >>> timers = Timers()
    >>> with timers("step"):
    ...     with timers("forward"):
    ...         pass
    >>> sorted(timers.timings())
    ['forward', 'step']

    ``print(timers)`` shows a table. The arguments are those of `Timer`, for all of them.
    """

    def __init__(
        self, *, synchronize: bool = True, enabled: bool = True,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        self._timers: dict[str, Timer] = {}
        self._make = partial(Timer, synchronize=synchronize, device=device)
        self._enabled = enabled

    def __call__(self, name: str) -> Timer:
        if name not in self._timers:
            self._timers[name] = self._make(name, enabled=self._enabled)
        return self._timers[name]

    def __iter__(self) -> Iterator[Timer]:
        return iter(self._timers.values())

    @property
    def enabled(self) -> bool:
        """Whether they measure; set it for all of them."""
        return self._enabled

    @enabled.setter
    def enabled(self, on: bool) -> None:
        self._enabled = on
        for timer in self:
            timer.enabled = on

    def timings(self) -> dict[str, Timing]:
        """Return what each has measured, by name."""
        return {timer.name: timer.timing for timer in self}

    def reset(self) -> None:
        """Forget what they have measured."""
        for timer in self:
            timer.reset()

    def __str__(self) -> str:
        width = max((len(timer.name) for timer in self), default=0)
        return "\n".join(f"{timer.name:<{width}}  {timer.timing}" for timer in self)


# The slowest rank, found while training goes on: one small collective a window.

_NAMED = 8  # slow ranks, and slow hosts, that a line names


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
        by_host = grouped(zip(self.hosts, self.means, strict=True))
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
        return math.inf if mean > 0 else 1.0


def _at_end(callback: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001  # as FSDP does


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (Mapping, list, tuple)):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(part)


# Windows of steps.

_TIMES = struct.Struct("=3d")  # mean, maximum and mean wait of a window's steps


_Step = tuple[Span, list[Span], list[Span]]
"""All of it, what was computed (where the caller marks it), and what was waited: a device may tell
how long these were only later."""


def _seconds(step: _Step) -> tuple[float, float]:
    whole, computed, waits = step
    waited = _sum(waits)
    return max(0.0, _sum(computed) if computed else _sum([whole]) - waited), waited


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
    for the slow one. So of each step the time is taken in which the rank has work of its own,
    data loading included:

    - With ``model``, the wait for gradients at the end of each backward of
      DistributedDataParallel is left out by itself; on CUDA and XPU by events.
    - What else waits for other ranks, `all_reduce` of a loss or a barrier, belongs in
      ``with stragglers.communication():``.
    - FSDP and tensor parallelism wait for others inside forward and backward, which cannot
      be separated from here. Put what does not communicate (data loading, a part of the
      model) into ``with stragglers.compute():``, which then alone counts. The same holds for a
      DDP model with buffers, whose forward waits for rank 0, if rank 0 may be slow.

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
        self._steps: list[_Step] = []
        self._computed: list[Span] = []
        self._waited: list[Span] = []
        self._is_queued = False
        self._hook = None if model is None else model.register_forward_hook(self._after_forward)
        self._last: tuple[Clock, Any] | None = None

    def step(self) -> StragglerReport | None:
        """Say that a step is over; every ``window`` steps return a report.

        Collective once a window: every rank calls this at the end of each step. The first
        call only starts the clock: a loop's first step warms up.

        Raises:
            HangError, NotSetUpError: As of `barrier`.
            MismatchError: Other ranks called something else, or have another window.
        """
        clock, now = _now()
        if self._last is not None and self._last[0] is clock:
            span = (clock, self._last[1], now)
            self._steps.append((span, self._computed.copy(), self._waited.copy()))
        self._begin((clock, now))
        return self._report()

    def record(self, seconds: float) -> StragglerReport | None:
        """Count a step that the caller has measured, instead of `step`.

        Collective once a window: every rank calls this at the end of each step.

        Args:
            seconds: How long this rank computed, without waiting for others.

        Raises:
            NotSetUpError, HangError: As `step`.
        """
        host = clock_here(torch.device("cpu"))
        self._steps.append(((host, 0.0, seconds), [], []))
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
        if self._hook is not None:
            self._hook.remove()

    # The wait for gradients, from a backward's last one to the end of the wait: DDP waits for its
    # all-reduces in a callback that autograd's engine runs after the backward (torch 2.6 to 2.13:
    # reducer.cpp, finalize_backward). A callback of ours that is queued when the backward begins
    # runs before it; one that this one queues, after it.

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
        clock, start = _now()
        _at_end(lambda: self._waited.append((clock, start, clock.mark())))

    def _begin(self, at: tuple[Clock, Any]) -> None:
        self._last = at
        self._computed.clear()
        self._waited.clear()

    def _report(self) -> StragglerReport | None:
        if len(self._steps) < self._window:
            return None
        times = list(map(_seconds, self._steps))
        self._steps.clear()
        own = [seconds for seconds, _ in times]
        mine = sum(own) / len(own), max(own), sum(waited for _, waited in times) / len(own)
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
