import os

import pytest

from ezpz_topo import InvalidVariableError, get_accelerators, get_cpu_count


def found(env, root):
    devices = get_accelerators(env, root=str(root))
    return devices.device_type, devices.count


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ("cuda", 4)),
        ({"CUDA_VISIBLE_DEVICES": "2"}, ("cuda", 1)),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, ("cuda", 1)),
        ({"CUDA_VISIBLE_DEVICES": ""}, ("cpu", 0)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-1d2b"}, ("cuda", 2)),
        ({"ROCR_VISIBLE_DEVICES": "0,1"}, ("cuda", 2)),
        ({"ZE_AFFINITY_MASK": "0.0,0.1,1.0"}, ("xpu", 3)),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ("cpu", 0)),
        ({"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "0.0,0.1"}, ("xpu", 2)),
        ({"TORCH_DEVICE": "xpu", "CUDA_VISIBLE_DEVICES": "0,1"}, ("xpu", 0)),
        ({"TORCH_DEVICE": "cuda:1", "CUDA_VISIBLE_DEVICES": "0,1"}, ("cuda", 2)),
        ({"TORCH_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "0,1"}, ("cpu", 0)),
    ],
)
def test_variables_decide(env, expected, tmp_path):
    assert found(env, tmp_path) == expected


@pytest.mark.parametrize("bogus", ["gpu", "CPU", "meta"])
def test_a_device_type_that_does_not_exist(bogus, tmp_path):
    with pytest.raises(InvalidVariableError, match=f"TORCH_DEVICE='{bogus}'; expected one of xpu"):
        found({"TORCH_DEVICE": bogus}, tmp_path)


def test_a_device_named_twice(tmp_path):
    with pytest.raises(InvalidVariableError, match="names a device twice"):
        found({"CUDA_VISIBLE_DEVICES": "0,0"}, tmp_path)


def test_nvidia_device_files(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / "dev" / name).touch()
    assert found({}, tmp_path) == ("cuda", 2)


def test_amd_nodes_with_simds_are_gpus(tmp_path):
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for node, simds in enumerate((0, 304, 304)):
        (nodes / str(node)).mkdir(parents=True)
        (nodes / str(node) / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simds}\n")
    (nodes / "3").mkdir()  # not readable for us: outside the job's cgroup
    assert found({}, tmp_path) == ("cuda", 2)


def test_nothing_is_said_with_its_source(tmp_path):
    devices = get_accelerators({}, root=str(tmp_path))
    assert "no accelerator" in devices.source or devices.device_type == "mps"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system")
def test_cpu_count_follows_the_affinity():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert get_cpu_count() == 1
    finally:
        os.sched_setaffinity(0, before)
