"""When something happens, for work that the host does and for work that a device queues."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

Mark = Any
"""A moment, as its clock keeps it: seconds, or an event in a device's queue."""


class Clock(Protocol):
    """What takes marks and tells the time between them."""

    def mark(self) -> Mark:
        """Return this moment."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks, waiting for the second where it is to come."""

    def has_passed(self, mark: Mark) -> bool:
        """Whether `seconds` would return at once."""


class HostClock:
    """The host's own clock."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds between two marks."""
        return end - start

    def has_passed(self, mark: float) -> bool:  # noqa: ARG002  # a host's marks are past
        """Say yes."""
        return True


class WaitingClock(HostClock):
    """The host's clock, once a device's queue is empty.

    Args:
        module: ``torch.cuda``, ``torch.xpu`` or ``torch.mps``.
        device: The device, where there are several.
    """

    def __init__(self, module: Any, device: Any) -> None:
        self._wait = module.synchronize
        self._of = () if device.type == "mps" else (device,)

    def mark(self) -> float:
        """Return this moment, after what is queued on the device."""
        self._wait(*self._of)
        return time.perf_counter()


class EventClock:
    """A CUDA or XPU device's own clock, read as its current stream comes by: nobody waits.

    Args:
        module: ``torch.cuda`` or ``torch.xpu``.
        device: The device.
    """

    def __init__(self, module: Any, device: Any) -> None:
        self._module, self._device = module, device

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


def find_clock(device: Any, *, synchronize: bool) -> Clock | None:
    """Return the clock of a device; None as long as no device is in use.

    torch is not imported for it, nor a device initialized.

    Args:
        device: Where the work to be timed runs; None: what torch has initialized.
        synchronize: Wait for the device at each mark; else events tell, where it has them.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    if device is None:
        device = _initialized(torch)
        if device is None:
            return None
    device = torch.device(device)
    if device.type == "cpu":
        return HostClock()
    module = getattr(torch, device.type)
    if synchronize or device.type == "mps":
        return WaitingClock(module, device)
    return EventClock(module, device)


def _initialized(torch: Any) -> Any:
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        if module.is_initialized():
            return torch.device(kind, module.current_device())
    return None
