"""Wait for a device's work."""

from __future__ import annotations

import torch

from ezpz_device import get_torch_device
from ezpz_dist._world import find_world


def synchronize(device: str | torch.device | None = None) -> None:
    """Wait until everything that was queued on a device is done; on the CPU nothing is queued.

    Not a collective: it waits for this rank's device only.

    Args:
        device: ``"cuda:0"``, ``"xpu"``, ``"mps"``, ``"cpu"``; None: this rank's device.

    Raises:
        ezpz_device.DeviceError: No device is given, and there is none for this rank.
    """
    if device is None:
        world = find_world()
        device = get_torch_device() if world is None else world.device
    where = torch.device(device)
    if where.type == "mps":
        torch.mps.synchronize()
    elif where.type != "cpu":
        torch.get_device_module(where).synchronize(where)
