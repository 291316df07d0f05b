"""How fast a device can be at best, from a table of what the vendors state."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from ._backend import as_dtype
from ._select import DeviceError, device_in_use

OVERRIDE = "EZPZ_PEAK_FLOPS"

KINDS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")
"""What the table has rates of."""

_KIND_OF = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8", torch.float8_e4m3fnuz: "fp8",
    torch.float8_e5m2: "fp8", torch.float8_e5m2fnuz: "fp8", torch.int8: "int8",
}  # fmt: skip


def get_peak_flops(
    dtype: str | torch.dtype = "bf16",
    device: str | torch.device | None = None,
    *,
    peak_flops: float | None = None,
    env: Mapping[str, str] | None = None,
) -> float | None:
    """Return the floating-point operations a second that a device does at best.

    It is for matrix products, dense, as the vendor states it. A part of a device (a tile of
    Intel's, a MIG slice of NVIDIA's, a partition of AMD's) has its share of the compute units.

    >>> get_peak_flops("bf16", "cpu") is None
    True
    >>> get_peak_flops("bf16", "cpu", env={"EZPZ_PEAK_FLOPS": "2e12"})
    2000000000000.0

    Args:
        dtype: What the products are of: a torch dtype, or "fp64", "fp32", "tf32", "bf16",
            "fp16", "fp8", "int8". With ``torch.set_float32_matmul_precision("high")`` products
            of fp32 run as "tf32".
        device: Default: the one in use, see `get_device_properties`.
        peak_flops: Known better: it is returned.
        env: The environment to read; default ``os.environ``. ``EZPZ_PEAK_FLOPS`` comes after
            ``peak_flops`` and before the table, whatever the dtype.

    Returns:
        FLOP/s of this one device. None where the table does not have it (any CPU, and devices or
        dtypes that no datasheet was found for). There is no guess.

    Raises:
        DeviceError: The device cannot be used, or ``EZPZ_PEAK_FLOPS`` is no number above 0.
        ValueError: ``dtype`` is none of these, or ``peak_flops`` is no number above 0.
    """
    env = os.environ if env is None else env
    kind = _find_kind(dtype)
    if peak_flops is not None:
        if not 0 < peak_flops < math.inf:
            raise ValueError(f"peak_flops={peak_flops}; expected FLOP/s above 0, such as 312e12")
        return float(peak_flops)
    if env.get(OVERRIDE):
        return _parse_override(env[OVERRIDE])
    used = device_in_use(device, env)
    if used.type not in {"cuda", "xpu"}:
        return None
    properties = getattr(torch, used.type).get_device_properties(used)
    return find_peak(properties.name, count_compute_units(properties), kind)


def _find_kind(dtype: str | torch.dtype) -> str:
    if isinstance(dtype, str) and dtype in KINDS:
        return dtype
    with suppress(ValueError, KeyError):
        return _KIND_OF[as_dtype(dtype)]
    raise ValueError(
        f"dtype {dtype!r}; expected one of {', '.join(KINDS)}, or a torch.dtype of these"
    )


def _parse_override(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise DeviceError(
        f"{OVERRIDE}={text!r} is no number above 0; expected FLOP/s of one device, such as "
        "312e12, or nothing"
    )


def find_peak(name: str, units: int, kind: str) -> float | None:
    """Return FLOP/s of a device by torch's name and number of compute units; None if unknown."""
    # "NVIDIA A100-SXM4-40GB MIG 1g.5gb": a slice, which shows its own multiprocessors only.
    whole = name.partition(" MIG ")[0].strip()
    for row in read_peaks():
        # More units than the datasheet's are of another product under the same name.
        if whole in row["match"] and kind in row["tflops"] and 0 < units <= row["units"]:
            return float(row["tflops"][kind] * 1e12 * units / row["units"])
    return None


def count_compute_units(properties: Any) -> int:
    """Return how many multiprocessors (CUDA, ROCm) or vector engines (XPU) torch reports."""
    units = getattr(properties, "multi_processor_count", None)
    if units is None:
        units = properties.max_compute_units
    return int(units)


@cache
def read_peaks() -> list[dict[str, Any]]:
    """Return the rows of ``peaks.toml``, which describes their keys."""
    text = files(__package__).joinpath("peaks.toml").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = tomllib.loads(text)["device"]
    return rows
