import gc
import weakref
from threading import Event, Thread

import pytest
import torch
from ranks import on_ranks
from torch import nn

import ezpz_tp as tp
from ezpz_tp._random import (
    MODEL_PARALLEL_RNG,
    CheckpointWithoutOutput,
    CheckpointWithoutOutputManager,
    is_checkpointing,
)
from ezpz_tp.testing import counting, run_ranks


def test_alone_it_is_torchs():
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    runs = []

    def function(x, scale, *, weight=weight):
        runs.append(1)
        return (x * weight).sin() * scale, "and anything else"

    plain = torch.autograd.grad(function(x, 2.0)[0].sum(), (x, weight))
    for distribute in (False, True):
        runs.clear()
        y, word = tp.checkpoint(function, distribute, x, 2.0)
        assert word == "and anything else"
        assert len(runs) == 1
        for found, expected in zip(torch.autograd.grad(y.sum(), (x, weight)), plain, strict=True):
            assert torch.equal(found, expected)
        assert len(runs) == 2


def test_without_grad_nothing_is_kept():
    with torch.no_grad():
        assert tp.checkpoint_activations(torch.sin, torch.zeros(2)).tolist() == [0, 0]


def test_a_tracker_of_ones_own():
    tracker = tp.RngTracker("cpu")
    tracker.add(MODEL_PARALLEL_RNG, 1)

    def function(x):
        with tracker.fork():
            return nn.functional.dropout(x, 0.5).exp()

    x = torch.zeros(64, dtype=torch.float64, requires_grad=True)
    y = tp.checkpoint_activations(function, x, tracker=tracker)
    (grad,) = torch.autograd.grad(y.sum(), x)
    tracker.reset()
    tracker.add(MODEL_PARALLEL_RNG, 1)
    with tracker.fork():
        mask = nn.functional.dropout(torch.ones(64, dtype=torch.float64), 0.5)
    assert torch.equal(grad, mask)


@on_ranks(3)
def test_the_first_argument_is_shared_out_and_freed():
    x = torch.arange(24.0, dtype=torch.float64).view(4, 6).requires_grad_()
    whole = x * 1
    storage = weakref.ref(whole)
    function = lambda h, factor: (h.sin() * factor).cos()  # noqa: E731
    with counting() as counter:
        y = tp.checkpoint_activations(function, whole, 2.0, distribute_saved_activations=True)
        assert not counter
        del whole
        gc.collect()
        assert storage() is None
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert counter == {"all_gather": 1}
    (expected,) = torch.autograd.grad(function(x, 2.0).sum(), x)
    assert torch.equal(grad, expected)


@on_ranks(2)
def test_what_cannot_be_shared_out():
    with pytest.raises(tp.DegreeError, match=r"\(3, 5\) has 15 elements"):
        tp.checkpoint(torch.sin, True, torch.randn(3, 5, requires_grad=True))
    with pytest.raises(TypeError, match="the first argument is int"):
        tp.checkpoint(torch.sin, True, 3)
    with pytest.raises(TypeError, match="the first argument is nothing"):
        tp.checkpoint(torch.rand, True)


@pytest.mark.parametrize("change", ["order", "values"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool]
)
@on_ranks(2)
def test_what_differs_between_ranks_is_refused(dtype, change):
    rank = tp.get_tensor_parallel_rank()
    weight = torch.ones((), requires_grad=True)
    x = torch.eye(6, dtype=torch.int64)
    x = x.roll(rank, 0) if change == "order" else x.index_fill(1, torch.tensor(3), rank)
    y = tp.checkpoint(lambda h: (h.to(torch.float64) * weight).sum(), True, x.to(dtype))
    told = r"\[6, 6\].*leave distribute_saved_activations off"
    with pytest.raises(tp.ParallelError, match=told):
        y.backward()


def kept(x, value):
    weight = torch.ones((), requires_grad=True)
    function = lambda h: (h.mul_(2) * weight).sum()  # noqa: E731
    tp.checkpoint(function, True, x.clone()).backward()
    return weight.grad.item() == value


def test_any_equal_values_are_shared_out():
    x = torch.full((2, 4), 3.0)
    for equal in (x, x.t(), x[:, ::2], x[0], x[:0]):
        assert run_ranks(kept, 2, equal, 2 * equal.sum().item()) == [True, True]
    not_numbers = torch.tensor([[float("nan"), -0.0]])
    assert run_ranks(kept, 2, not_numbers, 0) == [False, False]


def test_under_compilation():
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def step(x):
        return tp.checkpoint_activations(lambda x: x.sin().cos(), x)

    (expected,) = torch.autograd.grad(step(x).sum(), x)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    (found,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(found, expected)


def test_a_region_of_megatrons_says_that_it_runs():
    seen = []

    def function(x):
        seen.append(is_checkpointing())
        return x.exp()

    y = tp.checkpoint(function, False, torch.zeros(2, requires_grad=True))
    assert not is_checkpointing()
    y.sum().backward()
    assert seen == [True, True]
    assert not is_checkpointing()


def test_regions_of_two_threads_do_not_end_each_other():
    began, ended, left = Event(), Event(), []

    def first(x):
        began.wait()
        return x.exp()

    def second(x):
        began.set()
        ended.wait()
        return x.exp()

    def run(function):
        tp.checkpoint(function, False, torch.zeros(2, requires_grad=True))
        ended.set()
        left.append(is_checkpointing())

    threads = [Thread(target=run, args=(each,)) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left == [False, False]
    assert not is_checkpointing()


def two_regions(manager, weights, x, tracker):
    """A norm and an activation, with dropout, each kept by the product that follows."""
    kept = []

    def region(function, *args):
        if manager is None:
            return function(*args)
        kept.append(CheckpointWithoutOutput(ckpt_manager=manager or None))
        return kept[-1].checkpoint(function, *args)

    def drop(x, p):
        with tracker.fork():
            return nn.functional.dropout(x.tanh(), p)

    first = region(lambda x: x * weights[0], x)
    inner = first.reshape(-1, 4) @ weights[1]
    residual = nn.functional.dropout(first, 0.5)
    if kept and not manager:
        kept[0].discard_output_and_register_recompute(inner)
    second = region(drop, inner, 0.5)
    output = second @ weights[2] + residual
    if kept and not manager:
        kept[1].discard_output_and_register_recompute(output)
    elif kept:
        manager.discard_all_outputs_and_register_unified_recompute(output)
    return output, [first, second] if kept else []


@pytest.mark.parametrize("manager", [False, True], ids=["each", "together"])
def test_outputs_are_freed_and_made_again(manager):
    tracker = tp.get_rng_tracker()
    results = []
    # The input needs no gradient: the parameters do.
    x = torch.randn(6, 4, dtype=torch.float64)
    start = [torch.randn(4, dtype=torch.float64)]
    start += [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
    try:
        for regions in (None, CheckpointWithoutOutputManager() if manager else False):
            tp.seed_model_parallel(3)
            weights = [each.clone().requires_grad_() for each in start]
            output, freed = two_regions(regions, weights, x, tracker)
            if manager is not False and regions is not None:
                assert [each.untyped_storage().size() for each in freed] == [0, 0]
            torch.rand(3)  # the generators have moved on when backward runs
            output.square().sum().backward()
            results.append([output.detach(), *(weight.grad for weight in weights)])
    finally:
        tracker.reset()
    for plain, found in zip(*results, strict=True):
        assert torch.equal(plain, found)


def test_an_output_that_is_the_input_is_not_freed():
    x = torch.ones(3, requires_grad=True)
    region = CheckpointWithoutOutput(retain_input_tensors=True)
    same, double = region.checkpoint(lambda x: (x.view(3), x * 2), x)
    y = (same * double).sum()
    region.discard_output_and_register_recompute(y)
    assert x.tolist() == [1, 1, 1]
    assert double.untyped_storage().size() == 0
    y.backward()
    assert x.grad.tolist() == [4, 4, 4]


def test_what_cannot_be_made_again_is_said():
    with pytest.raises(NotImplementedError, match="fp8"):
        CheckpointWithoutOutput(fp8="e4m3")
    with pytest.raises(ValueError, match="has not run yet"):
        CheckpointWithoutOutputManager().add_checkpoint(CheckpointWithoutOutput())
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(TypeError, match="returned dict"):
        CheckpointWithoutOutput().checkpoint(lambda x: {"y": x}, x)
    region = CheckpointWithoutOutput()
    y = region.checkpoint(torch.exp, x)
    with pytest.raises(tp.ParallelError, match="hook_tensor has no gradient"):
        region.discard_output_and_register_recompute(y.detach())
    with pytest.raises(tp.ParallelError, match=r"use backward\(\)"):
        torch.autograd.grad(y.sum(), x)
    with torch.no_grad():  # nothing is kept, and nothing made again
        region = CheckpointWithoutOutput()
        y = region.checkpoint(torch.exp, x)
        region.discard_output_and_register_recompute(y * 2)
    assert y.untyped_storage().size() == 0
