"""Copies of a device's tensors to the host, without waiting for the device."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._records import is_on_device


@dataclass(frozen=True)
class Copy:
    """Metrics of one device and kind, copied together."""

    names: list[str]
    host: Any  # a tensor in the host's memory: valid after the event
    event: Any  # None if the copy has been waited for


def copy_to_host(flat: Mapping[str, Any]) -> list[Copy]:
    """Begin to copy a record's device tensors to the host; `finish_copies` waits for them.

    CUDA, ROCm and XPU copy beside the queue's next kernels; MPS waits.

    Raises:
        TypeError: A tensor has more than one element.
    """
    groups: dict[tuple[Any, bool], list[str]] = {}
    for name, value in flat.items():
        if is_on_device(value):
            if value.numel() != 1:
                raise TypeError(
                    f"metric {name!r} is not one number: a tensor of shape {tuple(value.shape)}"
                )
            groups.setdefault((value.device, value.is_floating_point()), []).append(name)
    copies = []
    for (device, is_floating), names in groups.items():
        torch = sys.modules["torch"]
        dtype = torch.int64
        if is_floating:
            dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no doubles
        values = [_gather(flat[name].detach()).reshape(()).to(dtype) for name in names]
        stacked = torch.stack(values)
        if device.type == "mps":
            copies.append(Copy(names, stacked.cpu(), None))
            continue
        host = torch.empty(stacked.shape, dtype=dtype, pin_memory=True)
        host.copy_(stacked, non_blocking=True)
        event = torch.get_device_module(device).Event()
        event.record()
        copies.append(Copy(names, host, event))
    return copies


def _gather(value: Any) -> Any:
    """Return a DTensor's whole value, such as FSDP2's gradient norm; collective if sharded."""
    if hasattr(value, "full_tensor"):
        return value.full_tensor()
    return value


def finish_copies(copies: list[Copy], flat: dict[str, Any]) -> None:
    """Wait for the copies, and put their numbers where the tensors were."""
    while copies:
        copy = copies.pop()
        if copy.event is not None:
            copy.event.synchronize()
        flat.update(zip(copy.names, copy.host.tolist(), strict=True))
