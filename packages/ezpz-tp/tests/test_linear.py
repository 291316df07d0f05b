"""The linear layers: shapes, attributes, options, and errors that name the layer."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn import functional as F

import ezpz_tp as tp
from ezpz_tp.testing import counting, run_ranks


def group():
    return tp.get_state().group("tensor")


def described():
    column = tp.ColumnParallelLinear(8, 12, seed=1)
    row = tp.RowParallelLinear(8, 12, seed=1)
    return (
        [
            (tuple(parameter.shape), parameter.tensor_model_parallel, parameter.partition_dim)
            for parameter in (column.weight, column.bias, row.weight)
        ],
        (tuple(row.bias.shape), getattr(row.bias, "tensor_model_parallel", False)),
        repr(row),
    )


def test_shapes_and_attributes():
    for rank, (shapes, row_bias, text) in enumerate(run_ranks(described, 2)):
        assert shapes == [((6, 8), True, 0), ((6,), True, 0), ((12, 4), True, 1)]
        assert row_bias == ((12,), False)
        expected = f"RowParallelLinear(in_features=8, out_features=12, bias=True, tp={rank}/2)"
        assert text == expected


@on_ranks(4)
def test_replicated_inputs_and_outputs():
    inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    column, row = tp.ColumnParallelLinear(8, 12, seed=1), tp.RowParallelLinear(12, 8, seed=2)
    full = [layer.get_master_weight() for layer in (column, row)]
    with counting() as counter:
        output = row(column(inputs))
    expected = F.linear(F.linear(inputs, full[0]), full[1])
    assert torch.allclose(output, expected, atol=1e-6)
    assert dict(counter) == {"all_gather": 1, "all_reduce": 1}


def test_the_full_weight_is_the_same_for_every_degree():
    """Trap 3."""
    single = [layer.weight for layer in both_layers()]
    for degree in (2, 3, 4):
        for weights in run_ranks(master_weights, degree):
            assert all(map(torch.equal, weights, single))


def both_layers(**options):
    return (
        tp.ColumnParallelLinear(12, 24, seed=5, **options),
        tp.RowParallelLinear(24, 12, seed=6, **options),
    )


def master_weights():
    return [layer.get_master_weight() for layer in both_layers()]


def strided():
    return [layer.get_master_weight() for layer in both_layers(stride=2)], [
        layer.weight.detach() for layer in both_layers(stride=2)
    ]


def test_stacked_matrices_are_split_each_by_itself():
    single = [layer.weight.detach() for layer in both_layers()]
    for rank, (full, shards) in enumerate(run_ranks(strided, 2)):
        assert all(map(torch.equal, full, single))
        for dim, (shard, whole) in enumerate(zip(shards, single, strict=True)):
            pieces = [half.chunk(2, dim)[rank] for half in whole.chunk(2, dim)]
            assert torch.equal(shard, torch.cat(pieces, dim))


def from_the_global_seed():
    torch.manual_seed(100 + group().rank())  # by mistake another one on every rank
    return tp.ColumnParallelLinear(4, 8).get_master_weight()


def test_a_weight_without_a_seed_is_agreed_on():
    first, second = run_ranks(from_the_global_seed, 2, in_processes=True)
    assert torch.equal(first, second)
    assert not torch.equal(first[:4], first[4:])


@on_ranks(2)
def test_skip_bias_add_leaves_the_bias_to_the_caller():
    inputs = torch.ones(2, 8)
    column = tp.ColumnParallelLinear(8, 8, gather_output=False, skip_bias_add=True, seed=1)
    row = tp.RowParallelLinear(8, 8, input_is_parallel=True, skip_bias_add=True, seed=2)
    for layer in (column, row):
        nn.init.ones_(layer.bias)
    hidden, first = column(inputs)
    output, second = row(hidden)
    plain = F.linear(F.linear(inputs, column.get_master_weight()), row.get_master_weight())
    assert first is column.bias
    assert second is row.bias
    assert torch.allclose(output, plain, atol=1e-6)


def padded(gather_output):
    layer = tp.ColumnParallelLinear(4, 5, pad_output=True, gather_output=gather_output, seed=3)
    nn.init.constant_(layer.bias, 7.0)
    output = layer(torch.ones(2, 4))
    output[output.isfinite()].sum().backward()
    return output.detach(), layer.weight.shape[0], layer.weight.grad, layer.get_master_weight()


def test_an_uneven_output_is_padded_and_masked():
    whole = tp.ColumnParallelLinear(4, 5, seed=3)
    for rank, (output, rows, grad, full) in enumerate(run_ranks(padded, 3, False)):
        assert rows == 2
        real = 1 if rank == 2 else 2
        assert output[:, :real].isfinite().all()
        assert output[:, real:].eq(float("-inf")).all()
        assert grad[:real].eq(2).all()
        assert grad[real:].eq(0).all()
        assert torch.equal(full, whole.weight)
    nn.init.constant_(whole.bias, 7.0)
    for output, *_ in run_ranks(padded, 3, True):
        torch.testing.assert_close(output, whole(torch.ones(2, 4)))


@on_ranks(2)
def test_meta_construction_then_reset_is_construction():
    layer = tp.RowParallelLinear(8, 4, seed=1, device="meta")
    with counting() as counter:
        layer.to_empty(device="cpu").reset_parameters()
    built = tp.RowParallelLinear(8, 4, seed=1)
    assert torch.equal(layer.weight, built.weight)
    assert dict(counter) == {}


@on_ranks(2)
def test_a_deep_copy_shares_the_group_and_not_the_weight():
    layer = tp.ColumnParallelLinear(4, 4, seed=1)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.add_(1)
    same_group = twin.tp_group is layer.tp_group
    tagged = twin.weight.tensor_model_parallel and twin.weight.partition_dim == 0
    assert same_group
    assert tagged
    assert not torch.equal(layer.weight, twin.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layer_class", [tp.ColumnParallelLinear, tp.RowParallelLinear])
def test_before_initialization_bitwise_equal_to_linear(layer_class, dtype):
    """Trap 13."""
    layer = layer_class(16, 24, dtype=dtype, seed=1)
    linear = nn.Linear(16, 24, dtype=dtype)
    linear.load_state_dict(layer.state_dict())
    inputs = torch.randn(3, 16, dtype=dtype)
    pairs = []
    for module in (layer, linear):
        own = inputs.clone().requires_grad_()
        output = module(own)
        output.square().sum().backward()
        pairs.append((output, own.grad, module.weight.grad, module.bias.grad))
    assert all(map(torch.equal, *pairs))


@on_ranks(2, tensor=1)
def test_at_degree_one_no_collectives():
    layer = tp.ColumnParallelLinear(4, 4, seed=1)
    with counting() as counter:
        layer(torch.ones(2, 4)).sum().backward()
    assert layer.tp_group is None
    assert dict(counter) == {}


@on_ranks(4, tensor=2)
def test_an_explicit_group():
    state = tp.get_state()
    inputs = torch.ones(1, 4)
    layer = tp.ColumnParallelLinear(4, 4, seed=1, tp_group=state.group("data"))
    assert layer.tp_size == 2
    assert layer(inputs).shape == (1, 4)


# Bad input: one clear error, on every rank, before any collective.


def built_too_early(layers):
    layers[0](torch.ones(1, 8))


def test_a_layer_from_before_initialization_is_refused():
    column, row = tp.ColumnParallelLinear(8, 8), tp.RowParallelLinear(8, 8)
    for layer in (column, row):
        with pytest.raises(
            tp.NotInitializedError, match=rf"{type(layer).__name__}\(in_features=8.*2"
        ):
            run_ranks(built_too_early, 2, [layer])


def indivisible(layer_class, options):
    layer_class(6, 6, **options)


@pytest.mark.parametrize(
    ("layer_class", "options", "message"),
    [
        (tp.ColumnParallelLinear, {}, "ColumnParallelLinear: out_features=6 is not divisible.* 4"),
        (tp.RowParallelLinear, {}, "RowParallelLinear: in_features=6 is not divisible.* degree 4"),
        (tp.ColumnParallelLinear, {"stride": 4}, "stride=4 does not divide out_features=6"),
        (tp.ColumnParallelLinear, {"pad_output": True, "stride": 2}, "padding for degree 4"),
    ],
)
def test_sizes_that_do_not_divide(layer_class, options, message):
    with pytest.raises(tp.DegreeError, match=message):
        run_ranks(indivisible, 4, layer_class, options)


def test_sizes_below_one():
    with pytest.raises(tp.DegreeError, match="ColumnParallelLinear: out_features=0"):
        tp.ColumnParallelLinear(4, 0)


def wrong_input(layer_class, shape, dtype, device):
    layer = layer_class(
        8, 8, seed=1, **({"input_is_parallel": True} if layer_class is tp.RowParallelLinear else {})
    )
    layer(torch.ones(shape, dtype=dtype, device=device))


@pytest.mark.parametrize(
    ("layer_class", "shape", "dtype", "device", "message"),
    [
        (
            tp.ColumnParallelLinear,
            (2, 4),
            torch.float32,
            "cpu",
            r"\(2, 4\) should be 8 on each of the 2",
        ),
        (
            tp.RowParallelLinear,
            (2, 8),
            torch.float32,
            "cpu",
            r"\(2, 8\) should be 4 on each of the 2",
        ),
        (
            tp.ColumnParallelLinear,
            (2, 8),
            torch.float64,
            "cpu",
            "torch.float64 and the weight torch.float32",
        ),
        (
            tp.RowParallelLinear,
            (2, 4),
            torch.float32,
            "meta",
            "input is on meta and the weight on cpu",
        ),
    ],
)
def test_an_input_that_does_not_fit_names_the_layer(layer_class, shape, dtype, device, message):
    with pytest.raises(tp.ParallelError, match=rf"{layer_class.__name__}\(.*{message}"):
        run_ranks(wrong_input, 2, layer_class, shape, dtype, device)


def test_a_state_does_not_outlive_its_block():
    def inside():
        with tp.use_state(tp.get_state()):
            return tp.ColumnParallelLinear(4, 4, seed=1).tp_size

    assert run_ranks(inside, 2) == [2, 2]
    assert tp.ColumnParallelLinear(4, 4).tp_size == 1


def saved_and_loaded(folder):
    rank = dist.get_rank()
    tp.initialize_tensor_parallel(2)
    model = torch.nn.Sequential(
        tp.VocabParallelEmbedding(8, 4),
        tp.ColumnParallelLinear(4, 8, gather_output=False),
        tp.RowParallelLinear(8, 4, input_is_parallel=True),
    )
    ids = torch.arange(8)
    expected = model(ids)
    torch.save(model, f"{folder}/{rank}.pt")
    dist.barrier()
    found = torch.load(f"{folder}/{rank}.pt", weights_only=False)
    assert torch.equal(found(ids), expected)
    assert found[1].weight.tensor_model_parallel
    assert found[1].tp_group is model[1].tp_group
    assert copy.copy(model[1]).tp_group is model[1].tp_group
    with pytest.raises(
        tp.DegreeError, match=f"saved by rank {1 - rank} of 2 .* this is rank {rank}"
    ):
        torch.load(f"{folder}/{1 - rank}.pt", weights_only=False)
    tp.destroy_tensor_parallel()
    with pytest.raises(
        tp.NotInitializedError, match=r"call initialize_tensor_parallel\(2\) before"
    ):
        torch.load(f"{folder}/{rank}.pt", weights_only=False)


def test_a_model_is_saved_whole_and_loaded_into_the_group_there_is(tmp_path):
    run_ranks(saved_and_loaded, 2, tmp_path, in_processes=True, initialize=False)


@on_ranks(2, in_processes=True)
def test_a_dtensor_is_refused_with_what_to_do():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 8), mesh, [Replicate()])
    for layer in (tp.ColumnParallelLinear(8, 4), tp.RowParallelLinear(8, 4)):
        with pytest.raises(
            tp.ParallelError, match=r"input is a DTensor, .*pass input.to_local\(\)"
        ):
            layer(x)
    ids = distribute_tensor(torch.arange(4), mesh, [Replicate()])
    for layer in (tp.VocabParallelEmbedding(8, 4), tp.ParallelEmbedding(8, 4)):
        with pytest.raises(tp.ParallelError, match="input is a DTensor"):
            layer(ids)


def drawn_whole():
    """Weights of layers that draw as fairscale's and torch's do, and what comes after."""
    torch.manual_seed(3)
    options = {"bias": False, "init": "whole"}
    layers = (
        tp.ColumnParallelLinear(6, 8, stride=2, **options),
        tp.RowParallelLinear(8, 6, **options),
        tp.VocabParallelEmbedding(9, 4, init="whole"),
        tp.ParallelEmbedding(5, 4, init="whole"),
        tp.ColumnParallelLinear(6, 8, seed=5, **options),
    )
    return [layer.get_master_weight() for layer in layers], torch.rand(2)


def test_a_weight_that_is_drawn_whole_is_fairscales():
    torch.manual_seed(3)
    expected = [
        torch.nn.init.xavier_normal_(torch.empty(s)) for s in [(8, 6), (6, 8), (9, 4), (5, 4)]
    ]
    after = torch.rand(2)
    torch.manual_seed(5)
    expected.append(torch.nn.init.xavier_normal_(torch.empty(8, 6)))
    for degree in (1, 2):
        for weights, later in run_ranks(drawn_whole, degree, in_processes=True):
            for found, weight in zip(weights, expected, strict=True):
                assert torch.equal(found, weight)
            assert torch.equal(later, after)


def test_a_weight_that_is_drawn_whole_is_torchs():
    torch.manual_seed(3)
    plain = torch.nn.Linear(6, 8)
    torch.manual_seed(3)
    method = functools.partial(torch.nn.init.kaiming_uniform_, a=5**0.5)
    assert torch.equal(
        tp.ColumnParallelLinear(6, 8, init_method=method, init="whole").weight, plain.weight
    )
    with pytest.raises(ValueError, match="init='all'; expected 'blocks' or 'whole'"):
        tp.ColumnParallelLinear(6, 8, init="all")


def drawn_by_other_seeds():
    torch.manual_seed(dist.get_rank())
    return tp.ColumnParallelLinear(6, 8, bias=False, init="whole").get_master_weight()


def test_the_first_ranks_generator_decides():
    torch.manual_seed(0)
    expected = torch.nn.init.xavier_normal_(torch.empty(8, 6))
    for found in run_ranks(drawn_by_other_seeds, 2, in_processes=True):
        assert torch.equal(found, expected)
