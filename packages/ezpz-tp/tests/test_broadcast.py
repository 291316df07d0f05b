"""`broadcast_data`: what the first rank of a tensor-parallel group has, on all of it."""

import pytest
import torch

import ezpz_tp as tp
from ezpz_tp._data import _DTYPES
from ezpz_tp.testing import counting, run_ranks

SHAPES = {"text": (2, 5), "mask": (1, 1, 2, 5), "scalar": (), "none": (0, 3), "big": (2,) * 9}


def batch(dtype):
    generator = torch.Generator().manual_seed(0)
    return {
        key: torch.randint(0, 2, shape, generator=generator).to(dtype)
        for key, shape in SHAPES.items()
    }


def received(data, keys, dtype):
    first = tp.get_state().index("tensor") == 0
    with counting() as counter:
        got = tp.broadcast_data(keys, data if first else None, dtype)
    return got, dict(counter)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_every_dtype_and_shape(dtype):
    data = batch(dtype)
    keys = list(SHAPES)
    for got, counter in run_ranks(received, 3, data, keys, dtype):
        assert list(got) == keys
        for key in keys:
            assert got[key].dtype == dtype
            assert got[key].shape == SHAPES[key]
            assert torch.equal(got[key], data[key])
        assert counter == {"broadcast": 2}


def test_keys_come_in_their_order_and_others_stay_behind():
    data = batch(torch.int64)
    for got, _ in run_ranks(received, 2, data, ("scalar", "text"), torch.int64):
        assert list(got) == ["scalar", "text"]
    for got, counter in run_ranks(received, 2, data, (), torch.int64):
        assert got == {}
        assert counter == {"broadcast": 1}


def test_more_shapes_than_the_first_message_holds():
    data = {str(i): torch.full((1, i % 3), i) for i in range(40)}
    for got, counter in run_ranks(received, 2, data, list(data), torch.int64):
        assert all(torch.equal(got[key], data[key]) for key in data)
        assert counter == {"broadcast": 3}


def test_views_and_tensors_that_need_gradients():
    weight = torch.arange(12.0).view(3, 4).requires_grad_()
    data = {"transposed": weight.t(), "expanded": torch.ones(1).expand(3)}
    for got, _ in run_ranks(received, 2, data, list(data), torch.float32):
        assert torch.equal(got["transposed"], weight.detach().t())
        assert torch.equal(got["expanded"], torch.ones(3))
        assert not got["transposed"].requires_grad


def test_results_do_not_share_with_the_data():
    data = batch(torch.int64)
    kept = {key: value.clone() for key, value in data.items()}
    for got, _ in run_ranks(received, 2, data, ["text"], torch.int64):
        got["text"].zero_()
    assert torch.equal(data["text"], kept["text"])


def per_group():
    state = tp.get_state()
    data = {"x": torch.tensor([state.index("data")])} if state.index("tensor") == 0 else {}
    return int(tp.broadcast_data(["x"], data, torch.int64)["x"])


def test_each_tensor_group_has_its_own_data():
    assert run_ranks(per_group, 4, tensor=2, data=2) == [0, 0, 1, 1]
    assert run_ranks(per_group, 4, tensor=2, data=2, in_processes=True) == [0, 0, 1, 1]


def test_alone_the_tensors_themselves():
    data = batch(torch.int64)
    ((got, counter),) = run_ranks(received, 1, data, ["text", "mask"], torch.int64)
    assert got["text"] is data["text"]
    assert list(got) == ["text", "mask"]
    assert counter == {}
    (moved,) = run_ranks(
        lambda: tp.broadcast_data(["text"], data, torch.int64, device="meta")["text"], 1
    )
    assert moved.device.type == "meta"


WRONG = {
    "missing": ({"a": torch.zeros(2)}, "'b' is missing from the data"),
    "dtype": ({"a": torch.zeros(2), "b": torch.zeros(2).half()}, "'b' has dtype torch.float16"),
    "odd": ({"a": torch.zeros(2), "b": torch.zeros(2).to(torch.float8_e5m2)}, "dtype unknown"),
    "list": ({"a": torch.zeros(2), "b": [1.0]}, "'b' is not a tensor"),
    "none": (None, "'a' is missing from the data"),
}


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("case", WRONG)
def test_the_same_error_on_every_rank(case, degree):
    data, message = WRONG[case]

    def failed():
        with pytest.raises(ValueError, match=r"expected a tensor of torch\.float32") as error:
            received(data, ["a", "b"], torch.float32)
        return str(error.value)

    told = run_ranks(failed, degree)
    assert len(set(told)) == 1
    assert message in told[0]


def test_ranks_that_ask_for_different_keys():
    def other_keys():
        first = tp.get_tensor_parallel_rank() == 0
        tp.broadcast_data(["a" if first else "b"], {"a": torch.zeros(1)}, torch.float32)

    with pytest.raises(tp.ParallelError, match=r"rank 1 of the group asks for \['b'\]"):
        run_ranks(other_keys, 2)
