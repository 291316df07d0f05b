"""What a device is: its name, memory and compute units."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ._memory import host_total
from ._peaks import compute_units
from ._select import device_in_use


def get_device_properties(
    device: str | torch.device | None = None, *, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what a device is.

    >>> sorted(get_device_properties("cpu"))
    ['architecture', 'compute_units', 'index', 'name', 'total_memory', 'type']

    Args:
        device: Default: the one in use, which is torch's current one once torch has
            initialized it, before that what `get_torch_device` says.
        env: The environment to read; default ``os.environ``.

    Returns:
        ``type`` ("cuda", "xpu", "mps", "cpu"), ``index`` (None of mps and cpu), ``name`` as the
        vendor has it, ``architecture`` ("sm_90", "gfx90a", the CPU's; None if it is not
        reported), ``total_memory`` in bytes (of the CPU: what this process may use), and
        ``compute_units``: multiprocessors of CUDA, compute units of ROCm, vector engines of XPU,
        the cores that this process may use of a CPU; None of MPS.

    Raises:
        DeviceError: The device cannot be used.
    """
    here = device_in_use(device, env)
    if here.type == "cpu":
        return _cpu()
    if here.type == "mps":
        return {
            "type": "mps", "index": None, "name": f"Apple {platform.machine()}",
            "architecture": platform.machine(), "compute_units": None,
            "total_memory": int(torch.mps.recommended_max_memory()),
        }  # fmt: skip
    properties = getattr(torch, here.type).get_device_properties(here)
    architecture: str | None = None  # of XPU torch reports a number that changes with the driver
    if torch.version.hip:
        architecture = str(properties.gcnArchName).partition(":")[0]  # gfx90a:sramecc+:xnack-
    elif here.type == "cuda":
        architecture = f"sm_{properties.major}{properties.minor}"
    return {
        "type": here.type,
        "index": here.index,
        "name": properties.name,
        "architecture": architecture,
        "total_memory": int(properties.total_memory),
        "compute_units": compute_units(properties),
    }


def _cpu() -> dict[str, Any]:
    usable = getattr(os, "sched_getaffinity", None)  # not on macOS
    return {
        "type": "cpu", "index": None, "name": cpu_name(), "architecture": platform.machine(),
        "compute_units": len(usable(0)) if usable else os.cpu_count(),
        "total_memory": host_total(),
    }  # fmt: skip


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name as the kernel has it, else its architecture."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    # macOS has no such file, Arm no such line.
    return platform.processor() or platform.machine()
