"""Accelerators of this host, counted without torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ._errors import InvalidVariableError

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
        count: Number of devices; 0 for ``"cpu"``.
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
        InvalidVariableError: A visible-devices list names a device twice.
    """
    env = os.environ if env is None else env
    wanted = env.get("TORCH_DEVICE", "").partition(":")[0]
    if wanted == "cpu":
        return Accelerators("cpu", 0, "TORCH_DEVICE=cpu")
    for name, device_type in _VISIBLE:
        if name in env:
            return _visible(name, env[name], device_type)
    if nvidia := _nvidia(root):
        return Accelerators("cuda", nvidia, f"{nvidia} x /dev/nvidia<N>")
    if amd := _amd(root):
        return Accelerators("cuda", amd, f"{amd} GPUs in /sys/class/kfd (ROCm)")
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        return Accelerators("mps", 1, "an Apple silicon Mac")
    return Accelerators(
        "cpu", 0, "no accelerator found in /dev, /sys or a visible-devices variable"
    )


def _visible(name: str, text: str, device_type: str) -> Accelerators:
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    # CUDA stops at the first -1: "0,-1,2" shows one device.
    if "-1" in entries:
        entries = entries[: entries.index("-1")]
    if len(set(entries)) != len(entries):
        raise InvalidVariableError(
            f"{name}={text!r} names a device twice; expected each once; unset it or list each once"
        )
    if not entries:
        return Accelerators("cpu", 0, f"{name}={text!r} hides every device")
    return Accelerators(device_type, len(entries), f"{name}={text}")


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
