"""Where a step's time goes."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ezpz_obs._errors import ObsError

if TYPE_CHECKING:
    from ezpz_device import Clock

Mark = Any
"""A moment, as its clock keeps it."""

T = TypeVar("T")

_MOST_WAITING = 64
"""Steps that a device may be behind; a queue holds fewer."""

_MOST_MARKS = 256
"""Uses of a phase within a step that are kept apart."""


class StepTimer:
    """Time the phases of a training step: data, forward, backward, optimizer, or any others.

    >>> timer = StepTimer()
    >>> for batch in timer.data([1, 2]):
    ...     with timer("forward"):
    ...         loss = batch * 2
    ...     timer.step()
    >>> sorted(timer.metrics())
    ['data_s', 'forward_s', 'step_s']

    On a CPU a phase costs less than a microsecond. On CUDA, ROCm and XPU events are recorded and
    nothing waits: `metrics` is of the last step that the device is through with, usually the one
    before. A phase used several times in a step (gradient accumulation) is added up; of a phase
    inside itself the outer one counts; a phase inside another counts in both. What ends in an
    exception counts too. For one thread.

    A device other than the CPU needs ezpz_device, whose clock it is; `start`, `step` and the first
    phase raise `ObsError` where it is not installed.

    Args:
        synchronize: Wait for the device at both ends of a phase: exact times of the step that
            has just ended, and a queue that runs empty. MPS is always waited for.
        device: What the work runs on; default: the CUDA or XPU device that torch has
            initialized by the time, else the CPU. MPS is to be named.
    """

    def __init__(self, *, synchronize: bool = False, device: Any = None) -> None:
        self._synchronize = synchronize
        self._device = device
        self._clock: Clock = HostClock()
        self._is_found = False
        self._phases: dict[str, Phase] = {}
        self._start: Mark = None
        self._waiting: deque[_Step] = deque()
        self._last: dict[str, float] = {}

    def __call__(self, phase: str) -> Phase:
        """Return a context manager that times a phase, ``forward``, say.

        Raises:
            ValueError: The phase is called ``step``, which is the whole.
        """
        return self._phases.get(phase) or self._make(phase)

    def _make(self, name: str) -> Phase:
        if name == "step":
            raise ValueError("phase 'step'; expected another name: step_s is the whole step's time")
        if self._start is None:
            self.start()
        phase = self._phases[name] = Phase(self._clock)
        return phase

    def data(self, batches: Iterable[T], phase: str = "data") -> Batches[T]:
        """Return the batches, timing the host's wait for each.

        Args:
            batches: A DataLoader, or any other iterable; it may be gone through again.
            phase: What the waiting is called.
        """
        return Batches(batches, self(phase))

    def start(self) -> None:
        """Begin a step now, and forget what has been timed since the last one ended.

        The first begins with the first phase, and each other where the one before ends. Call it
        after what belongs to no step: an evaluation, a checkpoint.
        """
        for phase in self._phases.values():
            phase.take()
        self._find_clock()
        self._start = self._clock.mark()

    def step(self) -> None:
        """End the step, and begin the next."""
        if self._start is None:
            self.start()
            return
        end = self._clock.mark()
        taken = {name: phase.take() for name, phase in self._phases.items()}
        self._waiting.append(_Step(self._clock, self._start, end, taken))
        self._start = end
        self._settle()
        if not self._is_found and self._find_clock():
            self._start = self._clock.mark()

    def metrics(self) -> dict[str, float]:
        """Return the seconds of the last step that is known: ``step_s``, ``data_s``, ...

        Every phase has its place, with 0 where the step had none of it. Empty before the end of
        the first step, which is the only one that is waited for.
        """
        self._settle(wait=not self._last)
        return dict(self._last)

    @property
    def seconds(self) -> float | None:
        """Seconds of the last step that is known, for `Throughput.metrics`; None before."""
        self._settle(wait=not self._last)
        return self._last.get("step_s")

    def _settle(self, *, wait: bool = False) -> None:
        waiting = self._waiting
        while waiting and (
            wait or len(waiting) > _MOST_WAITING or waiting[0].clock.has_passed(waiting[0].end)
        ):
            self._last = waiting.popleft().seconds()

    def _find_clock(self) -> bool:
        """Take the device's clock once there is one; return whether it is new."""
        if self._is_found or any(phase.depth for phase in self._phases.values()):
            return False
        found = _device_clock(self._device, self._synchronize)
        if found is None:
            return False
        self._clock, self._is_found = found, True
        for phase in self._phases.values():
            phase.clock = found
        return True


class HostClock:
    """The host's own clock, for as long as there is no device, and without torch."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds between two marks."""
        return end - start

    def has_passed(self, mark: float) -> bool:  # noqa: ARG002 - a host's marks are past
        """Return True."""
        return True


def _device_clock(device: Any, synchronize: bool) -> Clock | None:
    """Return the clock of the device in use; None as long as there is none."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    if device is None:
        if not (torch.cuda.is_initialized() or torch.xpu.is_initialized()):
            return None
    elif torch.device(device).type == "cpu":
        return HostClock()
    try:
        from ezpz_device import find_clock  # an extra, and imports torch
    except ModuleNotFoundError as error:
        raise ObsError(
            f"StepTimer on {device or 'an accelerator'} needs ezpz_device, which is not "
            "installed; pip install 'ezpz-obs[device]'"
        ) from error
    return find_clock(device, synchronize=synchronize)


class Phase:
    """One phase of a step: a context manager, used again and again.

    Args:
        clock: What tells its time.
    """

    __slots__ = ("_marks", "_start", "clock", "depth", "host_seconds")

    def __init__(self, clock: Clock) -> None:
        self.clock: Clock = clock
        self.depth: int = 0
        self.host_seconds: float = 0.0
        """What needs no clock any more."""
        self._start: Mark = None
        self._marks: list[tuple[Mark, Mark]] = []

    def __enter__(self) -> None:
        if not self.depth:
            self._start = self.clock.mark()
        self.depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.depth -= 1
        if self.depth:
            return
        if kind is None:
            self._marks.append((self._start, self.clock.mark()))
        else:
            # A device that has failed cannot be asked, and the first error is the better one.
            with suppress(RuntimeError):
                self._marks.append((self._start, self.clock.mark()))
        if len(self._marks) >= _MOST_MARKS:
            clock = self.clock
            self.host_seconds += sum(clock.seconds(*pair) for pair in self._marks)
            self._marks = []

    def take(self) -> tuple[float, list[tuple[Mark, Mark]]]:
        """Return what has been timed, and begin anew."""
        taken = self.host_seconds, self._marks
        self.host_seconds, self._marks = 0.0, []
        return taken


class _Step:
    """A step whose end the device may still have to reach."""

    __slots__ = ("_start", "_taken", "clock", "end")

    def __init__(
        self,
        clock: Clock,
        start: Mark,
        end: Mark,
        taken: dict[str, tuple[float, list[tuple[Mark, Mark]]]],
    ) -> None:
        self.clock, self._start, self.end, self._taken = clock, start, end, taken

    def seconds(self) -> dict[str, float]:
        """Return the times; waits for the device where it is behind."""
        seconds = self.clock.seconds
        times = {"step_s": seconds(self._start, self.end)}
        for name, (known, marks) in self._taken.items():
            times[f"{name}_s"] = known + sum(seconds(*pair) for pair in marks)
        return times


class Batches(Generic[T]):
    """Batches, the wait for each being timed.

    Args:
        batches: What to go through.
        phase: Where the time is added.
    """

    def __init__(self, batches: Iterable[T], phase: Phase) -> None:
        self._batches, self._phase = batches, phase

    def __iter__(self) -> Iterator[T]:
        phase = self._phase
        # Workers are started here: waiting too.
        begun = time.perf_counter()
        iterator = iter(self._batches)
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                # Not by events: where the host waits the device may have much to do yet.
                phase.host_seconds += time.perf_counter() - begun
            yield batch
            begun = time.perf_counter()

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]
