import os

import pytest
import torch

from ezpz_device import DeviceError, get_device_properties
from ezpz_device._properties import cpu_name
from ezpz_device._select import device_in_use


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


def test_the_name_of_a_cpu(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: AMD EPYC 7A53\nmodel name\t: other\n")
    assert cpu_name(cpuinfo) == "AMD EPYC 7A53"


@pytest.mark.parametrize("text", ["processor : 0\nBogoMIPS : 243\n", None])
def test_a_cpu_without_a_name(tmp_path, text):
    cpuinfo = tmp_path / "cpuinfo"
    if text is not None:
        cpuinfo.write_text(text)  # Arm
    assert cpu_name(cpuinfo) == get_device_properties("cpu")["architecture"] or cpu_name(cpuinfo)
