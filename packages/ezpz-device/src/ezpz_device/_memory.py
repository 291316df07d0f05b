"""How much memory a device has, how much of it is taken, and how much was at most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ._host import host_total, host_use, reset_host_peak
from ._select import device_in_use


@dataclass(frozen=True, slots=True)
class Memory:
    """What this process has of a device's memory.

    Attributes:
        allocated: Bytes in tensors; of a CPU the process's resident bytes; None if not known.
        reserved: Bytes taken from the device, with torch's cache; of a CPU as ``allocated``.
        peak: The most bytes ``allocated`` since the start or `reset_peak_memory`; None on MPS,
            which does not keep it.
        total: Bytes that there are; of a CPU that this process may use (its control group's
            limit), of MPS that are recommended at most.
    """

    allocated: int | None
    reserved: int | None
    peak: int | None
    total: int


def get_memory(
    device: str | torch.device | None = None, *, env: Mapping[str, str] | None = None
) -> Memory:
    """Return what this process has of a device's memory. Does not wait for the device.

    >>> memory = get_memory("cpu")
    >>> 0 < memory.peak <= memory.total
    True

    Args:
        device: Default: the one in use, see `get_device_properties`.
        env: The environment to read; default ``os.environ``.

    Raises:
        DeviceError: The device cannot be used.
    """
    here = device_in_use(device, env)
    if here.type == "cpu":
        resident, peak = host_use()
        return Memory(resident, resident, peak, host_total())
    if here.type == "mps":
        return Memory(
            int(torch.mps.current_allocated_memory()),
            int(torch.mps.driver_allocated_memory()),
            None,
            int(torch.mps.recommended_max_memory()),
        )
    module = getattr(torch, here.type)
    total = int(module.get_device_properties(here).total_memory)
    # One call for all three; empty before torch has initialized the device.
    statistics = module.memory.memory_stats_as_nested_dict(here)
    return Memory(
        _bytes(statistics, "allocated_bytes", "current"),
        _bytes(statistics, "reserved_bytes", "current"),
        _bytes(statistics, "allocated_bytes", "peak"),
        total,
    )


def _bytes(statistics: Mapping[str, Any], kind: str, when: str) -> int:
    return int(statistics[kind]["all"][when]) if statistics else 0


def reset_peak_memory(
    device: str | torch.device | None = None, *, env: Mapping[str, str] | None = None
) -> bool:
    """Begin the peak of `get_memory` anew, from what is taken now.

    Args:
        device: Default: the one in use, see `get_device_properties`.
        env: The environment to read; default ``os.environ``.

    Returns:
        Whether the peak was begun anew. MPS keeps none, and a CPU's can be reset on Linux only,
        where ``/proc/self/clear_refs`` may be written.

    Raises:
        DeviceError: The device cannot be used.
    """
    here = device_in_use(device, env)
    if here.type == "cpu":
        return reset_host_peak()
    if here.type == "mps":
        return False
    module = getattr(torch, here.type)
    if module.is_initialized():
        module.reset_peak_memory_stats(here)
    return True
