import math
import re
from types import SimpleNamespace

import pytest
import torch

from ezpz_device import DeviceError, get_peak_flops
from ezpz_device._peaks import KINDS, count_compute_units, find_peak, read_peaks

ROWS = read_peaks()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_row_is_sane(row):
    assert row["match"]
    assert all(name == name.strip() and " MIG " not in name for name in row["match"])
    assert 1 <= row["units"] <= 2048
    assert all(8 <= size <= 512 for size in row["memory_gb"])
    rates = row["tflops"]
    assert rates
    assert set(rates) <= set(KINDS)
    # TFLOP/s, not FLOP/s, and nothing with a zero too many.
    assert all(1 < rate < 1e4 for rate in rates.values())
    assert row["source"]
    assert re.fullmatch(r"20\d\d-[01]\d", row["date"])
    # Fewer bits are no slower.
    order = [rates[kind] for kind in ("fp64", "fp32", "tf32", "bf16", "fp8") if kind in rates]
    assert order == sorted(order)
    if {"bf16", "fp16"} <= set(rates) and "MI100" not in row["name"]:
        assert rates["bf16"] == rates["fp16"]
    for wide, narrow in (("tf32", "bf16"), ("bf16", "fp8")):
        if {wide, narrow} <= set(rates):
            # A figure with sparsity in one column and a dense one in the other would be 4 or 1.
            assert 1.95 < rates[narrow] / rates[wide] < 2.05


def test_names_are_of_one_row_and_what_could_not_be_compared_is_marked():
    names = [name for row in ROWS for name in row["match"]]
    assert len(names) == len(set(names))
    assert {row["name"] for row in ROWS if row.get("unverified")} == {
        "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GH200", "Intel Data Center GPU Max 1100",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "units", "kind", "teraflops"),
    [
        ("Tesla V100-SXM2-32GB", 80, "fp16", 125),
        ("NVIDIA A100-SXM4-40GB", 108, "tf32", 156),
        ("NVIDIA A100 80GB PCIe", 108, "fp64", 19.5),
        ("NVIDIA H100 80GB HBM3", 132, "bf16", 989.4),
        ("NVIDIA H100 PCIe", 114, "bf16", 756),
        ("NVIDIA GH200 120GB", 132, "fp8", 1979),
        ("AMD Instinct MI250X / MI250", 104, "bf16", 181.05),
        ("AMD Instinct MI250X/MI250", 110, "fp64", 47.85),
        ("AMD Instinct MI300X", 304, "bf16", 1307.4),
        ("Intel(R) Data Center GPU Max 1550", 1024, "bf16", 839),
        ("Intel(R) Data Center GPU Max 1550", 448, "bf16", 367.0625),  # a tile of Aurora's
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14, "bf16", 312 * 14 / 108),
        ("AMD Instinct MI300X", 38, "bf16", 1307.4 / 8),  # one of eight partitions
        # What is not known is not guessed.
        ("NVIDIA A10G", 80, "bf16", None),  # not A10, nor A100
        ("NVIDIA A100-SXM4-40GB", 124, "bf16", None),  # more than the datasheet's: something else
        ("NVIDIA H200 NVLX", 132, "bf16", None),
        ("Tesla V100-SXM2-32GB", 80, "bf16", None),  # has none
        ("", 1, "bf16", None),
        ("NVIDIA H200", 0, "bf16", None),
    ],
)
def test_names_as_torch_reports_them(name, units, kind, teraflops):
    expected = None if teraflops is None else pytest.approx(teraflops * 1e12, rel=1e-4)
    assert find_peak(name, units, kind) == expected


def test_a_cpu_has_none_unless_the_user_knows(monkeypatch):
    assert get_peak_flops("bf16", "cpu", env={}) is None
    assert get_peak_flops("bf16", "cpu", env={"EZPZ_PEAK_FLOPS": "3.5e12"}) == 3.5e12
    assert get_peak_flops(peak_flops=1e12, env={"EZPZ_PEAK_FLOPS": "3.5e12"}) == 1e12
    assert get_peak_flops("bf16", "cpu", env={"EZPZ_PEAK_FLOPS": ""}) is None
    monkeypatch.setenv("EZPZ_PEAK_FLOPS", "7e12")
    assert get_peak_flops("fp8", "cpu") == 7e12
    for value in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="expected FLOP/s above 0"):
            get_peak_flops(peak_flops=value, device="cpu")


@pytest.mark.parametrize("text", ["0", "nan", "312 TFLOPS"])
def test_an_override_that_is_no_rate(text):
    with pytest.raises(DeviceError, match=f"EZPZ_PEAK_FLOPS='{text}' .* expected FLOP/s"):
        get_peak_flops(device="cpu", env={"EZPZ_PEAK_FLOPS": text})


RATED = [torch.bfloat16, "bf16", "bfloat16", "tf32", "int8", torch.int8, torch.float8_e4m3fn]
RATED += ["torch.bfloat16", "float8_e4m3fn"]


def test_the_dtypes_that_have_rates_and_a_device_that_is_none():
    assert [get_peak_flops(dtype, "cpu", env={}) for dtype in RATED] == [None] * len(RATED)
    for dtype in ("bf15", "int64", None, torch.int64, torch.complex64):
        with pytest.raises(ValueError, match=r"expected one of fp64, fp32, tf32"):
            get_peak_flops(dtype, "cpu")
    for device in ("gpu", "meta"):
        with pytest.raises(DeviceError, match=f"device='{device}'.*expected one of xpu"):
            get_peak_flops("bf16", device)


# What torch's properties of an accelerator look like, as of torch 2.13: captured, not run here.


def test_compute_units():
    h200 = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    pvc = SimpleNamespace(name="Intel(R) Data Center GPU Max 1550", max_compute_units=512)
    assert [count_compute_units(each) for each in (h200, pvc)] == [132, 512]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_this_machines_device():
    name = torch.cuda.get_device_name()
    known = any(name in row["match"] for row in ROWS)
    assert (get_peak_flops("bf16", "cuda", env={}) is not None) == known
