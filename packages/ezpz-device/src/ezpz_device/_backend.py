"""Which backend of torch.distributed serves a device, and which dtypes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType

import torch
import torch.distributed as dist

from ._select import DeviceError, get_torch_device_type

# The communication backend of a device.

ONECCL_MODULE = "oneccl_bindings_for_pytorch"
"""Importing it registers the backend ``ccl`` with torch (Intel's torch-ccl)."""

BACKENDS = ("nccl", "xccl", "ccl", "gloo", "mpi", "ucc")
"""Every backend that moves data between ranks; RCCL reports itself as nccl."""


def get_torch_backend(env: Mapping[str, str] | None = None) -> str:
    """Return the backend for this process's device: ``nccl``, ``xccl``, ``ccl`` or ``gloo``.

    ``TORCH_BACKEND`` decides where it is set. Else: cuda takes nccl (RCCL reports itself
    so), xpu takes xccl where torch has it and ccl otherwise, all else takes gloo.

    Args:
        env: The environment to read; default ``os.environ``.

    Raises:
        DeviceError: The backend requested, or the only one for the device, is not in
            this torch.
    """
    env = os.environ if env is None else env
    wanted = env.get("TORCH_BACKEND")
    if wanted:
        if not is_backend_available(wanted):
            raise DeviceError(
                f"TORCH_BACKEND={wanted!r} is not in this torch; available: "
                f"{', '.join(available_backends())}; unset TORCH_BACKEND to choose by device"
            )
        return wanted.lower()
    device_type = get_torch_device_type(env)
    candidates = {"cuda": ("nccl",), "xpu": ("xccl", "ccl")}.get(device_type, ("gloo",))
    for candidate in candidates:
        if is_backend_available(candidate):
            return candidate
    raise DeviceError(
        f"no backend for {device_type}: this torch has none of {', '.join(candidates)}; "
        "install a torch built with it, or set TORCH_BACKEND=gloo to communicate through the host"
    )


def is_backend_available(backend: str) -> bool:
    """Return whether this is one of the backends we know, and torch or a plug-in has it."""
    backend = backend.lower()
    if backend == "ccl":
        return find_spec(ONECCL_MODULE) is not None
    # For torch "fake" and "undefined" are available too, whose collectives do nothing.
    return backend in BACKENDS and bool(dist.is_backend_available(backend))


def available_backends() -> list[str]:
    """Return the names of the backends that this process can use."""
    return [name for name in BACKENDS if is_backend_available(name)]


# Names of floating-point types, as people write them, to torch's.

TORCH_DTYPES_MAP: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
        "fp16": torch.float16, "float16": torch.float16, "half": torch.float16,
        "fp32": torch.float32, "float32": torch.float32, "float": torch.float32,
        "fp64": torch.float64, "float64": torch.float64, "double": torch.float64,
    }
)  # fmt: skip
"""Read-only; what `as_dtype` takes beside torch's own names."""


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype of a name such as ``"bf16"``; a dtype is returned as it is.

    A name is one in `TORCH_DTYPES_MAP`, or torch's own, such as ``"int32"`` or ``"torch.int32"``.

    Raises:
        ValueError: It is none of these.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        named = TORCH_DTYPES_MAP.get(name, getattr(torch, name, None))
        if isinstance(named, torch.dtype):
            return named
    raise ValueError(
        f"dtype {dtype!r}; expected one of {', '.join(TORCH_DTYPES_MAP)}, another name of torch's "
        "such as 'int32', or a torch.dtype"
    )
