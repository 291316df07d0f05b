"""The check ``accelerator`` of ``ezpz doctor``."""

import time

import pytest
import torch

from ezpz_device import get_torch_device_type
from ezpz_device._checks import check, count_devices, has_support, try_devices

NOTHING = {"PATH": "/nonexistent"}


@pytest.fixture
def bare(tmp_path):
    """A host with a /dev, and no accelerator in it."""
    (tmp_path / "dev").mkdir()
    return tmp_path


@pytest.fixture
def with_nvidia(bare):
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"):
        (bare / "dev" / name).touch()
    return bare


cpu_only = pytest.mark.skipif(
    get_torch_device_type({}) != "cpu", reason="this torch sees an accelerator"
)


@cpu_only
def test_a_workstation_without_one_is_well(bare):
    result = check(60, NOTHING, root=str(bare))
    assert result.status == "ok"
    assert "none on this host" in result.message
    assert f"torch {torch.__version__} computes on the CPU; gloo starts" in result.message
    assert result.details["count"] == 0


@cpu_only
@pytest.mark.skipif(has_support("cuda"), reason="this torch is built for CUDA")
def test_gpus_that_torch_is_not_built_for_are_an_error(with_nvidia):
    result = check(60, NOTHING, root=str(with_nvidia))
    assert result.status == "error"
    assert "this host has 2 cuda devices" in result.message
    assert f"torch {torch.__version__} is built without CUDA or ROCm" in result.message
    assert "TORCH_DEVICE=cpu" in result.remedy


@cpu_only
@pytest.mark.parametrize(
    ("env", "status", "message"),
    [
        # GPUs that are not wanted
        ({"TORCH_DEVICE": "cpu"}, "ok", "none on this host"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "ok", "CUDA_VISIBLE_DEVICES='' hides every device"),
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, "error", "names a device twice"),
        ({"TORCH_DEVICE": "cuda"}, "error", "sees no cuda device"),
    ],
)
def test_variables_beside_gpus(with_nvidia, env, status, message):
    result = check(60, {**NOTHING, **env}, root=str(with_nvidia))
    assert result.status == status
    assert message in result.message
    assert result.remedy or status == "ok"


def test_a_backend_that_torch_does_not_have_is_an_error(bare):
    result = check(60, {**NOTHING, "TORCH_DEVICE": "cpu", "TORCH_BACKEND": "ucc"}, root=str(bare))
    if torch.distributed.is_backend_available("ucc"):
        assert result.status == "ok"
        return
    assert result.status == "error"
    assert "TORCH_BACKEND='ucc' is not in this torch" in result.message


def test_devices_are_counted_as_torch_does_and_multiply():
    assert (count_devices("cpu"), count_devices("mps")) == (0, 1)
    assert count_devices("cuda") == torch.cuda.device_count()
    # The CPU has an index 0, too; the first device is tried however late it is.
    assert try_devices("cpu", 1, time.monotonic() + 60) == (1, "")
    assert try_devices("cpu", 3, time.monotonic() - 1) == (1, "")
    # A tensor on the meta device has no values to bring back.
    done, wrong = try_devices("meta", 1, time.monotonic() + 60)
    assert done == 0
    assert wrong.startswith("meta:0 cannot multiply: Cannot copy out of meta tensor")


@cpu_only
def test_a_backend_that_does_not_start_is_an_error(bare, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "hsn7")
    result = check(60, NOTHING, root=str(bare))
    assert result.status == "error"
    assert "the backend gloo of cpu does not start" in result.message
    assert "hsn7" in result.message


def test_what_is_computed_wrongly_is_an_error(bare, monkeypatch):
    multiply = torch.Tensor.__matmul__
    errors = iter((0, 3))  # the host is right, and the device is not

    def multiply_wrongly(one, other):
        product = multiply(one, other)
        product[-1, 0] -= next(errors)
        return product

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__matmul__", multiply_wrongly)
        done, problem = try_devices("cpu", 1, time.monotonic() + 60)
    assert (done, problem) == (0, "cpu:0 multiplies wrongly: off by 3")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.add_(1))
    result = check(60, {**NOTHING, "TORCH_DEVICE": "cpu"}, root=str(bare))
    assert result.status == "error"
    assert "gloo of cpu does not start: the sum of 3 alone is 4" in result.message
