"""The linear layers: shapes, attributes, options, and errors that name the layer."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from on_ranks import all_raise, numbers, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn import functional as F

import ezpz_tp as tp
from ezpz_tp._fused import column_linear, row_linear
from ezpz_tp.testing import counting, run_ranks

group = tp.get_tensor_parallel_group


@pytest.mark.parametrize("init", ["blocks", "whole"])
@on_ranks(2)
def test_without_a_seed_the_first_ranks_generator_decides(init):
    torch.manual_seed(100 + group().rank())  # by mistake another one on every rank
    found = tp.ColumnParallelLinear(4, 8, init=init).get_master_weight()
    torch.manual_seed(100)
    alone = tp.ColumnParallelLinear(4, 8, init=init, tp_group=tp.get_state().group("data"))
    assert torch.equal(found, alone.weight)


@on_ranks(2)
def test_skipped_biases_and_copies():
    # `skip_bias_add` leaves the bias to the caller.
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
    # A deep copy shares the group, and not the weight.
    with counting() as counter:
        layer = tp.ColumnParallelLinear(4, 4, seed=1)
    assert not counter  # as there is a seed
    text = f"in_features=4, out_features=4, bias=True, tp={group().rank()}/2"
    assert repr(layer) == f"ColumnParallelLinear({text})"
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.add_(1)
    assert twin.tp_group is layer.tp_group
    assert not torch.equal(layer.weight, twin.weight)
    # A parametrized layer is copied with its attributes.
    layer = tp.ColumnParallelLinear(4, 8, seed=1)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    before = layer(torch.ones(1, 4))
    original = copy.deepcopy(layer).parametrizations.weight.original
    assert split_of(original) == (True, 0, 1)
    assert torch.equal(before, tp.ColumnParallelLinear(4, 8, seed=1)(torch.ones(1, 4)))


@on_ranks(3)
def test_an_uneven_output_is_padded_and_masked():
    options, inputs = {"pad_output": True, "seed": 3}, torch.ones(2, 4)
    layer = tp.ColumnParallelLinear(4, 5, gather_output=False, **options)
    joined = tp.ColumnParallelLinear(4, 5, **options)
    whole = tp.ColumnParallelLinear(4, 5, seed=3, tp_group=tp.get_state().group("data"))
    for each in (joined, whole):
        nn.init.constant_(each.bias, 7.0)
    torch.testing.assert_close(joined(inputs), whole(inputs))
    assert torch.equal(layer.get_master_weight(), whole.weight)
    output, real = layer(inputs), 1 if group().rank() == 2 else 2
    output[output.isfinite()].sum().backward()
    assert output.shape == (2, 2)
    assert output[:, :real].isfinite().all()
    assert output[:, real:].eq(float("-inf")).all()
    assert layer.weight.grad[:real].eq(2).all()
    assert layer.weight.grad[real:].eq(0).all()


@pytest.mark.parametrize("layer_class", [tp.ColumnParallelLinear, tp.RowParallelLinear])
def test_trap_13_before_initialization_bitwise_equal_to_linear(layer_class):
    layer, linear = layer_class(16, 24, seed=1), nn.Linear(16, 24)
    linear.load_state_dict(layer.state_dict())
    inputs = torch.randn(3, 16)
    pairs = []
    for module in (layer, linear):
        own = inputs.clone().requires_grad_()
        output = module(own)
        output.square().sum().backward()
        pairs.append((output, own.grad, module.weight.grad, module.bias.grad))
    assert all(map(torch.equal, *pairs))


# Bad input: one clear error, on every rank, before any collective.


def test_a_layer_from_before_initialization_is_refused():
    assert tp.param_is_not_tensor_parallel_duplicate(torch.zeros(1))  # alone every one counts
    for layer in (tp.ColumnParallelLinear(8, 8), tp.RowParallelLinear(8, 8)):
        told = rf"{type(layer).__name__}\(in_features=8.*2"
        all_raise(2, partial(layer, torch.ones(1, 8)), tp.NotInitializedError, told)


@pytest.mark.parametrize(
    ("layer_class", "options", "message"),
    [
        (tp.ColumnParallelLinear, {}, "ColumnParallelLinear: out_features=6 is not divisible.* 4"),
        (tp.RowParallelLinear, {}, "RowParallelLinear: in_features=6 is not divisible.* degree 4"),
        (tp.ColumnParallelLinear, {"stride": 4}, "stride=4 does not divide out_features=6"),
        (tp.ColumnParallelLinear, {"pad_output": True, "stride": 2}, "padding for degree 4"),
        (tp.ColumnParallelLinear, {"stride": (4, 1)}, r"\(4, 1\) adds up to 5; .* out_features=6"),
        (
            *(tp.ColumnParallelLinear, {"out_features": 20, "stride": (8, 6, 6)}),
            r"out_features, stride\[1\]=6 is not divisible .* 4",
        ),
    ],
)
def test_sizes_that_do_not_divide(layer_class, options, message):
    sizes = {"in_features": 6, "out_features": 6, **options}
    all_raise(4, partial(layer_class, **sizes), tp.DegreeError, message)


COLUMN, ROW = tp.ColumnParallelLinear, partial(tp.RowParallelLinear, input_is_parallel=True)


@pytest.mark.parametrize(
    ("layer", "inputs", "message"),
    [
        (COLUMN, torch.ones(2, 4), r"Column.*\(2, 4\) should be 8 on each of the 2"),
        (ROW, torch.ones(2, 8), r"Row.*\(2, 8\) should be 4 on each of the 2"),
        (COLUMN, torch.ones(2, 8).double(), "Column.*torch.float64 and the weight torch.float32"),
        (ROW, torch.ones(2, 4, device="meta"), "Row.*input is on meta and the weight on cpu"),
        (partial(ROW, sequence_parallel=True), torch.ones(3, 4), r"Row.*\(3, 4\).*sequence.* 2"),
    ],
    ids=["column size", "row size", "dtype", "device", "sequence"],
)
def test_an_input_that_does_not_fit_names_the_layer(layer, inputs, message):
    all_raise(2, lambda: layer(8, 8, seed=1)(inputs), tp.ParallelError, message)


@on_ranks(2, initialize=False)
def test_a_model_is_saved_whole_and_loaded_into_the_group_there_is(tmp_path):
    rank = dist.get_rank()
    own, others = tmp_path / f"{rank}.pt", tmp_path / f"{1 - rank}.pt"
    tp.initialize_tensor_parallel(2)
    model = torch.nn.Sequential(
        tp.VocabParallelEmbedding(8, 4),
        tp.ColumnParallelLinear(4, 8, gather_output=False),
        tp.RowParallelLinear(8, 4, input_is_parallel=True),
    )
    ids = torch.arange(8)
    expected = model(ids)
    torch.save(model, own)
    dist.barrier()
    found = torch.load(own, weights_only=False)
    assert torch.equal(found(ids), expected)
    assert found[1].weight.tensor_model_parallel
    assert found[1].tp_group is model[1].tp_group
    assert copy.copy(model[1]).tp_group is model[1].tp_group
    told = f"saved by rank {1 - rank} of 2 .* this is rank {rank}"
    with pytest.raises(tp.DegreeError, match=told):
        torch.load(others, weights_only=False)
    tp.destroy_tensor_parallel()
    told = r"call initialize_tensor_parallel\(2\) before"
    with pytest.raises(tp.NotInitializedError, match=told):
        torch.load(own, weights_only=False)


@on_ranks(2)
def test_a_dtensor_is_refused_with_what_to_do():
    mesh = init_device_mesh("cpu", (2,))
    x, ids = (
        distribute_tensor(whole, mesh, [Replicate()])
        for whole in (torch.ones(4, 8), torch.arange(4))
    )
    layers = tp.ColumnParallelLinear(8, 4), tp.RowParallelLinear(8, 4)
    tables = tp.VocabParallelEmbedding(8, 4), tp.ParallelEmbedding(8, 4)
    told = r"input is a DTensor, .*pass input.to_local\(\)"
    for layer, given in (*((each, x) for each in layers), *((each, ids) for each in tables)):
        with pytest.raises(tp.ParallelError, match=told):
            layer(given)


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


def test_a_weight_that_is_drawn_whole_is_fairscales_and_torchs():
    torch.manual_seed(3)
    shapes = [(8, 6), (6, 8), (9, 4), (5, 4)]
    expected = [torch.nn.init.xavier_normal_(torch.empty(shape)) for shape in shapes]
    after = torch.rand(2)
    torch.manual_seed(5)
    expected.append(torch.nn.init.xavier_normal_(torch.empty(8, 6)))
    for degree in (1, 2):
        for weights, later in run_ranks(drawn_whole, degree):
            assert all(map(torch.equal, weights, expected))
            assert torch.equal(later, after)
    # And torch's.
    torch.manual_seed(3)
    plain = torch.nn.Linear(6, 8)
    torch.manual_seed(3)
    method = partial(torch.nn.init.kaiming_uniform_, a=5**0.5)
    found = tp.ColumnParallelLinear(6, 8, init_method=method, init="whole")
    assert torch.equal(found.weight, plain.weight)
    with pytest.raises(ValueError, match="init='all'; expected 'blocks' or 'whole'"):
        tp.ColumnParallelLinear(6, 8, init="all")


def split_of(tensor):
    return tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride


def test_what_is_said_of_a_parameter():
    # It is set once.
    param = nn.Parameter(torch.zeros(3, 2))
    tp.set_tensor_model_parallel_attributes(param, True, 1, 2)
    tp.set_tensor_model_parallel_attributes(param, True, 1, 2)
    assert split_of(param) == (True, 1, 2)
    with pytest.raises(tp.ParallelError, match=r"partition_dim .*\(3, 2\) is already 1, and 0 is"):
        tp.set_tensor_model_parallel_attributes(param, True, 0, 2)
    assert split_of(param) == (True, 1, 2)
    # Defaults fill what is not set.
    param = nn.Parameter(torch.zeros(1))
    param.partition_dim = 0
    tp.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    assert split_of(param) == (False, 0, 1)
    # A copy says what its source says, and keeps the rest.
    source, copied = torch.zeros(1), torch.zeros(1)
    tp.set_tensor_model_parallel_attributes(source, True, 0, 1)
    tp.mark_sequence_parallel(source)
    told = {"allreduce": False, "sequence_parallel": True}
    # What Megatron's optimizers ask.
    told |= {"is_qkv": True, "qkv_split_shapes": (2, 1, 1), "expert_tp": True}
    for name, value in told.items():
        setattr(source, name, value)
    copied.shared = True
    tp.copy_tensor_model_parallel_attributes(copied, source)
    assert split_of(copied) == (True, 0, 1)
    assert told | {"shared": True} == {name: getattr(copied, name) for name in (*told, "shared")}


@on_ranks(4, tensor=2, data=2)
def test_replicated_parameters_count_on_the_first_rank():
    state, count = tp.get_state(), tp.param_is_not_tensor_parallel_duplicate
    tensor, data = state.group("tensor"), state.group("data")
    whole, part, expert = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    part.tensor_model_parallel = True
    expert.allreduce = False
    assert count(whole) == count(whole, tensor, data) == (tensor.rank() == 0)
    assert count(part)
    assert count(whole, data) == count(expert, tensor, data) == (data.rank() == 0)


def layers(device=None):
    return nn.ModuleDict(
        {
            "column": tp.ColumnParallelLinear(4, 8, stride=2, seed=1, device=device),
            "row": tp.RowParallelLinear(8, 4, sequence_parallel=True, seed=2, device=device),
            "rows": tp.VocabParallelEmbedding(9, 4, seed=3, device=device),
            "columns": tp.ParallelEmbedding(9, 4, seed=4, device=device),
        }
    )


def attributes_of(module):
    return {name: dict(vars(param)) for name, param in module.named_parameters()}


@on_ranks(2)
def test_attributes_of_layers_survive_copies_and_moves():
    module = layers()
    assert split_of(module["column"].weight) == split_of(module["column"].bias) == (True, 0, 2)
    assert split_of(module["row"].weight) == (True, 1, 1)
    assert module["row"].bias.sequence_parallel
    assert split_of(module["rows"].weight) == (True, 0, 1)
    assert split_of(module["columns"].weight) == (True, 1, 1)
    before = attributes_of(module)
    assert attributes_of(copy.deepcopy(module)) == before
    assert attributes_of(module.double().to(torch.bfloat16)) == before
    on_meta = layers("meta")
    assert attributes_of(on_meta) == before
    assert attributes_of(on_meta.to_empty(device="cpu")) == before
    # Meta construction, then the checkpoint's own tensors as parameters.
    whole = nn.Sequential(tp.ColumnParallelLinear(4, 8, seed=1), nn.LayerNorm(8))
    tp.mark_sequence_parallel(whole[1].weight)
    states = {name: value.clone() for name, value in whole.state_dict().items()}
    model = nn.Sequential(
        tp.ColumnParallelLinear(4, 8, device="meta"), nn.LayerNorm(8, device="meta")
    )
    tp.mark_sequence_parallel(model[1].weight)
    with tp.keep_attributes(model):
        model.load_state_dict(states, assign=True)
    layer = tp.ColumnParallelLinear(4, 8, device="meta")
    layer.load_state_dict({"weight": states["0.weight"], "bias": states["0.bias"]}, assign=True)
    assert split_of(model[0].weight) == (True, 0, 1)
    assert model[1].weight.sequence_parallel
    assert split_of(layer.bias) == (True, 0, 1)


def test_attributes_of_copied_modules():
    layer = tp.VocabParallelEmbedding(9, 4, seed=3)
    assert split_of(layer.weight) == (False, 0, 1)
    assert split_of(pickle.loads(pickle.dumps(layer)).weight) == (False, 0, 1)

    norm = nn.LayerNorm(4)
    tp.mark_sequence_parallel(norm.weight)
    twin = copy.deepcopy(norm)
    assert not hasattr(twin.weight, "sequence_parallel")
    tp.copy_attributes(norm, twin)
    assert twin.weight.sequence_parallel
    assert not hasattr(twin.bias, "sequence_parallel")


# The fused functions inside: what they promise about memory and modes.

SEQUENCE, BATCH, IN, OUT = 4, 3, 8, 12


def own(full, dim):
    return full.chunk(group().size(), dim)[group().rank()].clone()


close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("function", "sequence_parallel", "summed", "copies"),
    [
        (column_linear, False, 2, 1),
        (column_linear, True, 2, 2),  # of both ranks' parts of the sequence
        (row_linear, False, 1, 1),
    ],
    ids=["column", "column, sequence", "row"],
)
@on_ranks(2)
def test_transposed_inputs_and_expanded_gradients(function, sequence_parallel, summed, copies):
    """The layer makes them contiguous itself."""
    size = IN if function is column_linear else IN // 2
    inputs = numbers(size, BATCH, SEQUENCE).transpose(0, 2).requires_grad_()
    weight = numbers(size, OUT, seed=1).t().requires_grad_()
    function(inputs, weight, None, group(), sequence_parallel).sum().backward()
    close(inputs.grad, summed * weight.sum(0).expand_as(inputs))
    close(weight.grad, copies * inputs.sum((0, 1)).expand_as(weight))


@on_ranks(2)
def test_only_what_is_wanted_is_kept_computed_and_sent():
    """Of a frozen layer (LoRA) the input is not kept: it is the larger one."""
    for of_weight, of_input in ((False, True), (True, False), (True, True)):
        inputs = numbers(SEQUENCE, IN).requires_grad_(of_input)
        weight, kept = own(numbers(OUT, IN), 0).requires_grad_(of_weight), []
        note = torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t
        )
        with note:
            output = column_linear(inputs, weight, None, group())
        assert kept == [inputs.shape] * of_weight + [weight.shape] * of_input
        with counting() as counter:
            output.sum().backward()
        assert counter == ({"all_reduce": 1} if of_input else {})
        assert (inputs.grad is not None, weight.grad is not None) == (of_input, of_weight)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@on_ranks(2)
def test_second_derivatives_of_a_column_and_a_row_layer(sequence_parallel):
    full = numbers(SEQUENCE, IN)
    up, down = numbers(OUT, IN, seed=1), numbers(IN, OUT, seed=2)
    up_bias, down_bias = numbers(OUT, seed=3), numbers(IN, seed=4)

    def loss_of(tensors, layers):
        hidden = layers[0](tensors[0], tensors[1], tensors[2]).tanh()
        return (layers[1](hidden, tensors[3], tensors[4]) ** 2).sum()

    def penalty(tensors, layers):
        tensors = [tensor.clone().requires_grad_() for tensor in tensors]
        loss = loss_of(tensors, layers)
        first = torch.autograd.grad(loss, tensors[0], create_graph=True)[0]
        return torch.autograd.grad((first**2).sum(), tensors)

    wanted = penalty([full, up, up_bias, down, down_bias], [F.linear, F.linear])
    here = own(full, 0) if sequence_parallel else full
    tensors = [here, own(up, 0), own(up_bias, 0), own(down, 1), down_bias]
    layers = [
        lambda x, weight, bias: column_linear(x, weight, bias, group(), sequence_parallel),
        lambda x, weight, bias: row_linear(x, weight, bias, group(), sequence_parallel),
    ]
    got = penalty(tensors, layers)
    wanted = [own(wanted[0], 0) if sequence_parallel else wanted[0]] + [
        own(gradient, dim) for gradient, dim in zip(wanted[1:4], (0, 0, 1), strict=True)
    ]
    for actual, expected in zip(got[:4], wanted, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@on_ranks(2)
def test_fused_functions_without_gradients(sequence_parallel):
    inputs, weight, bias = numbers(SEQUENCE, IN), numbers(OUT, IN, seed=1), numbers(OUT, seed=2)
    output = F.linear(inputs, weight, bias)
    here = own(inputs, 0) if sequence_parallel else inputs
    with torch.no_grad(), counting() as counter:
        first = column_linear(here, own(weight, 0), own(bias, 0), group(), sequence_parallel)
        second = row_linear(own(inputs, -1), own(weight, 1), bias, group(), sequence_parallel)
    close(first, own(output, -1))
    close(second, own(output, 0) if sequence_parallel else output)
    assert sum(counter.values()) == (2 if sequence_parallel else 1)


@on_ranks(2)
def test_without_gradients_autocast_casts_a_weight_once():
    weight = torch.ones(4, 4, requires_grad=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        before = column_linear(torch.ones(1, 4), weight, None, group())
        weight.zero_()  # autocast has kept what it cast
        after = column_linear(torch.ones(1, 4), weight, None, group())
        double = column_linear(torch.ones(1, 4).double(), weight.double(), None, group())
    assert (before.dtype, double.dtype) == (torch.bfloat16, torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # with gradients it does the casting itself
        double = column_linear(torch.ones(1, 4).double(), weight.double(), None, group())
    assert double.dtype == torch.float64
    assert torch.equal(before, after)
