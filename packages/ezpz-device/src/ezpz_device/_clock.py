"""When something happens, for work that the host does and for work that a device queues."""

from __future__ import annotations

import time
from functools import cache
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes marks (moments of a device's work) and measures the time between two of them."""

    def mark(self) -> Any:
        """Return this moment, as the clock keeps it: seconds, or an event in the device's queue."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks, waiting for the second where it is to come."""

    def has_passed(self, mark: Any) -> bool:
        """Return whether `seconds` would return at once."""


def find_clock(
    device: torch.device | str | None = None, *, synchronize: bool = False
) -> Clock | None:
    """Return the clock of a device; the same object for the same arguments.

    Nothing is initialized for it: a clock must not be what takes a device.

    Args:
        device: Where the work to be timed runs; None: the CUDA or XPU device that torch has
            initialized.
        synchronize: Wait for the device at each mark: exact, and its queue runs empty. Else
            nothing waits: events are recorded, where the device has them (CUDA, ROCm, XPU;
            MPS is always waited for).

    Returns:
        The clock; None where no device is given and torch has initialized none.
    """
    if device is None:
        for kind in ("cuda", "xpu"):
            module = getattr(torch, kind)
            if module.is_initialized():
                return _get_clock(torch.device(kind, module.current_device()), synchronize)
        return None
    return _get_clock(torch.device(device), synchronize)


@cache
def _get_clock(device: torch.device, synchronize: bool) -> Clock:
    if device.type == "cpu":
        return HostClock()
    if synchronize or device.type == "mps":
        return HostClock(device)
    return EventClock(device)


class HostClock:
    """The host's clock; of a device, once its queue is empty."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    def mark(self) -> float:
        if self._device is not None and self._device.type == "mps":
            torch.mps.synchronize()
        elif self._device is not None:
            torch.get_device_module(self._device).synchronize(self._device)
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def has_passed(self, _mark: float) -> bool:
        return True


class EventClock:
    """A CUDA or XPU device's own clock, read as its current stream comes by; nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._module = getattr(torch, device.type)
        self._device = device

    def mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1000

    def has_passed(self, mark: Any) -> bool:
        return bool(mark.query())
