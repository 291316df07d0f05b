"""High-water marks of a device's memory, as metrics."""

from __future__ import annotations

import sys
from typing import Any

from ezpz_obs._errors import ObsError

_GIB = float(1 << 30)


def memory_metrics(device: Any = None) -> dict[str, float]:
    """Return what this process has of its device's memory. Does not wait for the device.

    The high-water mark is the most since the start, or ``ezpz_device.reset_peak_memory()``.

    Args:
        device: Default: the one in use, see ``ezpz_device.get_memory``.

    Returns:
        ``memory_gib``, in tensors (of a CPU the process's resident memory);
        ``memory_peak_gib``, the most of that; ``memory_fraction``, what part of the device's
        memory the most was. What a device does not tell is not there: MPS keeps no peak.

    Raises:
        ObsError: torch is not imported, or ezpz_device not installed.
        ezpz_device.DeviceError: The device cannot be used.
    """
    if "torch" not in sys.modules:
        raise ObsError("memory_metrics() asks torch, which is not imported; import it first")
    try:
        from ezpz_device import get_memory  # an extra, and imports torch
    except ModuleNotFoundError as error:
        raise ObsError(
            "memory_metrics() needs ezpz_device, which is not installed; "
            "pip install 'ezpz-obs[device]'"
        ) from error
    memory = get_memory(device)
    found = {}
    if memory.allocated is not None:
        found["memory_gib"] = memory.allocated / _GIB
    if memory.peak is not None:
        found["memory_peak_gib"] = memory.peak / _GIB
        found["memory_fraction"] = memory.peak / memory.total
    return found
