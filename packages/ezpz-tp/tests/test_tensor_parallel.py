import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from on_ranks import load_code, numbers, on_ranks
from torch.nn import functional
from torch.nn.init import normal_, ones_

import ezpz_tp
import ezpz_tp.tensor_parallel.gtp_api
from ezpz_tp import parallel_state, tensor_parallel
from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._mappings import all_gather
from ezpz_tp.model_parallel_config import ModelParallelConfig
from ezpz_tp.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from ezpz_tp.testing import counting, run_ranks


def settings(**more):
    return ModelParallelConfig(params_dtype=torch.float64, use_cpu_initialization=True, **more)


def column(inputs=8, outputs=12, config=None, **more):
    return ColumnParallelLinear(
        inputs, outputs, config=config or settings(), init_method=normal_, **more
    )


def row(inputs=12, outputs=8, config=None, **more):
    more = {"bias": True, "input_is_parallel": True, "skip_bias_add": False, **more}
    return RowParallelLinear(
        inputs, outputs, config=config or settings(), init_method=normal_, **more
    )


# Code written for Megatron-LM, with another import.

group = parallel_state.get_tensor_model_parallel_group


def train_megatron_code(sequence_parallel):
    code = load_code("megatron")
    model, loss, draw = code.train(sequence_parallel)
    ezpz_tp.finalize_grads(model)
    whole = {
        "embedding": all_gather(model.embedding.weight.detach(), 0, group()),
        "up": model.up.get_master_weight(),
        "down": model.down.get_master_weight(),
    }
    grads = {
        "up": all_gather(model.up.weight.grad, 0, group()),
        "embedding": all_gather(model.embedding.weight.grad, 0, group()),
        "norm": model.norm.weight.grad,
        "down bias": model.down.bias.grad,
    }
    parallel_state.destroy_model_parallel()
    return whole, grads, loss.detach(), draw


def unsharded(weights):
    """The model of megatron_code.py on one rank, in torch alone."""
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    scale = torch.ones(16, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(16, dtype=torch.float64, requires_grad=True)
    text = torch.arange(34).view(2, 17) * 7 % 32
    hidden = functional.embedding(text[:, :-1], leaves["embedding"])
    inner = functional.linear(functional.layer_norm(hidden, (16,), scale), leaves["up"])
    hidden = hidden + functional.linear(functional.gelu(inner), leaves["down"]) + bias
    logits = functional.linear(hidden, leaves["embedding"])
    loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="none")
    loss.mean().backward()
    grads = {"up": leaves["up"].grad, "embedding": leaves["embedding"].grad}
    return loss.view(2, 16).detach(), {**grads, "norm": scale.grad, "down bias": bias.grad}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_code_for_megatron_runs_and_is_right(sequence_parallel):
    how = {"initialize": False}
    ranks = run_ranks(train_megatron_code, 2, sequence_parallel, **how)
    loss, grads = unsharded(ranks[0][0])
    for _, found, found_loss, _ in ranks:
        torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-12, msg=name)
    assert ranks[0][3] != ranks[1][3]


@on_ranks(2)
def test_gathering_is_chosen_and_the_inputs_gradient_can_stay_partial():
    gathers, leaves = column(gather_output=True), column()
    input_ = numbers(3, 8)
    assert gathers(input_)[0].shape[-1] == leaves(input_, None, True)[0].shape[-1] == 12
    assert gathers(input_, runtime_gather_output=False)[0].shape[-1] == 6
    assert leaves(input_)[0].shape[-1] == 6
    # The input's gradient can stay partial.
    input_ = numbers(3, 8).requires_grad_()
    linear = column(disable_grad_reduce=True)
    with counting() as counter:
        linear(input_)[0].sum().backward()
    assert not counter
    expected = torch.ones(3, 6, dtype=torch.float64) @ linear.weight
    torch.testing.assert_close(input_.grad, expected.detach())
    # Another degree than the groups' is an error.
    column(config=settings(tensor_model_parallel_size=2))
    with pytest.raises(DegreeError, match=r"tensor_model_parallel_size=4, but .* size 2"):
        column(config=settings(tensor_model_parallel_size=4))


@on_ranks(2)
def test_an_output_layer_can_borrow_its_weight():
    embedding = VocabParallelEmbedding(12, 8, init_method=normal_, config=settings())
    output = column(skip_weight_param_allocation=True, bias=True)
    assert output.weight is None
    assert output.bias.shape == (6,)
    assert output.bias.device.type == "cpu"
    assert output.bias.tensor_model_parallel
    assert set(output.state_dict()) == {"bias", "_extra_state"}
    output(numbers(3, 8), embedding.weight)[0].sum().backward()
    assert embedding.weight.grad.count_nonzero()
    with pytest.raises(ParallelError, match="no weight of its own"):
        output(numbers(3, 8))
    with pytest.raises(DegreeError, match=r"\(5, 8\); expected \(6, 8\) at degree 2"):
        output(numbers(3, 8), numbers(5, 8))


def test_alone_the_sequence_comes_first_too():
    options = {"init_method": normal_, "config": settings(), "reduce_scatter_embeddings": True}
    embedding, ids = VocabParallelEmbedding(12, 8, **options), torch.arange(12).view(3, 4)
    assert torch.equal(embedding(ids), functional.embedding(ids.t(), embedding.weight))


def test_what_a_configuration_says():
    # Any object is a configuration.
    linear = ColumnParallelLinear(
        4, 6, config=SimpleNamespace(use_cpu_initialization=True), init_method=ones_
    )
    assert linear.weight.dtype == torch.float32
    assert torch.equal(linear.weight, torch.ones(6, 4))
    # The dtype is the configuration's.
    config = ModelParallelConfig(params_dtype=torch.bfloat16, use_cpu_initialization=True)
    for layer in (
        column(config=config),
        row(config=config),
        VocabParallelEmbedding(8, 4, init_method=normal_, config=config),
    ):
        assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}

    # Initialization can be left out.
    def never(weight):
        raise AssertionError("called")

    options = {"config": settings(perform_initialization=False), "init_method": never}
    more = {"bias": True, "input_is_parallel": True, "skip_bias_add": False}
    ColumnParallelLinear(8, 12, **options)
    RowParallelLinear(12, 8, **more, **options)
    VocabParallelEmbedding(8, 4, **options)
    # Layers on meta.
    with torch.device("meta"):
        layers = column(), row(), column(skip_weight_param_allocation=True)
    assert {p.device.type for layer in layers for p in layer.parameters()} == {"meta"}
    # Sequence parallelism alone is off, and said.
    config = settings(sequence_parallel=True)
    with pytest.warns(UserWarning, match=r"ColumnParallelLinear: .*degree is 1"):
        linear = column(config=config)
    assert not linear.sequence_parallel
    assert linear(numbers(3, 8))[0].shape == (3, 12)
    # A degree without groups is an error.
    with pytest.raises(DegreeError, match=r"tensor_model_parallel_size=2, but .* size 1"):
        row(config=settings(tensor_model_parallel_size=2))
    # Arguments of a row layer that contradict.
    with pytest.raises(ParallelError, match="needs input_is_parallel=True"):
        row(config=settings(sequence_parallel=True), input_is_parallel=False)


def test_arguments_and_settings_that_are_not_supported():
    for argument, value in {
        "embedding_activation_buffer": [],
        "grad_output_buffer": [],
        "output_dtype": torch.float32,
        "pg_collection": SimpleNamespace(gtp_remat=SimpleNamespace(size=lambda: 2)),
    }.items():
        with pytest.raises(NotImplementedError, match=r"ColumnParallelLinear: .* is not supported"):
            column(**{argument: value})
    for setting, value in {
        "gradient_accumulation_fusion": True,
        "defer_embedding_wgrad_compute": True,
        "cpu_offloading": True,
        "gtp_weight_remat_size": 2,
    }.items():
        for make in (column, row):
            with pytest.raises(NotImplementedError, match=rf"config\.{setting}={value}"):
                make(config=SimpleNamespace(**{setting: value}))


def test_check_points_of_plain_layers_and_of_megatrons():
    linear = column()
    plain = torch.nn.Linear(8, 12, dtype=torch.float64)
    for layer in (linear, copy.deepcopy(linear)):
        layer.load_state_dict(plain.state_dict())
        assert torch.equal(layer.weight, plain.weight)
    assert linear.state_dict()["_extra_state"] is None
    model = torch.nn.Sequential(linear, row())
    model.load_state_dict({**model.state_dict(), "0._extra_state": b"Transformer Engine's"})


def test_sharded_state_dict_says_what_to_use():
    with pytest.raises(NotImplementedError, match=r"'a\.': .*dtensor_state_dict\(model\)"):
        column().sharded_state_dict("a.")


def make_experts():
    degrees = {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    parallel_state.initialize_model_parallel(**degrees)
    options = {"config": settings(**degrees), "is_expert": True}
    torch.manual_seed(7)
    up, down = column(skip_bias_add=True, **options), row(skip_bias_add=True, **options)
    with pytest.raises(ParallelError, match="needs skip_bias_add=True"):
        row(**options)
    input_ = numbers(3, 8).requires_grad_()
    with counting() as counter:
        output, _ = down(up(input_)[0])
        output.sum().backward()
    assert not counter
    assert not up.weight.allreduce
    torch.testing.assert_close(output, input_ @ up.weight.t() @ down.weight.t())
    index = parallel_state.get_expert_model_parallel_rank()
    parallel_state.destroy_model_parallel()
    return index, up.weight.detach()


def test_layers_of_experts_leave_communication_and_differ():
    ranks = run_ranks(make_experts, 4, initialize=False)
    by_expert = {}
    for index, weight in ranks:
        assert weight.shape == (12, 8)
        assert torch.equal(by_expert.setdefault(index, weight), weight)
    assert len(by_expert) == 2
    assert not torch.equal(by_expert[0], by_expert[1])


def test_experts_and_groups():
    # Another degree of experts than the groups' is an error.
    with pytest.raises(DegreeError, match=r"expert_model_parallel_size=2, but .* has size 1"):
        column(config=settings(expert_model_parallel_size=2), is_expert=True)
    # They share the tensor group unless told otherwise.
    assert run_ranks(lambda: column(is_expert=True).tp_size, 2) == [2, 2]


FROZEN = tensor_parallel.linear_with_frozen_weight
TRAINED = tensor_parallel.linear_with_grad_accumulation_and_async_allreduce


@pytest.mark.parametrize("function", [FROZEN, TRAINED])
@pytest.mark.parametrize(("allreduce", "sequence"), [(True, False), (False, True), (False, False)])
@on_ranks(2)
def test_the_linear_functions(function, allreduce, sequence):
    rank = ezpz_tp.get_tensor_parallel_rank()
    full, input_ = numbers(12, 8, seed=2), numbers(4, 3, 8)
    weight = full.chunk(2)[rank].clone().requires_grad_()
    part = (input_.chunk(2)[rank] if sequence else input_).clone().requires_grad_()
    output = function(part, weight, None, False, allreduce, sequence, None)
    output.backward(torch.ones_like(output))
    torch.testing.assert_close(output, input_ @ weight.t())
    # Where nothing sums them, the input's gradient is that of this rank's columns.
    grad = (full if allreduce or sequence else weight).sum(0).expand_as(part)
    torch.testing.assert_close(part.grad, grad)
    assert (weight.grad is None) is (function is FROZEN)


def test_a_linear_function_with_two_reductions_is_an_error():
    with pytest.raises(ParallelError, match="allreduce_dgrad and sequence_parallel are both set"):
        TRAINED(numbers(2, 8), numbers(4, 8), None, False, True, True)


@pytest.mark.parametrize("sizes", [[3, 1, 2], [0, 4, 1]])
@on_ranks(3)
def test_uneven_parts(sizes):
    rank = ezpz_tp.get_tensor_parallel_rank()
    whole, grad = (numbers(sum(sizes), 4, seed=seed) for seed in (1, 2))
    for partly in (True, False):
        own = whole.split(sizes)[rank].clone().requires_grad_()
        joined = tensor_parallel.gather_from_sequence_parallel_region(
            own, partly, output_split_sizes=sizes
        )
        joined.backward(grad)
        assert torch.equal(joined, whole)
        torch.testing.assert_close(own.grad, grad.split(sizes)[rank] * (3 if partly else 1))
    own = tensor_parallel.reduce_scatter_to_sequence_parallel_region(
        whole.requires_grad_(), input_split_sizes=sizes
    )
    own.backward(grad.split(sizes)[rank])
    torch.testing.assert_close(own, 3 * whole.split(sizes)[rank])
    torch.testing.assert_close(whole.grad, grad)


@on_ranks(2)
def test_split_sizes_that_do_not_fit_and_all_to_all():
    gather = tensor_parallel.gather_from_sequence_parallel_region
    scatter = tensor_parallel.reduce_scatter_to_sequence_parallel_region
    with pytest.raises(DegreeError, match=r"3 split sizes .*each of 2 ranks"):
        gather(numbers(4, 2), output_split_sizes=[4, 4, 4])
    with pytest.raises(DegreeError, match=r"3 rows, but its input .* has 4"):
        gather(numbers(4, 2), output_split_sizes=[3, 3])
    with pytest.raises(DegreeError, match="add up to 6, but the input"):
        scatter(numbers(4, 2), input_split_sizes=[3, 3])
    with pytest.raises(NotImplementedError, match="use_global_buffer"):
        gather(numbers(4, 2), use_global_buffer=True)
    # All-to-all, whose group comes first.
    group, rank = ezpz_tp.get_tensor_parallel_group(), ezpz_tp.get_tensor_parallel_rank()
    full = numbers(8, 6)  # tokens, hidden
    tokens = full.chunk(2)[rank].clone().requires_grad_()
    hidden = tensor_parallel.all_to_all_sp2hp(tokens.unsqueeze(1))
    back = tensor_parallel.all_to_all_hp2sp(hidden)
    back.sum().backward()
    assert torch.equal(hidden, full.chunk(2, 1)[rank])
    assert torch.equal(back, tokens)
    assert tokens.grad.eq(1).all()
    uneven = tensor_parallel.all_to_all(group, tokens, [1 + 2 * rank] * 2, [1, 3])
    assert torch.equal(uneven, torch.cat([full.split([1, 3, 1, 3])[at + rank] for at in (0, 2)]))
    with pytest.raises(ParallelError, match="group is None"):
        tensor_parallel.all_to_all(None, tokens)


@pytest.fixture
def streams():
    yield partial(tensor_parallel.model_parallel_cuda_manual_seed, 5)
    tensor_parallel.get_cuda_rng_tracker().reset()


def test_streams_that_are_not_supported_and_how_they_are_read():
    for refused in (
        lambda: tensor_parallel.get_cuda_rng_tracker(use_te_rng_tracker=True),
        lambda: tensor_parallel.CudaRNGStatesTracker(use_cudagraphable_rng=True),
        lambda: tensor_parallel.model_parallel_cuda_manual_seed(1, gtp_remat_world_size=2),
        lambda: tensor_parallel.convert_cuda_rng_state(torch.get_rng_state(), to_graphable=True),
    ):
        with pytest.raises(NotImplementedError, match="not supported"):
            refused()
    tracker, generator = tensor_parallel.get_cuda_rng_tracker(), torch.Generator()
    assert not tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
    assert torch.equal(tensor_parallel.convert_cuda_rng_state(generator), generator.get_state())
    # They are read by Megatron's name.
    tracker = tensor_parallel.CudaRNGStatesTracker()
    tracker.add("state1", 4)
    assert torch.equal(tracker.states_["state1"], tracker.get_states()["state1"])
    with pytest.raises(TypeError):  # which would be lost
        tracker.states_["state1"] = torch.get_rng_state()
    names = {tensor_parallel.random.get_gtp_remat_rng_tracker_name(e) for e in (False, True)}
    assert names == {"gtp-remat-rng", "egtp-remat-rng"}


@pytest.mark.parametrize("rank", [0, 1])
def test_megatrons_way_to_fill_a_shard_on_the_cpu(rank):
    torch.manual_seed(7)
    rounded = torch.empty(8, 3).normal_().bfloat16()
    torch.manual_seed(7)
    weight = torch.nn.Parameter(torch.empty(4, 3, dtype=torch.bfloat16))
    fill = tensor_parallel.layers._initialize_affine_weight_cpu
    place = {"params_dtype": torch.bfloat16, "rank": rank, "world_size": 2}
    found = fill(weight, 8, 3, 4, 0, normal_, 2, True, **place)
    assert torch.equal(found, rounded)
    assert torch.equal(weight, torch.cat(rounded.chunk(4)[rank::2]))
    assert weight.tensor_model_parallel
    assert (weight.partition_dim, weight.partition_stride) == (0, 2)


def test_megatrons_way_to_fill_a_shard_elsewhere_is_by_its_streams(streams):
    streams(tp_rank=1, ep_rank=0, etp_rank=0, force_reset_rng=True)
    assert set(tensor_parallel.get_cuda_rng_tracker().get_states()) == {
        tensor_parallel.get_expert_parallel_rng_tracker_name(),
        tensor_parallel.get_data_parallel_rng_tracker_name(),
        "model-parallel-rng",
    }
    shard = torch.empty(4)
    tensor_parallel.layers._initialize_affine_weight_gpu(shard, normal_, 0)
    drawn = torch.empty(4).normal_(generator=torch.Generator().manual_seed(5 + 2718 + 1))
    assert torch.equal(shard, drawn)


def test_names_of_what_is_not_here():
    # Layers for inference are refused.
    with pytest.raises(NotImplementedError, match="InferenceRowParallelLinear needs Transformer"):
        tensor_parallel.InferenceRowParallelLinear(4, 4, config=None)
    layers = tensor_parallel.inference_layers
    assert not layers.is_inference_column_parallel_linear(torch.nn.Linear(1, 1))
    # Nothing is sharded once more.
    assert not ezpz_tp.tensor_parallel.gtp_api.HAVE_GTP
    assert tensor_parallel.param_is_not_gtp_duplicate(torch.ones(1))
    copied, source = torch.ones(1), torch.ones(1)
    source.allreduce = False
    tensor_parallel.copy_gtp_attributes(copied, source)
    assert copied.allreduce is False
