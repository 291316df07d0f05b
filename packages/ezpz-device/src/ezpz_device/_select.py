"""Which torch device this process uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from ezpz_topo import get_local_device


class DeviceError(Exception):
    """A device or backend was requested that this process cannot use."""


DEVICE_TYPES: Mapping[str, Callable[[], bool]] = {
    "xpu": torch.xpu.is_available,
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
    "cpu": lambda: True,
}
"""Device types in the order in which they are tried; ROCm reports itself as ``cuda``."""

_VISIBLE = (
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
)  # fmt: skip


def get_torch_device_type(env: Mapping[str, str] | None = None) -> str:
    """Return ``"xpu"``, ``"cuda"``, ``"mps"`` or ``"cpu"``.

    ``TORCH_DEVICE`` decides where it is set (an index such as ``cuda:1`` is allowed);
    else the first type that this torch can use, in that order.

    Args:
        env: The environment to read; default ``os.environ``.

    Raises:
        DeviceError: ``TORCH_DEVICE`` names no device type, or one that torch cannot use.
    """
    env = os.environ if env is None else env
    wanted = env.get("TORCH_DEVICE")
    if wanted:
        return _parse_device(wanted).type
    return next(device_type for device_type, is_usable in DEVICE_TYPES.items() if is_usable())


def get_torch_device(env: Mapping[str, str] | None = None) -> str:
    """Return this rank's device, for example ``"cuda:3"``, ``"xpu:0"``, ``"mps"``, ``"cpu"``.

    The local rank indexes the visible devices. Where the launcher shows each rank one
    device only (a visible-devices variable with one entry), that one is index 0.

    Args:
        env: The environment to read; default ``os.environ``.

    Raises:
        DeviceError: There are fewer visible devices than ranks on this node, or
            ``TORCH_DEVICE`` cannot be used.
        ezpz_topo.TopoError: The local rank cannot be known.
    """
    env = os.environ if env is None else env
    wanted = env.get("TORCH_DEVICE")
    if wanted:
        device = _parse_device(wanted)
        if device.index is not None:
            return str(device)
    device_type = get_torch_device_type(env)
    if device_type in ("cpu", "mps"):
        return device_type
    count = getattr(torch, device_type).device_count()
    return f"{device_type}:{_choose_index(get_local_device(env), count, device_type, env)}"


def device_in_use(
    device: str | torch.device | None = None, env: Mapping[str, str] | None = None
) -> torch.device:
    """Return the device requested, else torch's current one, before there is one the rank's."""
    if device is None:
        chosen = torch.device(get_torch_device_type(env))
    else:
        chosen = _parse_device(str(device), "device")
    if chosen.type in {"cpu", "mps"}:
        return torch.device(chosen.type)
    if ":" in str(chosen):
        return chosen
    module = getattr(torch, chosen.type)
    # Once torch is initialized: set_device may have chosen another than the local rank's.
    if device is None and not module.is_initialized():
        return torch.device(get_torch_device(env))
    return torch.device(chosen.type, module.current_device())


def _choose_index(local_rank: int, count: int, device_type: str, env: Mapping[str, str]) -> int:
    if local_rank < count:
        return local_rank
    if count == 1 and any(env.get(name) for name in _VISIBLE):
        return 0
    raise DeviceError(
        f"local rank {local_rank} has no {device_type} device: {count} visible; expected one a "
        f"rank; start at most {count} ranks a node, or set TORCH_DEVICE=cpu"
    )


def _parse_device(text: str, name: str = "TORCH_DEVICE") -> torch.device:
    try:
        device = torch.device(text)
        is_usable = DEVICE_TYPES[device.type]
    except (RuntimeError, KeyError) as error:
        raise DeviceError(
            f"{name}={text!r} is no device of ours; expected one of {', '.join(DEVICE_TYPES)}"
        ) from error
    if not is_usable():
        raise DeviceError(
            f"{name}={text!r}, but torch {torch.__version__} sees no {device.type} device; "
            f"unset {name}, or install a torch built for it"
        )
    return device
