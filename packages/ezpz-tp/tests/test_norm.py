import math

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

import ezpz_tp as tp
from ezpz_tp.testing import counting, run_ranks

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
    """This rank's part of a pipeline stage, with and without gradients."""

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
        again = of_this_rank()
        assert torch.equal(found, tp.clip_grad_norm_(again, 0.5, order, foreach=False))
        state = tp.get_state()
        for one, other in zip(stage.parameters(), again.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
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
        (4, {"tensor": 2, "pipeline": 2}, {"all_reduce": 2}),
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


def test_a_small_gradient_is_left_alone():
    ours = unsharded(1)
    kept = [one.grad.clone() for one in ours]
    tp.clip_grad_norm_(ours, 1e6)
    assert all(torch.equal(one.grad, grad) for one, grad in zip(ours, kept, strict=True))


@on_ranks(2)
def test_bf16_gradients_have_an_fp32_norm():
    grads = [one.grad.double() for one in unsharded(1, torch.bfloat16)]
    stage = of_this_rank(torch.bfloat16)
    total = tp.clip_grad_norm_(stage, 1.0)
    assert total.dtype == torch.float32
    expected = nn.utils.get_total_norm(grads).float()
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    assert stage.up.grad.dtype == torch.bfloat16


@on_ranks(4, tensor=2, pipeline=2, in_processes=True)
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


@on_ranks(4, tensor=2, pipeline=2)
def test_a_tied_copy_is_not_counted():
    first, last, stage = full_grads(0), full_grads(1), of_this_rank()
    if tp.get_state().index("pipeline") == 1:
        stage.up.shared = True
    del last["up"]
    expected = nn.utils.get_total_norm([*first.values(), *last.values()])
    torch.testing.assert_close(tp.get_grad_norm(stage), expected, rtol=1e-12, atol=0)


@on_ranks(4, tensor=2, data=2, in_processes=True)
def test_shards_of_fsdp():
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
    everywhere = [torch.zeros_like(found) for _ in range(4)]
    dist.all_gather(everywhere, found)
    assert all(torch.equal(one, found) for one in everywhere)
    forgetful = [nn.Parameter(one.detach()) for one in stage.parameters()]
    with pytest.raises(tp.ParallelError, match=r"of 4 parameters none .*keep_attributes"):
        tp.get_grad_norm(forgetful)


@on_ranks(2)
def test_ranks_without_gradients():
    """Rank 1 has no replicated gradient to count and, of the split ones, none at all."""
    grads, stage = full_grads(0), of_this_rank()
    grads |= {name: grads[name].chunk(2, dim)[0] for name, dim in SPLIT.items()}
    if tp.get_tensor_parallel_rank() == 1:
        stage.zero_grad()
    for order in ORDERS:
        expected = nn.utils.get_total_norm(grads.values(), order)
        torch.testing.assert_close(tp.get_grad_norm(stage, order), expected, rtol=1e-12, atol=0)
    nothing = [nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    assert tp.clip_grad_norm_(nothing, 1.0).item() == 0


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


@on_ranks(4, tensor=2, data=2, in_processes=True)
def test_experts_parameters_are_summed_over_the_expert_groups():
    """Two experts over the data ranks, each split over the tensor ranks, beside what is dense."""
    own = tp.ParallelState.create(2, expert=2)
    expert, half = own.index("expert"), own.index("expert_tensor")

    def parameter(grad, **attributes):
        one = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        one.grad = torch.full((2,), float(grad), dtype=torch.float64)
        for name, value in attributes.items():
            setattr(one, name, value)
        return one

    parameters = [
        parameter(1),
        parameter(2 + own.index("tensor"), tensor_model_parallel=True),
        parameter(4 + expert, allreduce=False),
        parameter(6 + 2 * expert + half, allreduce=False, tensor_model_parallel=True),
    ]
    with counting() as counter:
        total = tp.get_grad_norm(parameters, state=own)
    assert counter == {"all_reduce": 3}
    everything = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    expected = math.sqrt(2 * sum(value**2 for value in everything))
    assert total.item() == pytest.approx(expected, rel=1e-12)
    own.destroy()


def test_main_grad_goes_first():
    one = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    one.main_grad = torch.full((2,), 3.0)
    assert tp.clip_grad_norm_(one, 1.0).item() == pytest.approx(math.sqrt(18))
    assert one.main_grad.norm().item() == pytest.approx(1)
    assert one.grad is None


@pytest.mark.parametrize("order", [0, -1, math.nan])
def test_norms_that_are_none(order):
    with pytest.raises(ValueError, match=r"norm_type .*; expected a number above 0"):
        tp.get_grad_norm([], order)


def test_no_parameters():
    assert tp.get_grad_norm([]).item() == 0
