"""Batches: what the first rank of a tensor group has, and which tokens are whose."""

import pytest
import torch
from on_ranks import all_raise, on_ranks

import ezpz_tp as tp
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


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64], ids=str
)
def test_any_dtype_and_shape(dtype):
    data = batch(dtype)
    keys = list(SHAPES)
    for got, counter in run_ranks(received, 3, data, keys, dtype):
        assert list(got) == keys
        for key in keys:
            assert got[key].dtype == dtype
            assert got[key].shape == SHAPES[key]
            assert torch.equal(got[key], data[key])
        assert counter == {"broadcast": 2}


def test_what_is_sent_and_what_is_not():
    # Keys come in their order, and others stay behind.
    data = batch(torch.int64)
    for got, _ in run_ranks(received, 2, data, ("scalar", "text"), torch.int64):
        assert list(got) == ["scalar", "text"]
    for got, counter in run_ranks(received, 2, data, (), torch.int64):
        assert got == {}
        assert counter == {"broadcast": 1}
    # More shapes than the first message holds.
    data = {str(i): torch.full((1, i % 3), i) for i in range(40)}
    for got, counter in run_ranks(received, 2, data, list(data), torch.int64):
        assert all(torch.equal(got[key], data[key]) for key in data)
        assert counter == {"broadcast": 3}
    # Views, and tensors that need gradients.
    weight = torch.arange(12.0).view(3, 4).requires_grad_()
    data = {"transposed": weight.t(), "expanded": torch.ones(1).expand(3)}
    for got, _ in run_ranks(received, 2, data, list(data), torch.float32):
        assert torch.equal(got["transposed"], weight.detach().t())
        assert torch.equal(got["expanded"], torch.ones(3))
        assert not got["transposed"].requires_grad
    # Results do not share with the data.
    data = batch(torch.int64)
    kept = {key: value.clone() for key, value in data.items()}
    for got, _ in run_ranks(received, 2, data, ["text"], torch.int64):
        got["text"].zero_()
    assert torch.equal(data["text"], kept["text"])


@on_ranks(4, tensor=2, data=2)
def test_each_tensor_group_has_its_own_data():
    state = tp.get_state()
    data = {"x": torch.tensor([state.index("data")])} if state.index("tensor") == 0 else {}
    assert tp.broadcast_data(["x"], data, torch.int64)["x"].item() == state.index("data")


@on_ranks(1)
def test_alone_the_tensors_themselves():
    data = batch(torch.int64)
    got, counter = received(data, ["text", "mask"], torch.int64)
    assert torch.equal(got["text"].cpu(), data["text"])
    assert got["text"] is data["text"] or got["text"].device.type != "cpu"
    assert list(got) == ["text", "mask"]
    assert counter == {}
    moved = tp.broadcast_data(["text"], data, torch.int64, device="meta")
    assert moved["text"].device.type == "meta"
    x = torch.ones(2, 7)
    assert tp.shard_sequence(x, 1) is tp.unshard_sequence(x, 1) is x
    assert tp.sequence_positions(7).tolist() == list(range(7))


WRONG = {
    "missing": ({"a": torch.zeros(2)}, "'b' is missing from the data"),
    "dtype": ({"a": torch.zeros(2), "b": torch.zeros(2).half()}, "'b' has dtype torch.float16"),
    "odd": ({"a": torch.zeros(2), "b": torch.zeros(2).to(torch.float8_e5m2)}, "dtype unknown"),
    "list": ({"a": torch.zeros(2), "b": [1.0]}, "'b' is not a tensor"),
    "none": (None, "'a' is missing from the data"),
}


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("case", WRONG)
def test_the_same_error_on_every_rank(case, degree):
    def failed():
        data, _ = WRONG[case]
        with pytest.raises(ValueError, match=r"expected a tensor of torch\.float32") as error:
            received(data, ["a", "b"], torch.float32)
        return str(error.value)

    told = run_ranks(failed, degree)
    assert len(set(told)) == 1
    assert WRONG[case][1] in told[0]


def test_ranks_that_ask_for_different_keys():
    def other_keys():
        first = tp.get_tensor_parallel_rank() == 0
        tp.broadcast_data(["a" if first else "b"], {"a": torch.zeros(1)}, torch.float32)

    with pytest.raises(tp.ParallelError, match=r"rank 1 of the group asks for \['b'\]"):
        run_ranks(other_keys, 2)


def positions(length, balanced):
    return tp.sequence_positions(length, balanced=balanced).tolist()


def test_chunks_from_both_ends():
    assert run_ranks(positions, 2, 8, True, context=2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert run_ranks(positions, 3, 6, True, context=3) == [[0, 5], [1, 4], [2, 3]]
    assert run_ranks(positions, 2, 6, False, context=2) == [[0, 1, 2], [3, 4, 5]]


def test_the_order_is_that_of_torchs_own_context_parallel():
    load_balancer = pytest.importorskip(
        "torch.distributed.tensor.experimental._context_parallel._load_balancer"
    )
    for ranks in (2, 4):
        theirs = load_balancer._HeadTailLoadBalancer(16, ranks, "cpu")._generate_indices()
        ours = run_ranks(positions, ranks, 16, True, context=ranks)
        assert [at for each in ours for at in each] == theirs[0].tolist()


def groups_of(kind):
    state = tp.get_state()
    if kind == "context":
        return {}
    return {"group": state.group("context"), "ulysses_group": state.group("tensor")}


def there_and_back(kind, dim, balanced, dtype, gathers):
    groups = groups_of(kind)
    whole = torch.arange(2 * 24 * 3).reshape(2, 24, 3).to(dtype)
    if dtype.is_floating_point:
        whole.requires_grad_()
    view = whole.transpose(1, 2) if dim == -1 else whole
    with counting() as sharding:
        part = tp.shard_sequence(view, dim, balanced=balanced, **groups)
    with counting() as joining:
        back = tp.unshard_sequence(part, dim, balanced=balanced, **groups)
    own = tp.sequence_positions(24, balanced=balanced, **groups)
    assert torch.equal(part, view.index_select(dim, own))
    assert part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    assert torch.equal(back, view)
    if dtype.is_floating_point:
        weights = torch.arange(1.0, 1.0 + view.numel(), dtype=dtype).reshape(view.shape)
        back.backward(weights)  # the same on every rank: each keeps its part, zero elsewhere
        grad = whole.grad.transpose(1, 2) if dim == -1 else whole.grad
        expected = torch.zeros_like(view)
        expected.index_copy_(dim, own, weights.index_select(dim, own))
        assert torch.equal(grad, expected)
    assert (sharding, joining) == ({}, {"all_gather": gathers})


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("dim", [1, -2, -1])
@pytest.mark.parametrize(
    ("kind", "degrees", "gathers"),
    [
        ("context", {"context": 3}, 1),
        ("both", {"context": 2, "tensor": 2}, 2),
        ("both", {"context": 2, "tensor": 3}, 2),
        ("both", {"context": 1, "tensor": 2}, 1),
    ],
)
def test_there_and_back(kind, degrees, gathers, dim, balanced):
    ranks = degrees["context"] * degrees.get("tensor", 1)
    for dtype in (torch.float64, torch.int64):  # hidden states, or tokens
        run_ranks(there_and_back, ranks, kind, dim, balanced, dtype, gathers, **degrees)


@on_ranks(2, context=2)
def test_gradients_of_different_uses_are_summed():
    rank = tp.get_state().index("context")
    part = torch.ones(4, dtype=torch.float64, requires_grad=True)
    keys = tp.unshard_sequence(part, 0, sum_grads=True)
    (keys * (rank + 1)).sum().backward()
    assert part.grad.tolist() == [3.0] * 4


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (tp.shard_sequence, (torch.zeros(2, 10), 1), "10 tokens, which 2 ranks in two chunks each"),
        (tp.unshard_sequence, (torch.zeros(2, 5), 1), "10 tokens, which 2 ranks in two chunks"),
        (tp.sequence_positions, (9,), "9 tokens, .* a multiple of 4: pad it to"),
        (tp.shard_sequence, (torch.zeros(4), 1), r"1 of a tensor of shape \(4,\); exp.*, -1 to 0"),
        (tp.unshard_sequence, (torch.zeros(()), 0), r"dim 0 of a tensor of shape \(\)"),
    ],
)
def test_what_does_not_fit(function, arguments, message):
    told = f"{function.__name__}: .*{message}"
    all_raise(2, lambda: function(*arguments), tp.DegreeError, told, context=2)


@on_ranks(6, context=2, tensor=3)
def test_how_the_multiple_follows_from_the_groups():
    with pytest.raises(tp.DegreeError, match=r"has 3 tokens, which 2 ranks cannot share .* of 2:"):
        tp.shard_sequence(torch.zeros(3), 0, balanced=False)
    with pytest.raises(tp.DegreeError, match=r"8 tokens, which 6 ranks in two .* of 12: pad it to"):
        tp.shard_sequence(torch.zeros(8), 0, **groups_of("both"))
    part = tp.shard_sequence(torch.zeros(6), 0, balanced=False, **groups_of("both"))
    assert part.shape == (1,)
