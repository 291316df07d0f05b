"""Names of floating-point types, as people write them, to torch's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

TORCH_DTYPES_MAP: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "bf16": torch.bfloat16,
        "bfloat16": torch.bfloat16,
        "fp16": torch.float16,
        "float16": torch.float16,
        "half": torch.float16,
        "fp32": torch.float32,
        "float32": torch.float32,
        "float": torch.float32,
        "fp64": torch.float64,
        "float64": torch.float64,
        "double": torch.float64,
    }
)
"""Read-only; every spelling that `as_dtype` takes."""


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype of a name such as ``"bf16"``; a dtype is returned as it is.

    Raises:
        ValueError: The name is not in `TORCH_DTYPES_MAP`.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return TORCH_DTYPES_MAP[dtype]
    except KeyError:
        raise ValueError(
            f"dtype {dtype!r}; expected one of {', '.join(TORCH_DTYPES_MAP)} or a torch.dtype"
        ) from None
