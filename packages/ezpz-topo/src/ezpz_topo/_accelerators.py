"""Accelerators of this host, counted without torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ._errors import InvalidVariableError

DEVICE_TYPES = ("xpu", "cuda", "mps", "cpu")

_VISIBLE = (
    ("CUDA_VISIBLE_DEVICES", "cuda"),
    ("ROCR_VISIBLE_DEVICES", "cuda"),
    ("HIP_VISIBLE_DEVICES", "cuda"),
    ("ZE_AFFINITY_MASK", "xpu"),
)


@dataclass(frozen=True, slots=True)
class Accelerators:
    """Devices that ranks of this host can use.

    Attributes:
        device_type: torch's word: ``"cuda"`` (ROCm too), ``"xpu"``, ``"mps"``, or ``"cpu"``
            where there is none.
        count: Number of devices; 0 for ``"cpu"``, and where they cannot be counted.
        source: The variable, file or rule that told.
    """

    device_type: str
    count: int
    source: str


def get_accelerators(env: Mapping[str, str] | None = None, *, root: str = "/") -> Accelerators:
    """Count the devices of this host, by ``TORCH_DEVICE``, visible-device variables, then ``/dev``.

    Args:
        env: The environment to read; default ``os.environ``.
        root: Where ``dev`` and ``sys`` are found; for tests.

    Raises:
        InvalidVariableError: ``TORCH_DEVICE`` is no device type, or a visible-devices list
            names a device twice.
    """
    env = os.environ if env is None else env
    asked = env.get("TORCH_DEVICE", "").partition(":")[0]
    if asked and asked not in DEVICE_TYPES:
        raise InvalidVariableError(
            f"TORCH_DEVICE={env['TORCH_DEVICE']!r}; expected one of {', '.join(DEVICE_TYPES)}"
        )
    if asked == "cpu":
        return Accelerators("cpu", 0, "TORCH_DEVICE=cpu")
    hidden = ""
    for name, device_type in _VISIBLE:
        if name in env and asked in ("", device_type):
            visible = _visible(name, env[name])
            if visible:
                return Accelerators(device_type, visible, f"{name}={env[name]}")
            hidden = hidden or f"{name}={env[name]!r} hides every device"
    if hidden:
        return Accelerators("cpu", 0, hidden)
    for device_type, count, source in _present(root):
        if count and asked in ("", device_type):
            return Accelerators(device_type, count, source)
    if asked:
        return Accelerators(asked, 0, f"TORCH_DEVICE={asked}, and none can be counted here")
    return Accelerators(
        "cpu", 0, "no accelerator found in /dev, /sys or a visible-devices variable"
    )


def _visible(name: str, text: str) -> int:
    # Slurm says NoDevFiles where it gave none.
    entries = [e.strip() for e in text.split(",") if e.strip() not in ("", "NoDevFiles", "void")]
    # CUDA stops at the first -1: "0,-1,2" shows one device.
    if "-1" in entries:
        entries = entries[: entries.index("-1")]
    if len(set(entries)) != len(entries):
        raise InvalidVariableError(
            f"{name}={text!r} names a device twice; expected each once; unset it or list each once"
        )
    return len(entries)


def _present(root: str) -> list[tuple[str, int, str]]:
    """Return (device type, count, source) of what the kernel shows."""
    mac = int(sys.platform == "darwin" and os.uname().machine == "arm64")
    nvidia, amd = _nvidia(root), _amd(root)
    return [
        ("cuda", nvidia, f"{nvidia} x /dev/nvidia<N>"),
        ("cuda", amd, f"{amd} GPUs in /sys/class/kfd (ROCm)"),
        ("mps", mac, "an Apple silicon Mac"),
    ]


def _nvidia(root: str) -> int:
    return sum(name.startswith("nvidia") and name[6:].isdigit() for name in _listdir(f"{root}/dev"))


def _amd(root: str) -> int:
    """Count KFD nodes with SIMDs: a node without is a CPU (Linux kernel, kfd_topology.c)."""
    count = 0
    nodes = f"{root}/sys/class/kfd/kfd/topology/nodes"
    for node in _listdir(nodes):
        try:
            with open(f"{nodes}/{node}/properties", encoding="ascii", errors="replace") as file:
                text = file.read()
        except OSError:
            # The driver denies reading the properties of a GPU outside this job's cgroup.
            continue
        count += any(
            line.startswith("simd_count ") and line.split()[1] != "0" for line in text.splitlines()
        )
    return count


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        # No driver, no directory: the answer is that there is nothing.
        return []


def get_cpu_count() -> int:
    """Return the number of logical CPUs this process may run on (its affinity, where known)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
