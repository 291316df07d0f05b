import pytest
import torch

from ezpz_device import DeviceError, _select, get_torch_device, get_torch_device_type

FIRST_USABLE = next(name for name, usable in _select.DEVICE_TYPES.items() if usable())


def test_what_this_machine_has_and_what_torch_device_decides():
    assert get_torch_device_type({"TORCH_DEVICE": "cpu"}) == "cpu"
    assert get_torch_device({"TORCH_DEVICE": "cpu:0"}) == "cpu:0"
    assert get_torch_device_type({}) == FIRST_USABLE
    assert torch.zeros(1, device=get_torch_device({})).device.type == FIRST_USABLE


@pytest.mark.parametrize("wanted", ["cuda:x", "meta"])
def test_torch_device_that_is_none_of_ours(wanted):
    with pytest.raises(DeviceError, match=f"TORCH_DEVICE='{wanted}'.*one of xpu, cuda, mps, cpu"):
        get_torch_device_type({"TORCH_DEVICE": wanted})


@pytest.mark.parametrize("absent", ["cuda", "xpu", "mps"])
def test_torch_device_that_this_torch_cannot_use(absent):
    if _select.DEVICE_TYPES[absent]():
        pytest.skip(f"this machine has {absent}")
    with pytest.raises(DeviceError, match=f"sees no {absent} device; unset TORCH_DEVICE"):
        get_torch_device({"TORCH_DEVICE": absent})


# Several devices cannot be had on every machine; the index arithmetic can be checked.


@pytest.mark.parametrize(
    ("local_rank", "count", "env", "index"),
    [
        (11, 12, {}, 11),
        (5, 1, {"ROCR_VISIBLE_DEVICES": "5"}, 0),  # srun --gpus-per-task=1 --gpu-bind=closest
        (4, 4, {}, None),
        (4, 4, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None),
    ],
)
def test_the_local_rank_indexes_the_visible_devices(local_rank, count, env, index):
    if index is not None:
        assert _select._choose_index(local_rank, count, "xpu", env) == index
        return
    with pytest.raises(DeviceError, match=f"local rank {local_rank} has no xpu device: {count}"):
        _select._choose_index(local_rank, count, "xpu", env)
