"""Timers that know that devices work asynchronously."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, Self, TypeVar, cast

import torch

from ezpz_device import Clock, find_clock
from ezpz_topo import get_rank

from ._world import find_world

Span = tuple[Clock, Any, Any]  # a clock, and its marks at a start and an end


def find_own_clock(device: torch.device | None = None, *, synchronize: bool = False) -> Clock:
    """Return a device's clock; default: this rank's, before set-up what torch already uses."""
    world = find_world()
    if device is None and world is not None:
        device = world.device
    clock = find_clock(device, synchronize=synchronize)
    if clock is None:
        clock = cast("Clock", find_clock("cpu"))
    return clock


def format_seconds(seconds: float) -> str:
    if abs(seconds) >= 999.5:
        return f"{seconds:,.0f} s"
    # As it will be shown: 999.6 us are a millisecond.
    size = abs(float(f"{seconds:.3g}"))
    if size >= 1:
        return f"{seconds:.3g} s"
    if size >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


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
    this_rank = get_rank() if world is None else world.info.rank
    timer = Timer(name, enabled=this_rank == (rank or 0))
    failed = ""
    try:
        with timer:
            yield timer
    except BaseException as error:
        failed = f" and raised {type(error).__name__}"
        raise
    finally:
        if timer.enabled and timer.timing.count:
            took = format_seconds(timer.timing.last)
            log.log(level, "%s took %s on rank %d%s", name, took, this_rank, failed)


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


# A timer that adds up what it measures.


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
        extremes = f"{format_seconds(self.min)} to {format_seconds(self.max)}"
        total = format_seconds(self.total)
        return f"{self.count} x {format_seconds(self.mean)} ({extremes}), {total} in all"


class Timer:
    """A context manager that measures its block, again and again.

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
        """Forget all measurements; one that is open continues."""
        self._pending.clear()
        self._count = 0
        self._total = 0.0
        self._min = math.inf
        self._max = -math.inf
        self._last = math.nan

    @property
    def timing(self) -> Timing:
        """What has been measured; waits for a device that is not through with it."""
        self._read_spans(wait=True)
        if not self._count:
            return Timing(0, 0.0, math.nan, math.nan, math.nan, math.nan)
        mean = self._total / self._count
        return Timing(self._count, self._total, mean, self._min, self._max, self._last)

    def __enter__(self) -> Self:
        if not self.enabled:
            self._open.append(None)
            return self
        clock = find_own_clock(self._device, synchronize=self._synchronize)
        self._open.append((clock, clock.mark()))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        opened = self._open.pop()
        if opened is None:
            return
        clock, start = opened
        try:
            end = clock.mark()
        except RuntimeError:
            # A device that has failed cannot be queried, and the first error is the better one.
            if kind is None:
                raise
            return
        self._pending.append((clock, start, end))
        self._read_spans(wait=False)

    def _read_spans(self, *, wait: bool) -> None:
        """Add up the spans that are over; ``wait``: all of them."""
        while self._pending:
            clock, start, end = self._pending[0]
            if not wait and not clock.has_passed(end):
                return
            self._pending.popleft()
            seconds = clock.seconds(start, end)
            self._count += 1
            self._total += seconds
            self._min = min(self._min, seconds)
            self._max = max(self._max, seconds)
            self._last = seconds
