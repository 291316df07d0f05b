"""What a device is, and the memory of it and of the host."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ezpz_topo import get_memory_limit

from ._peaks import count_compute_units
from ._select import device_in_use

# How much memory a device has, how much of it is taken, and how much was at most.

_PROC = Path("/proc")


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
    used = device_in_use(device, env)
    if used.type == "cpu":
        resident, peak = read_host_use()
        return Memory(resident, resident, peak, get_host_total())
    if used.type == "mps":
        return Memory(
            allocated=int(torch.mps.current_allocated_memory()),
            reserved=int(torch.mps.driver_allocated_memory()),
            peak=None,
            total=int(torch.mps.recommended_max_memory()),
        )
    module = getattr(torch, used.type)
    total = int(module.get_device_properties(used).total_memory)
    # One call for all three; empty before torch has initialized the device.
    statistics = module.memory.memory_stats_as_nested_dict(used)
    if not statistics:
        return Memory(0, 0, 0, total)
    allocated = statistics["allocated_bytes"]["all"]
    reserved = statistics["reserved_bytes"]["all"]
    return Memory(
        int(allocated["current"]), int(reserved["current"]), int(allocated["peak"]), total
    )


def reset_peak_memory(
    device: str | torch.device | None = None, *, env: Mapping[str, str] | None = None
) -> bool:
    """Reset the peak of `get_memory` to the bytes that are allocated now.

    Args:
        device: Default: the one in use, see `get_device_properties`.
        env: The environment to read; default ``os.environ``.

    Returns:
        Whether that was possible. MPS keeps no peak, and a CPU's can be reset on Linux only,
        where ``/proc/self/clear_refs`` may be written.

    Raises:
        DeviceError: The device cannot be used.
    """
    used = device_in_use(device, env)
    if used.type == "cpu":
        return reset_host_peak()
    if used.type == "mps":
        return False
    module = getattr(torch, used.type)
    if module.is_initialized():
        module.reset_peak_memory_stats(used)
    return True


# The host's memory: what this process has of it, and may have.


def read_host_use(proc: Path = _PROC) -> tuple[int | None, int]:
    """Return this process's resident bytes, None where not known, and the most there have been."""
    try:
        text = (proc / "self" / "status").read_text(encoding="utf-8", errors="replace")
        # getrusage's own peak outlives exec: a small process started by a large one has its.
        facts = dict(line.split(":", 1) for line in text.splitlines())
        resident = int(facts["VmRSS"].split()[0]) * 1024
        return resident, int(facts["VmHWM"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if sys.platform != "darwin":
            peak *= 1024
        return None, peak


def reset_host_peak(proc: Path = _PROC) -> bool:
    """Set this process's peak back to what it has now; return whether that was possible."""
    with suppress(OSError):
        # proc(5): 5 resets the peak resident set size, and nothing else.
        (proc / "self" / "clear_refs").write_text("5", encoding="ascii")
        return True
    return False


@cache
def get_host_total() -> int:
    """Return the bytes this process may use: the host's, or less by a control group's limit."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(physical, get_memory_limit() or physical)


# What a device is: its name, memory and compute units.


def get_device_properties(
    device: str | torch.device | None = None, *, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what a device is.

    >>> sorted(get_device_properties("cpu"))
    ['architecture', 'compute_units', 'index', 'name', 'total_memory', 'type']

    Args:
        device: Default: the one in use, which is torch's current one once torch has
            initialized it, before that the one of `get_torch_device`.
        env: The environment to read; default ``os.environ``.

    Returns:
        ``type`` ("cuda", "xpu", "mps", "cpu"), ``index`` (None of mps and cpu) and ``name`` as the
        vendor has it. ``architecture`` is "sm_90", "gfx90a", the CPU's, or None if it is not
        reported. ``total_memory`` is in bytes (of the CPU: what this process may use).
        ``compute_units`` are multiprocessors of CUDA, compute units of ROCm, vector engines of
        XPU, the cores that this process may use of a CPU, and None of MPS.

    Raises:
        DeviceError: The device cannot be used.
    """
    used = device_in_use(device, env)
    if used.type == "cpu":
        cores = os.cpu_count()
        if hasattr(os, "sched_getaffinity"):  # not on macOS
            cores = len(os.sched_getaffinity(0))
        return {
            "type": "cpu", "index": None, "name": get_cpu_name(),
            "architecture": platform.machine(), "compute_units": cores,
            "total_memory": get_host_total(),
        }  # fmt: skip
    if used.type == "mps":
        return {
            "type": "mps", "index": None, "name": f"Apple {platform.machine()}",
            "architecture": platform.machine(), "compute_units": None,
            "total_memory": int(torch.mps.recommended_max_memory()),
        }  # fmt: skip
    properties = getattr(torch, used.type).get_device_properties(used)
    architecture: str | None = None  # of XPU torch reports a number that changes with the driver
    if torch.version.hip:
        architecture = str(properties.gcnArchName).partition(":")[0]  # gfx90a:sramecc+:xnack-
    elif used.type == "cuda":
        architecture = f"sm_{properties.major}{properties.minor}"
    return {
        "type": used.type, "index": used.index, "name": properties.name,
        "architecture": architecture, "total_memory": int(properties.total_memory),
        "compute_units": count_compute_units(properties),
    }  # fmt: skip


def get_cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name as the kernel has it, else its architecture."""
    with suppress(OSError), cpuinfo.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    # macOS has no such file, Arm no such line.
    return platform.processor() or platform.machine()
