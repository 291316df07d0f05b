"""`verify_replicated` names what differs between ranks and should not, or the other way round."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from llama import Config, Llama, parallel_loss_of, text_batch
from on_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel

import ezpz_tp as tp
from ezpz_tp.testing import counting, run_ranks

DATA = {"tensor": 2, "data": 2}


def error_of(program, *given):
    try:
        program(*given)
    except tp.ReplicaError as error:
        return str(error)
    return None


def trained(bug):
    """Train a Llama under sequence parallelism on several data-parallel ranks; compare values."""
    config = Config(sequence_parallel=True, layers=1)
    model, state = Llama(config), tp.get_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if bug == "equal seeds":
        with torch.no_grad():
            weight = model.layers["0"].feed_forward.up.weight
            weight.normal_(generator=torch.Generator().manual_seed(5))
    tp.verify_replicated(model)
    tokens, labels = text_batch(state.index("data"))
    parallel_loss_of(model(tokens), labels).backward()
    if bug != "forgotten finalize_grads":
        tp.finalize_grads(model)
    if bug != "not averaged over data":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=state.group("data"))
    optimizer.step()
    tp.verify_replicated(model)


def tied(bug=None):
    """An embedding on the first stage that is the head's weight on the last."""
    weight = nn.Parameter(torch.arange(12.0).view(4, 3))
    weight.shared_embedding = True
    last = tp.is_pipeline_last_stage()
    if bug != "counted twice":
        weight.shared = last
    weight.grad = torch.ones_like(weight) * (3 if last else 2)
    if bug != "not summed":
        tp.finalize_grads([weight])
    model = nn.Module()
    model.embedding = weight
    with torch.no_grad():
        weight.sub_(weight.grad)
    tp.verify_replicated(model)


def block():
    up = tp.ColumnParallelLinear(8, 16, gather_output=False, seed=1)
    down = tp.RowParallelLinear(16, 8, input_is_parallel=True, seed=2)
    return nn.Sequential(nn.LayerNorm(8), up, down)


@pytest.mark.parametrize(
    ("bug", "axis", "parameter", "mend"),
    [
        ("forgotten finalize_grads", "tensor", "norm.weight", "call finalize_grads once a step"),
        ("not averaged over data", "data", "norm.weight", "sum gradients over the data"),
        ("equal seeds", "tensor", "layers.0.feed_forward.up.weight", "the ranks were seeded alike"),
    ],
)
def test_what_differs_is_named_with_axis_and_ranks(bug, axis, parameter, mend):
    for rank, error in enumerate(run_ranks(error_of, 4, trained, bug, **DATA)):
        ranks = {"tensor": (rank // 2 * 2, rank // 2 * 2 + 1), "data": (rank % 2, rank % 2 + 2)}
        assert f"{axis} axis, ranks {ranks[axis][0]}, {ranks[axis][1]}:" in error
        assert parameter in error
        assert mend in error


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        ("counted twice", "`shared` of tied embedding 0 is False on 2 stages"),
        ("not summed", "tied embedding 0 should be the same on all of them, and differs on 1"),
        (None, None),
    ],
)
@on_ranks(2, initialize=False)
def test_tied_embeddings(bug, message):
    tp.initialize_tensor_parallel(pipeline_parallel_size=2, embedding=True)
    error = error_of(tied, bug)
    assert error is None if message is None else message in error


@pytest.mark.parametrize(("gradient", "odd"), [(False, 2), (True, 0)])
@on_ranks(3, data=3)
def test_the_last_bit_of_one_value_on_one_rank_of_three(gradient, odd):
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1)
        model.bias.fill_(2)
    model(torch.ones(2, 4)).sum().backward()
    if tp.get_state().rank == odd:
        (model.weight.grad if gradient else model.weight.detach())[3, 3] += 1e-6
    error = error_of(tp.verify_replicated, model)
    with_gradients = error_of(partial(tp.verify_replicated, gradients=True), model)
    name = "gradient of weight" if gradient else "weight"
    assert f"{name} should be the same on all of them, and differs on {odd};" in with_gradients
    assert (error is None) == gradient
    assert "bias" not in with_gradients


def test_one_collective_an_axis():
    def collectives():
        model = block()
        with counting() as counter:
            tp.verify_replicated(model)
        return dict(counter)

    assert run_ranks(collectives, 2, tensor=2) == [{"all_gather": 1}] * 2
    assert run_ranks(collectives, 4, **DATA) == [{"all_gather": 2}] * 4
    assert run_ranks(collectives, 1) == [{}]


@on_ranks(2, data=2)
def test_any_shape_and_dtype():
    model = nn.ParameterList(
        [torch.full((), float(i)) for i in range(1100)]
        + [torch.ones(2, 3, dtype=dtype) for dtype in (torch.bfloat16, torch.complex64)]
        + [torch.zeros(0, 3), torch.ones(3, 4).t()]
    )
    for one in model[-3:]:
        one.requires_grad_(False)
    assert error_of(tp.verify_replicated, model) is None
    model[1050].data += tp.get_state().rank
    assert "1050 should be the same" in error_of(tp.verify_replicated, model)


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])  # the other rank does not wait for it
@on_ranks(2, data=2)
def test_a_parameter_without_values(ranks):
    meta = tp.get_state().rank in ranks
    model = nn.Linear(2, 2, device="meta" if meta else "cpu")
    error = r"weight .* is on the meta device" if meta else r"weight .* differs on 1"
    with pytest.raises(tp.ParallelError, match=error):
        tp.verify_replicated(model)


@pytest.mark.parametrize("few", [2, 1020])
@on_ranks(2, data=2)
def test_more_parameters_on_a_rank_also_than_are_sent_at_once(few):
    model = nn.ParameterList(torch.full((), float(i)) for i in range(few))
    assert error_of(tp.verify_replicated, model) is None
    if tp.get_state().rank == 1:
        model.extend(torch.zeros(8).unbind())
    error = error_of(tp.verify_replicated, model)
    assert f"have other parameters ({few} on rank 0, {few + 8} on rank 1 compared)" in error


@on_ranks(2)
def test_shards_of_one_value_need_not_differ():
    up = tp.ColumnParallelLinear(4, 4, gather_output=False, seed=1)
    nn.init.constant_(up.weight, float("nan"))
    assert error_of(tp.verify_replicated, up) is None
    up.weight.data[0, 0] = 1.0
    told = "weight should be another one on each of them, and is the same on 0, 1"
    assert told in error_of(tp.verify_replicated, up)


@on_ranks(4, **DATA)
def test_distributed_tensors_differ_where_they_are_sharded():
    state, mesh = tp.get_state(), tp.get_state().to_mesh("cpu")
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4))
    how = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, mesh["tp"], how)
    for one in model:
        fully_shard(one, mesh=mesh["dp"])
    model(torch.ones(2, 4)).sum().backward()
    tp.verify_replicated(model, gradients=True)
    with torch.no_grad():
        model[2].weight.to_local().add_(state.index("tensor"))
    error, (first, second) = error_of(tp.verify_replicated, model), state.ranks("tensor")
    assert f"tensor axis, ranks {first}, {second}:\n    2.weight should be the same" in error


@on_ranks(2)
def test_streams_that_should_differ():
    model = nn.LayerNorm(2)
    tp.seed_model_parallel(7)
    assert error_of(tp.verify_replicated, model) is None
    tp.seed_model_parallel(7, tensor_rank=0)
    error = error_of(tp.verify_replicated, model)
    assert "the random stream 'model-parallel-rng' should be another one on each" in error
    assert "call seed_model_parallel(seed)" in error
