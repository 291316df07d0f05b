"""Timers that know that devices work asynchronously."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar, cast

import torch

from ezpz_topo import get_rank

from ._collectives import synchronize
from ._world import find_world

# When something happens, for work that runs on the host and for work that a device queues.

Mark = Any
"""A moment, as its clock keeps it: seconds, or an event on a device's stream."""


class Clock(Protocol):
    """What takes marks and tells the time between them."""

    def mark(self) -> Mark:
        """Return this moment."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks, waiting for the second where it is to come."""

    def has_passed(self, mark: Mark) -> bool:
        """Whether `seconds` would return at once."""


class HostClock:
    """The host's own clock; on a device, once its queue is empty.

    Args:
        device: What to wait for; None: nothing.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    def mark(self) -> float:
        """Return this moment, after what is queued on the device."""
        if self._device is not None:
            synchronize(self._device)
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds between two marks."""
        return end - start

    def has_passed(self, _mark: float) -> bool:
        """Say yes."""
        return True


class EventClock:
    """A CUDA or XPU device's own clock, read as its current stream comes by: nobody waits.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = getattr(torch, device.type)
        self._device = device

    def mark(self) -> Mark:
        """Return the moment at which the device is through with what is queued so far."""
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks; waits for the device to pass the second."""
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1000

    def has_passed(self, mark: Mark) -> bool:
        """Whether the device is past the mark."""
        return bool(mark.query())


def clock_for(device: torch.device, *, exact: bool) -> Clock:
    """Return the clock of a device.

    Args:
        device: Where the work to be timed runs.
        exact: Wait for the device at each mark; else events tell, where it has them
            (CUDA, ROCm and XPU; MPS is always waited for).
    """
    return _clock(device.type, device.index, exact)


@cache
def _clock(kind: str, index: int | None, exact: bool) -> Clock:
    device = torch.device(kind) if index is None else torch.device(kind, index)
    if kind == "cpu":
        return HostClock()
    if exact or kind == "mps":
        return HostClock(device)
    return EventClock(device)


def device_here() -> torch.device:
    """Return this rank's device; before set-up the one that torch is already using.

    Nothing is initialized for it: a timer must not be what takes a device.
    """
    world = find_world()
    if world is not None:
        return world.device
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        if module.is_initialized():
            return torch.device(kind, module.current_device())
    return torch.device("cpu")


# The part of a backward in which a rank has nothing to do but wait for the others' gradients.


class BackwardWaits:
    """Measures, in each backward of a model, from its last gradient to the end of the wait.

    DistributedDataParallel waits for its all-reduces in a callback that autograd's engine
    runs when the whole backward is done (torch 2.6 to 2.13: reducer.cpp, finalize_backward).
    A callback of ours that is queued earlier, when the backward begins, runs before it, on
    the rank's own work being done; one that it queues itself runs after it.

    A rank that is slower than the others waits less here than they do.

    Attributes:
        waits: For each backward since the last `clear`: clock, start and end of the wait.

    Args:
        model: What is called; its output is what the backward begins at.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.waits: list[tuple[Clock, Mark, Mark]] = []
        self._is_queued = False
        self._hook = model.register_forward_hook(self._after_forward)

    def remove(self) -> None:
        """Measure no more."""
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
        clock = clock_for(device_here(), exact=False)
        start = clock.mark()
        _at_end(lambda: self.waits.append((clock, start, clock.mark())))


def _at_end(callback: Any) -> None:
    """Have the engine call something when the backward that runs is done, in order."""
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001  # as FSDP itself does
    engine.queue_callback(callback)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model's output: of mappings and sequences, however deep."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    parts: Iterable[Any] = ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, (list, tuple)):
        parts = output
    for part in parts:
        yield from _tensors(part)


# The time of a function or a block, said by one rank.

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def timed(
    name: str,
    rank: int | None = None,
    *,
    level: int = logging.INFO,
    log: logging.Logger = logger,
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
    mine = _my_rank()
    timer = Timer(name, enabled=mine == (rank or 0))
    failed = ""
    try:
        with timer:
            yield timer
    except BaseException as error:
        failed = f" and raised {type(error).__name__}"
        raise
    finally:
        if timer.enabled and timer.timing.count:
            log.log(
                level, "%s took %s on rank %d%s", name, in_words(timer.timing.last), mine, failed
            )


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
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"timeitlogit of the generator {name}; expected a function: a generator's call "
                "returns before its work begins; time what consumes it, in `with timed(...)`"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
                with timed(name, rank, level=level, log=log):
                    return await cast("Callable[P, Awaitable[Any]]", function)(*args, **kwargs)

            return cast("Callable[P, R]", awaited)

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if _my_rank() != (rank or 0):
                return function(*args, **kwargs)
            with timed(name, rank, level=level, log=log):
                return function(*args, **kwargs)

        return called

    return decorate


def _my_rank() -> int:
    world = find_world()
    return get_rank() if world is None else world.info.rank


# Timers that know that devices work on their own: each adds up what it has measured.


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
        """Return ``"12 x 3.1 ms (2.9 ms to 4 ms), 37 ms in all"``."""
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

    Attributes:
        name: What it measures.
        enabled: Whether it measures.

    Args:
        name: What it measures.
        synchronize: Wait for the device before and after: the time is exact, and the queue
            runs empty. False: CUDA and XPU events are recorded instead, and read later.
        enabled: Whether it measures.
        device: What the work runs on; default: this rank's device.
    """

    __slots__ = (
        "_count", "_device", "_last", "_max", "_min", "_open", "_pending", "_synchronize",
        "_total", "enabled", "name",
    )  # fmt: skip

    def __init__(
        self,
        name: str = "",
        *,
        synchronize: bool = True,
        enabled: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        self.name: str = name
        self.enabled: bool = enabled
        self._device = None if device is None else torch.device(device)
        self._synchronize = synchronize
        self._open: list[tuple[Clock, Mark] | None] = []
        self._pending: deque[tuple[Clock, Mark, Mark]] = deque()
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
        clock = clock_for(self._device or device_here(), exact=self._synchronize)
        self._open.append((clock, clock.mark()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        begun = self._open.pop()
        if begun is None:
            return
        clock, start = begun
        if kind is None:
            self._pending.append((clock, start, clock.mark()))
        else:
            # A device that has failed cannot be asked, and the first error is the better one.
            with suppress(RuntimeError):
                self._pending.append((clock, start, clock.mark()))
        self._settle(wait=False)

    def _settle(self, *, wait: bool) -> None:
        """Add up what is known by now, or all of it."""
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
        self,
        *,
        synchronize: bool = True,
        enabled: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        self._made: dict[str, Timer] = {}
        self._synchronize = synchronize
        self._enabled = enabled
        self._device = device

    def __call__(self, name: str) -> Timer:
        """Return the timer of that name."""
        timer = self._made.get(name)
        if timer is None:
            timer = self._made[name] = Timer(
                name, synchronize=self._synchronize, enabled=self._enabled, device=self._device
            )
        return timer

    def __iter__(self) -> Iterator[Timer]:
        """Return the timers in the order in which they were made."""
        return iter(self._made.values())

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


def in_words(seconds: float) -> str:
    """Return a time as people read it.

    >>> in_words(0.00123), in_words(83.5), in_words(5000)
    ('1.23 ms', '83.5 s', '5,000 s')
    """
    if abs(seconds) >= 999.5:
        return f"{seconds:,.0f} s"
    # As it will be shown: 999.6 us are a millisecond.
    size = abs(float(f"{seconds:.3g}"))
    scale, unit = (1.0, "s") if size >= 1 else (1e3, "ms") if size >= 1e-3 else (1e6, "us")
    return f"{seconds * scale:.3g} {unit}"
