import os
import platform
import sys

import pytest
import torch

from ezpz_device import DeviceError, get_device_properties, get_memory, reset_peak_memory
from ezpz_device._properties import get_cpu_name, get_host_total, read_host_use, reset_host_peak
from ezpz_device._select import device_in_use

MIB = 1 << 20


def test_what_is_taken_is_seen_and_the_peak_outlives_it():
    before = get_memory("cpu")
    block = torch.ones(64 * MIB // 8, dtype=torch.float64)
    during = get_memory("cpu")
    assert during.allocated - before.allocated > 60 * MIB
    assert during.reserved == during.allocated
    del block
    after = get_memory("cpu")
    assert after.allocated < during.allocated - 60 * MIB
    # Linux adds up a thread's pages when there are some.
    assert after.peak > during.allocated - 2 * MIB
    assert after.total == get_host_total()


@pytest.mark.skipif(sys.platform != "linux", reason="clear_refs is Linux's")
def test_the_peak_starts_again():
    block = torch.ones(64 * MIB // 8, dtype=torch.float64)
    del block
    high = get_memory("cpu").peak
    assert reset_peak_memory("cpu")
    assert get_memory("cpu").peak < high - 50 * MIB


def test_the_peak_is_this_processs_own_where_the_kernel_has_proc(tmp_path):
    resident, peak = read_host_use(tmp_path)
    assert resident is None
    assert peak >= get_memory("cpu").allocated // 2
    assert reset_host_peak(tmp_path) is False
    # getrusage's is not: a small process started by a large one begins with its peak.
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("Name:\ta: b\nVmHWM:\t  3 kB\nVmRSS:\t  2 kB\nCpu:\t\n")
    assert read_host_use(tmp_path) == (2048, 3072)


@pytest.mark.parametrize("limit", [64 * MIB, 1 << 62, None])
def test_a_control_groups_limit(monkeypatch, limit):
    monkeypatch.setattr("ezpz_device._properties.get_memory_limit", lambda: limit)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert get_host_total.__wrapped__() == (64 * MIB if limit == 64 * MIB else physical)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_device():
    block = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    memory = get_memory("cuda")
    assert memory.total >= memory.reserved >= memory.allocated >= block.numel()
    del block
    high = get_memory("cuda").peak
    assert high >= 64 * MIB
    assert reset_peak_memory("cuda")
    assert get_memory("cuda").peak < high


# What a device is.


def test_the_cpu():
    found = get_device_properties("cpu")
    assert found["type"] == "cpu"
    assert found["index"] is None
    assert found["name"]
    assert found["compute_units"] == len(os.sched_getaffinity(0))
    assert found["total_memory"] <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_default_is_the_device_in_use():
    assert get_device_properties(env={"TORCH_DEVICE": "cpu"}) == get_device_properties("cpu:0")
    assert device_in_use(None, {"TORCH_DEVICE": "cpu:0"}) == torch.device("cpu")


def test_a_device_that_is_not_there():
    if torch.xpu.is_available():
        pytest.skip("this machine has xpu")
    with pytest.raises(DeviceError, match=r"device='xpu:0'.*sees no xpu device"):
        get_device_properties("xpu:0")


EPYC = "processor\t: 0\nmodel name\t: AMD EPYC 7A53\nmodel name\t: other\n"
ARM = "processor : 0\nBogoMIPS : 243\n"


@pytest.mark.parametrize(("text", "name"), [(EPYC, "AMD EPYC 7A53"), (ARM, ""), (None, "")])
def test_the_name_of_a_cpu_or_what_there_is_in_its_place(tmp_path, text, name):
    cpuinfo = tmp_path / "cpuinfo"
    if text is not None:
        cpuinfo.write_text(text)
    assert get_cpu_name(cpuinfo) == (name or platform.processor() or platform.machine())
