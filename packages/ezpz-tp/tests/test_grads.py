"""Gradients: what is summed over which axis, their norm, and clipping."""

import copy
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import ezpz_tp as tp
from ezpz_tp.testing import counting, run_ranks


def parameter(*shape, grad=None, dtype=torch.float64, **attributes):
    found = nn.Parameter(torch.zeros(shape, dtype=dtype))
    if grad is not None:
        found.grad = torch.full(shape, float(grad), dtype=dtype)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


@on_ranks(3)
def test_tagged_parameters_are_summed_in_one_collective():
    rank = tp.get_state().index("tensor")
    norm = parameter(3, grad=rank + 1, sequence_parallel=True)
    turned = parameter(2, 3, sequence_parallel=True)
    turned.grad = torch.arange(6.0, dtype=torch.float64).view(3, 2).t() * (rank + 1)
    weight = parameter(2, grad=rank)
    frozen = parameter(2, grad=rank, sequence_parallel=True).requires_grad_(False)
    kept = norm.grad
    with counting() as counter:
        assert tp.finalize_grads([norm, turned, weight, frozen]) is None
    assert counter == {"all_reduce": 1}
    assert norm.grad is kept
    assert norm.grad.tolist() == [6.0] * 3
    assert turned.grad.tolist() == [[0, 12, 24], [6, 18, 30]]
    assert weight.grad.tolist() == frozen.grad.tolist() == [rank] * 2


@on_ranks(2)
def test_each_dtype_is_a_collective_and_main_grad_goes_first():
    rank = tp.get_state().index("tensor")
    wide = parameter(2, grad=rank, sequence_parallel=True)
    narrow = parameter(3, grad=rank, dtype=torch.bfloat16, sequence_parallel=True)
    # As Megatron's DDP keeps it: backward adds to main_grad, and grad is not used.
    main = parameter(2, dtype=torch.bfloat16, sequence_parallel=True)
    main.main_grad = torch.full((2,), rank + 1 / 1024)
    with counting() as counter:
        tp.finalize_grads([wide, narrow, main])
    assert counter == {"all_reduce": 3}
    assert wide.grad.tolist() == [1, 1]
    assert narrow.grad.dtype == torch.bfloat16
    assert narrow.grad.tolist() == [1, 1, 1]
    assert main.grad is None
    assert main.main_grad.tolist() == [1 + 2 / 1024] * 2
    # A gradient that some ranks lack.
    some = parameter(2, grad=5 if rank == 1 else None, sequence_parallel=True)
    nowhere = parameter(3, sequence_parallel=True)
    everywhere = parameter(1, grad=1, sequence_parallel=True)
    with counting() as counter:
        tp.finalize_grads([some, nowhere, everywhere])
    assert counter == {"all_reduce": 1}
    assert some.grad.tolist() == [5, 5]
    assert nowhere.grad is None
    assert everywhere.grad.tolist() == [2]


@on_ranks(2, tensor=1, data=2)
def test_at_degree_one_nothing_is_sent():
    tagged = parameter(2, grad=1, sequence_parallel=True, shared=True)
    with counting() as counter:
        tp.finalize_grads([tagged])
        tp.finalize_grads(tagged, average_over="context")
    assert not counter
    assert tagged.grad.tolist() == [1, 1]


@on_ranks(4, pipeline=4)
def test_tied_embeddings_are_summed_over_first_and_last_stage():
    """Trap 9: the embedding of the first stage and its copy on the last."""
    stage = tp.get_state().index("pipeline")
    own = tp.ParallelState.create(pipeline=4, embedding=True)
    parameters = [parameter(2, grad=100)]
    at_an_end = stage in {0, 3}
    if at_an_end:
        marks = {"shared_embedding": True} if stage == 0 else {"shared": True}
        parameters.append(parameter(3, 2, grad=stage + 1, **marks))
    with counting() as counter:
        tp.finalize_grads(parameters, state=own)
    assert counter == ({"all_reduce": 1} if at_an_end else {})
    assert parameters[0].grad.tolist() == [100, 100]
    if at_an_end:
        assert parameters[1].grad.unique().tolist() == [5]
        with pytest.raises(tp.ParallelError, match=r"embedding of shape \(3, 2\).*embedding=True"):
            tp.finalize_grads(parameters)
        tp.finalize_grads(parameters, embedding_group=own.group("embedding"))
        assert parameters[1].grad.unique().tolist() == [10]
    own.destroy()


@on_ranks(4, tensor=2, pipeline=2)
def test_both_sums_of_one_parameter_and_tied_copies():
    # A module given, and a position embedding that is tied and sequence-parallel too.
    state = tp.get_state()
    module = nn.Linear(2, 2, dtype=torch.float64)
    module.weight.sequence_parallel = module.weight.shared_embedding = True
    module.weight.grad = torch.ones_like(module.weight)
    with tp.use_state(state), counting() as counter:
        tp.finalize_grads([module, module], embedding_group=state.group("pipeline"))
    assert counter == {"all_reduce": 2}
    assert module.weight.grad.unique().tolist() == [4]
    # The norm does not count a tied copy.
    first, last, stage = full_grads(0), full_grads(1), of_this_rank()
    if tp.get_state().index("pipeline") == 1:
        stage.up.shared = True
    del last["up"]
    expected = nn.utils.get_total_norm([*first.values(), *last.values()])
    torch.testing.assert_close(tp.get_grad_norm(stage), expected, rtol=1e-12, atol=0)


@on_ranks(4, tensor=2, data=2)
def test_shards_of_fsdp():
    state = tp.get_state()
    mesh = state.to_mesh("cpu")["dp"]
    module = nn.Linear(3, 3, dtype=torch.float64)
    for one in module.parameters():
        tp.mark_sequence_parallel(one)
    with tp.keep_attributes(module):
        fully_shard(module, mesh=mesh)
    assert module.weight.sequence_parallel
    module(torch.full((1, 3), 1.0 + state.index("tensor"), dtype=torch.float64)).sum().backward()
    if state.index("tensor") == 1:
        module.bias.grad = None
    with counting() as counter:
        tp.finalize_grads(module)
    assert counter == {"all_reduce": 1}
    for function in (tp.finalize_grads, tp.get_grad_norm):
        with pytest.raises(tp.ParallelError, match=r"of 1 parameters none .*keep_attributes"):
            function(nn.Parameter(module.weight.detach()))
    # 1 and 2 from the tensor-parallel ranks; the mean over the data ranks is FSDP2's.
    assert module.weight.grad.full_tensor().unique().tolist() == [3]
    assert module.bias.grad.full_tensor().unique().tolist() == [1]


@on_ranks(2, initialize=False)
def test_groups_are_needed():
    # Layers may have been given a group that nothing here knows of.
    for attribute in ("tensor_model_parallel", "sequence_parallel"):
        marked = parameter(3, grad=1, **{attribute: True})
        for function in (tp.finalize_grads, lambda found: tp.clip_grad_norm_(found, 1.0)):
            with pytest.raises(tp.NotInitializedError, match=r"from_groups\(tensor=group\)"):
                function([marked])
    tp.finalize_grads([parameter(3, grad=1)])

    with pytest.raises(tp.NotInitializedError, match="data x context"):
        tp.finalize_grads(parameter(2, grad=1), sum_over=BOTH)


@on_ranks(2, tensor=1)
def test_groups_of_ones_own():
    group = tp.get_state().group("data")
    layer, whole = tp.ColumnParallelLinear(4, 4, seed=1, tp_group=group), nn.Linear(4, 4)
    whole.load_state_dict(tp.ColumnParallelLinear(4, 4, seed=1).state_dict())
    for module in (layer, whole):
        module(torch.ones(1, 4)).sum().backward()
    found = tp.get_grad_norm(layer, state=tp.ParallelState.from_groups(tensor=group))
    assert found.item() == pytest.approx(tp.get_grad_norm(whole).item())


BOTH = ("data", "context")


@pytest.mark.parametrize("joined", [False, True])
def test_reductions_over_data_and_context(joined):
    """Averages and sums over data and context, in one collective where one group has both."""

    def over_axes():
        state = tp.get_state()
        data, context = state.index("data"), state.index("context")
        one = parameter(2, 3, grad=10 * data + context + 1)
        # Ranks that lack a gradient, or all of them: counted as zero, and left as it is.
        two = parameter(2, grad=8 if data == 1 else None)
        three = parameter(2)
        frozen = parameter(2, grad=context).requires_grad_(False)
        with counting() as counter:
            tp.finalize_grads([one, two, three, frozen], sum_over=BOTH)
        assert counter == {"all_reduce": 1 if joined else 2}
        assert one.grad.unique().tolist() == [26]
        assert two.grad.tolist() == [16, 16]
        assert three.grad is None
        assert frozen.grad.tolist() == [context] * 2
        for axes, wanted in [
            ({"average_over": BOTH}, 6.5),
            ({"average_over": "data"}, 6 + context),
            ({"sum_over": ["context"]}, 20 * data + 3),
            ({"average_over": "data", "sum_over": "context"}, 13),
            ({}, 10 * data + context + 1),
        ]:
            one.grad.fill_(10 * data + context + 1)
            tp.finalize_grads(one, **axes)
            assert one.grad.unique().tolist() == [wanted], axes

    # The tensor axis leaves no group that happens to have both.
    run_ranks(over_axes, 8, tensor=2, data=2, context=2, also=[BOTH] if joined else [])


@on_ranks(2, data=2)
def test_what_is_sent_at_once_is_bounded():
    rank = tp.get_state().index("data")
    parameters = [parameter(3, grad=rank + index) for index in range(5)]
    with mock.patch("ezpz_tp._grads._BUCKET", 48), counting() as counter:
        tp.finalize_grads(parameters, average_over="data")
    assert counter == {"all_reduce": 3}
    assert [one.grad.tolist() for one in parameters] == [[n + 0.5] * 3 for n in range(5)]


@on_ranks(4, data=4)
def test_averages_do_not_overflow():
    """The mean of numbers whose sum fp16 cannot hold."""
    large = parameter(2, grad=40000, dtype=torch.float16)
    tp.finalize_grads(large, average_over="data")
    assert large.grad.tolist() == [40000, 40000]


def test_what_is_refused():
    for axes in ({"sum_over": "tensor"}, {"average_over": BOTH, "sum_over": "data"}):
        with pytest.raises(ValueError, match="expected data, context or both, each once"):
            tp.finalize_grads(parameter(2, grad=1), **axes)
    for order in (0, -1, math.nan):
        with pytest.raises(ValueError, match=r"norm_type .*; expected a number above 0"):
            tp.get_grad_norm([], order)
    assert tp.get_grad_norm([]).item() == 0


@on_ranks(2, data=2)
def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    told = r"a parameter of shape \(4, 2\) is torch\.sparse_coo; expected a dense one.*sparse=False"
    with pytest.raises(tp.ParallelError, match=told):
        tp.finalize_grads(table, average_over="data")


ORDERS = (2.0, 1.0, 3.5, math.inf)
SHAPES = {"norm": (6,), "up": (12, 6), "down": (6, 12), "bias": (12,)}
SPLIT = {"up": 0, "down": 1, "bias": 0}


def full_grads(stage, dtype=torch.float64):
    generator = torch.Generator().manual_seed(40 + stage)
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
        for name, shape in SHAPES.items()
    }


def unsharded(stages, dtype=torch.float64):
    found = []
    for stage in range(stages):
        for grad in full_grads(stage, dtype).values():
            found.append(nn.Parameter(torch.zeros_like(grad)))
            found[-1].grad = grad
    return found


class Stage(nn.Module):
    def __init__(self, tensor_rank, degree, stage, dtype=torch.float64):
        super().__init__()
        self.grads = {}
        for name, grad in full_grads(stage, dtype).items():
            dim = SPLIT.get(name)
            part = grad if dim is None else grad.chunk(degree, dim)[tensor_rank]
            one = nn.Parameter(torch.zeros_like(part))
            if dim is not None:
                tp.set_tensor_model_parallel_attributes(one, True, dim, 1)
            one.grad = part.clone()
            self.register_parameter(name, one)


def of_this_rank(dtype=torch.float64):
    state = tp.get_state()
    return Stage(state.index("tensor"), state.size("tensor"), state.index("pipeline"), dtype)


def same_as_unsharded(expected, collectives):
    for order, (norm, clipped) in expected.items():
        stage = of_this_rank()
        with counting() as counter:
            assert tp.get_grad_norm(stage, order).dtype == torch.float64
        assert counter == collectives
        with counting() as counter:
            found = tp.clip_grad_norm_(stage.parameters(), 0.5, order)
        assert counter == collectives
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
        state = tp.get_state()
        whole = clipped[state.index("pipeline")]
        for name, one in stage.named_parameters():
            dim = SPLIT.get(name)
            part = whole[name]
            if dim is not None:
                part = part.chunk(state.size("tensor"), dim)[state.index("tensor")]
            torch.testing.assert_close(one.grad, part, rtol=1e-12, atol=1e-15)
    return found


def expectations(stages):
    found = {}
    for order in ORDERS:
        parameters = unsharded(stages)
        norm = nn.utils.clip_grad_norm_(parameters, 0.5, order)
        grads = iter(one.grad for one in parameters)
        found[order] = norm, [{name: next(grads) for name in SHAPES} for _ in range(stages)]
    return found


@pytest.mark.parametrize(
    ("world", "degrees", "collectives"),
    [
        (1, {}, {}),
        (2, {"tensor": 2}, {"all_reduce": 1}),
        (3, {"tensor": 3}, {"all_reduce": 1}),
        (2, {"pipeline": 2}, {"all_reduce": 1}),
        (8, {"tensor": 2, "pipeline": 2, "data": 2}, {"all_reduce": 2}),
        (4, {"tensor": 2, "data": 2}, {"all_reduce": 1}),
    ],
    ids=str,
)
def test_norm_and_clipping_equal_the_unsharded(world, degrees, collectives):
    """Trap 9: replicated parameters count once."""
    expected = expectations(degrees.get("pipeline", 1))
    norms = run_ranks(same_as_unsharded, world, expected, collectives, **degrees)
    assert all(torch.equal(norm, norms[0]) for norm in norms)


def test_alone_it_is_torchs_bit_for_bit():
    for dtype in (torch.float32, torch.float64):
        ours, theirs = unsharded(1, dtype), unsharded(1, dtype)
        norm = nn.utils.clip_grad_norm_(theirs, 1.0)
        assert torch.equal(tp.clip_grad_norm_(ours, 1.0), norm)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.grad, other.grad)
    # A small gradient is left alone.
    ours = unsharded(1)
    kept = [one.grad.clone() for one in ours]
    tp.clip_grad_norm_(ours, 1e6)
    assert all(torch.equal(one.grad, grad) for one, grad in zip(ours, kept, strict=True))
    # main_grad goes first.
    one = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    one.main_grad = torch.full((2,), 3.0)
    assert tp.clip_grad_norm_(one, 1.0).item() == pytest.approx(math.sqrt(18))
    assert one.main_grad.norm().item() == pytest.approx(1)
    assert one.grad is None


@on_ranks(2)
def test_norms_of_bf16_and_of_ranks_without_gradients():
    grads = [one.grad.double() for one in unsharded(1, torch.bfloat16)]
    stage = of_this_rank(torch.bfloat16)
    total = tp.clip_grad_norm_(stage, 1.0)
    assert total.dtype == torch.float32
    expected = nn.utils.get_total_norm(grads).float()
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    assert stage.up.grad.dtype == torch.bfloat16
    # Rank 1 has no replicated gradient to count and, of the split ones, none at all.
    grads, stage = full_grads(0), of_this_rank()
    grads |= {name: grads[name].chunk(2, dim)[0] for name, dim in SPLIT.items()}
    if tp.get_tensor_parallel_rank() == 1:
        stage.zero_grad()
    for order in ORDERS:
        expected = nn.utils.get_total_norm(grads.values(), order)
        torch.testing.assert_close(tp.get_grad_norm(stage, order), expected, rtol=1e-12, atol=0)
    nothing = [nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    assert tp.clip_grad_norm_(nothing, 1.0).item() == 0


@on_ranks(4, tensor=2, pipeline=2)
def test_the_product_group_saves_a_collective():
    own = tp.ParallelState.create(2, pipeline=2, also=[("tensor", "pipeline")])
    assert own.size("data") == 1
    with counting() as counter:
        total = tp.get_grad_norm(of_this_rank(), state=own)
    assert counter == {"all_reduce": 1}
    torch.testing.assert_close(
        total, nn.utils.get_total_norm([one.grad for one in unsharded(2)]), rtol=1e-12, atol=0
    )
    own.destroy()
    with pytest.raises(tp.NotInitializedError, match="destroyed"):
        tp.get_grad_norm(of_this_rank(), state=own)


@on_ranks(4, tensor=2, data=2)
def test_norm_of_shards_of_fsdp():
    state, stage, expected = tp.get_state(), of_this_rank(), expectations(1)
    grads = {name: one.grad for name, one in stage.named_parameters()}
    with tp.keep_attributes(stage):
        fully_shard(stage, mesh=state.to_mesh("cpu")["dp"])
    for name, one in stage.named_parameters():
        # The shard that the reduction of backward leaves on this rank; 5 rows, say, are 3 and 2.
        one.grad = torch.zeros_like(one)
        parts = grads[name].chunk(state.size("data"))
        if state.index("data") < len(parts):
            one.grad.to_local().copy_(parts[state.index("data")])
    for order, (norm, _) in expected.items():
        with counting() as counter:
            found = tp.get_grad_norm(stage, order)
        assert counter == {"all_reduce": 2}
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
    factor = 0.5 / (tp.clip_grad_norm_(stage, 0.5) + 1e-6)
    for name, one in stage.named_parameters():
        whole = one.grad.full_tensor()
        torch.testing.assert_close(whole, grads[name] * factor, rtol=1e-12, atol=1e-15)
    assert equal_on_all_ranks(found)


@on_ranks(4, initialize=False)
def test_norm_of_torchs_tensor_parallelism_inside_of_fsdp():
    # Loaded here: at the top it would be loaded by every test.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).double()
    model = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
    fully_shard(parallel.parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
    for each in (whole, model):
        each(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
    for order in (1.0, 2.0, math.inf):
        expected = nn.utils.get_total_norm([one.grad for one in whole.parameters()], order)
        torch.testing.assert_close(tp.get_grad_norm(model, order), expected, rtol=1e-12, atol=0)
    tp.clip_grad_norm_(model, 0.5)
    nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    for clipped, one in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(clipped.grad.full_tensor(), one.grad, rtol=1e-12, atol=1e-15)


def equal_on_all_ranks(tensor):
    everywhere = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, tensor)
    return all(torch.equal(one, tensor) for one in everywhere)


@on_ranks(2, initialize=False)
def test_norm_of_torchs_sequence_parallelism():
    """The gradients of its norms are partial sums, and the parameters replicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, parallel

    torch.manual_seed(0)
    whole = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)).double()
    model = copy.deepcopy(whole)
    plan = {
        "0": parallel.SequenceParallel(),
        "1": parallel.ColwiseParallel(input_layouts=Shard(1)),
        "2": parallel.RowwiseParallel(),
    }
    parallel.parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    x = torch.randn(2, 4, 4, dtype=torch.float64)
    whole(x).square().sum().backward()
    model(x.chunk(2, 1)[dist.get_rank()]).square().sum().backward()
    for order in (1.0, 2.0, math.inf):
        expected = nn.utils.get_total_norm([one.grad for one in whole.parameters()], order)
        found = tp.get_grad_norm(model, order)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        assert equal_on_all_ranks(found)
    tp.verify_replicated(model, gradients=True, state=tp.ParallelState.create(2))
    assert model[0].weight.grad.placements[0].is_partial(), "only looked at"
    tp.clip_grad_norm_(model, 0.5)
    nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    for each in (model, whole):
        torch.optim.SGD(each.parameters(), lr=1.0).step()
    for clipped, one in zip(model.parameters(), whole.parameters(), strict=True):
        assert clipped.grad.placements == clipped.placements
        assert equal_on_all_ranks(clipped.grad.full_tensor())
        torch.testing.assert_close(clipped.grad.full_tensor(), one.grad, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(clipped.full_tensor(), one.detach(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("placements", "placements_of_gradient"),
    [
        ("R R", "P R"),
        ("R R", "P P"),
        ("R R", "R M"),
        ("S R", "S P"),  # as of FSDP2 with tensor parallelism
        ("R S", "P S"),  # as of HSDP
        ("R R", "S R"),
        ("S R", "R R"),
        ("S T", "T S"),
    ],
)
@on_ranks(4, initialize=False)
def test_norm_of_a_gradient_that_is_laid_out_otherwise(placements, placements_of_gradient):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    kinds = {"R": Replicate(), "S": Shard(0), "T": Shard(1), "P": Partial(), "M": Partial("avg")}
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(1.0, 21.0, dtype=torch.float64).reshape(4, 5)
    order_of_parameter = [kinds[letter] for letter in placements.split()]
    one = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, order_of_parameter))
    order_of_gradient = [kinds[letter] for letter in placements_of_gradient.split()]
    one.grad = distribute_tensor(whole, mesh, order_of_gradient)
    assert one.grad.placements == tuple(order_of_gradient)
    expected = {order: whole.norm(order) for order in (1.0, 2.0, math.inf)}
    for order, norm in expected.items():
        found = tp.get_grad_norm(one, order)
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
        assert equal_on_all_ranks(found)
    assert one.grad.placements == tuple(order_of_gradient)
    tp.finalize_grads(one)
    assert one.grad.placements == one.placements
    torch.testing.assert_close(one.grad.full_tensor(), whole, rtol=1e-12, atol=0)
    one.grad = distribute_tensor(whole, mesh, order_of_gradient)
    tp.clip_grad_norm_(one, 0.5)
    assert one.grad.placements == one.placements
    clipped = whole * 0.5 / (expected[2.0] + 1e-6)
    torch.testing.assert_close(one.grad.full_tensor(), clipped, rtol=1e-12, atol=1e-15)
    if "P" in placements_of_gradient:
        one.grad = distribute_tensor(whole, mesh, order_of_gradient)
        tp.mark_sequence_parallel(one)
        with pytest.raises(tp.ParallelError, match=r"sequence_parallel .* shape \(4, 5\).*twice"):
            tp.finalize_grads(one, state=tp.ParallelState.create(2))


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@on_ranks(2)
def test_infinite_and_nan(value, order):
    """What is not finite on one rank is so on all, as for the unsharded."""
    theirs, stage = unsharded(1), of_this_rank()
    theirs[1].grad[-6, 0] = value
    expected = nn.utils.clip_grad_norm_(theirs, 1.0, order)
    if tp.get_tensor_parallel_rank() == 1:
        stage.up.grad.view(-1)[0] = value
    with pytest.raises(RuntimeError, match=f"of order {order} is {value}"):
        tp.clip_grad_norm_(stage, 1.0, order, error_if_nonfinite=True)
    assert stage.norm.grad.isfinite().all()
    torch.testing.assert_close(tp.clip_grad_norm_(stage, 1.0, order), expected, equal_nan=True)
    torch.testing.assert_close(stage.norm.grad, theirs[0].grad, equal_nan=True)


@on_ranks(4, tensor=2, data=2)
def test_experts_parameters_are_summed_over_the_expert_groups():
    """Two experts over the data ranks, each split over the tensor ranks, beside what is dense."""
    own = tp.ParallelState.create(2, expert=2)
    expert, half = own.index("expert"), own.index("expert_tensor")

    split = {"tensor_model_parallel": True}
    parameters = [
        parameter(2, grad=1),
        parameter(2, grad=2 + own.index("tensor"), **split),
        parameter(2, grad=4 + expert, allreduce=False),
        parameter(2, grad=6 + 2 * expert + half, allreduce=False, **split),
    ]
    with counting() as counter:
        total = tp.get_grad_norm(parameters, state=own)
    assert counter == {"all_reduce": 3}
    expected = math.sqrt(2 * sum(value**2 for value in range(1, 10)))
    assert total.item() == pytest.approx(expected, rel=1e-12)
    told = r"expert's parameter of shape \(2,\).*expert_data"  # not over the model's axes
    with pytest.raises(tp.ParallelError, match=told):
        tp.finalize_grads(parameters[2], average_over="data", state=own)
    tp.finalize_grads(parameters[0], average_over="data", state=own)
    own.destroy()
