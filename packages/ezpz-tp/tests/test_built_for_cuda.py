"""A torch that was built for CUDA, as the default wheel is, where there is no CUDA device."""

import contextlib
from unittest import mock

import pytest
import torch
from on_ranks import on_ranks

import ezpz_tp as tp
from ezpz_tp._megatron import GlobalMemoryBuffer

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")


@contextlib.contextmanager
def built_for_cuda():
    """Let torch's own core say what that of the CUDA wheel (2.13.0+cu130) says there."""
    with (
        mock.patch.object(torch.version, "cuda", "13.0"),
        mock.patch.object(torch._C, "_has_cuda", True),
        mock.patch.object(torch._C, "_cuda_getDeviceCount", return_value=0, create=True),
        mock.patch.object(
            torch._C, "_accelerator_getAccelerator", return_value=torch.device("cuda")
        ),
    ):
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert not torch.accelerator.is_available()
        yield


@on_ranks(2, in_processes=True)
def test_ranks_of_gloo_send_from_the_cpu():
    with built_for_cuda():
        tp.seed_model_parallel(1)
        with tp.get_rng_tracker().fork():
            torch.rand(2)
        layer = tp.ColumnParallelLinear(4, 6, bias=False, gather_output=False)
        held = tp.dtensor_state_dict(layer)
        tp.load_dtensor_state_dict(layer, held)
        whole = tp.gather_state_dict(layer)
        sent = tp.broadcast_data(["ids"], {"ids": torch.arange(3)}, torch.int64)
        buffer = GlobalMemoryBuffer().get_tensor([2], torch.float32, "some")
        places = {each.device.type for each in (layer.weight, sent["ids"], buffer)}
        places.add(tp.get_state().to_mesh().device_type)
    assert places == {"cpu"}
    assert whole is None or whole["weight"].shape == (6, 4)


def test_a_stream_that_was_saved_on_an_accelerator_is_refused():
    with built_for_cuda(), pytest.raises(tp.ParallelError, match="saved on an accelerator"):
        tp.RngTracker().set_states({"some": torch.zeros(16, dtype=torch.uint8)})
