import pytest
import torch

from ezpz_device import TORCH_DTYPES_MAP, as_dtype


def test_names_and_dtypes():
    assert as_dtype("bf16") is as_dtype("bfloat16") is torch.bfloat16
    assert as_dtype(torch.float64) is torch.float64
    assert all(dtype.is_floating_point for dtype in TORCH_DTYPES_MAP.values())


def test_unknown_name():
    with pytest.raises(ValueError, match="dtype 'bf15'; expected one of bf16"):
        as_dtype("bf15")
