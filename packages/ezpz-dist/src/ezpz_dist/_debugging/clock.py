"""When something happens, for work that runs on the host and for work that a device queues."""

from __future__ import annotations

import time
from functools import cache
from typing import Any, Protocol

import torch

from ezpz_dist._collectives.device import synchronize
from ezpz_dist._world import find_world

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
