import re

import pytest
import torch
import torch.distributed as dist

from ezpz_device import (
    TORCH_DTYPES_MAP,
    DeviceError,
    _backend,
    as_dtype,
    available_backends,
    get_torch_backend,
    is_backend_available,
)


def test_what_torch_itself_says():
    with pytest.raises(DeviceError, match=r"'smoke'.*available: .*gloo.*unset TORCH_BACKEND"):
        get_torch_backend({"TORCH_BACKEND": "smoke"})
    assert ("nccl" in available_backends()) == dist.is_nccl_available()
    assert is_backend_available("GLOO")
    assert not any(map(is_backend_available, ("fake", "undefined", ""))), "they move no data"
    assert get_torch_backend({"TORCH_DEVICE": "cpu"}) == "gloo"
    assert get_torch_backend({"TORCH_BACKEND": "Gloo"}) == "gloo"


# An accelerator cannot be had on every machine: the choice is checked with torch's answers
# to "which device" and "which backends" put in place of them.


@pytest.mark.parametrize(
    ("device_type", "available", "expected"),
    [
        ("cuda", {"nccl", "gloo"}, "nccl"),
        ("xpu", {"xccl", "ccl", "gloo"}, "xccl"),
        ("xpu", {"ccl", "gloo"}, "ccl"),
        ("mps", {"gloo"}, "gloo"),
        ("cuda", {"gloo"}, None),
        ("xpu", {"gloo"}, None),
    ],
)
def test_the_backend_of_a_device(monkeypatch, device_type, available, expected):
    monkeypatch.setattr(_backend, "get_torch_device_type", lambda env: device_type)
    monkeypatch.setattr(_backend, "is_backend_available", lambda name: name in available)
    if expected is not None:
        assert get_torch_backend({}) == expected
        return
    with pytest.raises(DeviceError, match=f"no backend for {device_type}.*TORCH_BACKEND=gloo"):
        get_torch_backend({})


def test_names_and_dtypes():
    assert as_dtype("bf16") is as_dtype("bfloat16") is torch.bfloat16
    assert as_dtype(torch.float64) is torch.float64
    assert all(dtype.is_floating_point for dtype in TORCH_DTYPES_MAP.values())
    for name in ("torch.int32", "int32"):
        assert as_dtype(name) is torch.int32
    assert as_dtype("torch.bf16") is as_dtype("torch.bfloat16") is torch.bfloat16
    for name in ("bf15", "nn", "", 16, None, ["bf16"]):
        words = f"dtype {name!r}; expected one of bf16, bfloat16"
        with pytest.raises(ValueError, match=re.escape(words)):
            as_dtype(name)
