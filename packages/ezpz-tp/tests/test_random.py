"""Random streams, and regions that are computed once more in backward."""

import contextlib
import importlib
import io
from functools import partial
from unittest import mock

import pytest
import torch
from on_ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ezpz_tp as tp
from ezpz_tp import _random as random
from ezpz_tp.parallel_state import GlobalMemoryBuffer
from ezpz_tp.tensor_parallel.random import CheckpointWithoutOutput, CheckpointWithoutOutputManager
from ezpz_tp.testing import run_ranks

DATA, EXPERT = random.DATA_PARALLEL_RNG, random.EXPERT_PARALLEL_RNG
MODEL = random.MODEL_PARALLEL_RNG
DEVICES = ["cpu"]
if torch.accelerator.is_available():
    DEVICES.append(torch.accelerator.current_accelerator().type)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def tracker(device):
    tracker = tp.RngTracker(device)
    tracker.add(MODEL, 7)
    tracker.add("other", 8)
    return tracker


def seeded(seed, *shape, device="cpu"):
    return torch.rand(shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def test_a_fork_draws_what_its_seed_says_and_the_default_goes_on(tracker, device):
    torch.manual_seed(1)
    before = torch.rand(2, device=device)
    with tracker.fork():
        first = torch.rand(3, device=device)
    middle = torch.rand(2, device=device)
    with tracker.fork():
        second = torch.rand(3, device=device)
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(3, device=device))
    assert torch.equal(second, torch.rand(3, device=device))
    torch.manual_seed(1)
    assert torch.equal(torch.cat([before, middle]).cpu(), torch.cat(draw(2, device)).cpu())


def draw(count, device):
    return [torch.rand(2, device=device) for _ in range(count)]


def test_forks_nest_and_an_error_inside_leaves_one(tracker, device):
    tracker.set_states(states := tracker.get_states())
    with tracker.fork():  # the CPU has the stream too, whatever the device
        assert torch.equal(torch.rand(4), seeded(7, 4))
    tracker.set_states(states)
    with tracker.fork():
        one = torch.rand(2, device=device)
        with tracker.fork("other"):
            other = torch.rand(2, device=device)
        with tracker.fork():
            two = torch.rand(2, device=device)
        three = torch.rand(2, device=device)
    torch.manual_seed(7)
    for found, expected in zip((one, two, three), draw(3, device), strict=True):
        assert torch.equal(found, expected)
    torch.manual_seed(8)
    assert torch.equal(other, torch.rand(2, device=device))
    # An error inside a fork leaves it.
    torch.manual_seed(1)
    expected = torch.rand(2, device=device)
    torch.manual_seed(1)
    with pytest.raises(RuntimeError, match="shape"), tracker.fork():
        torch.rand(5, device=device).view(torch.rand(2).numel())
    assert torch.equal(torch.rand(2, device=device), expected)
    with tracker.fork():
        assert not torch.equal(torch.rand(5, device=device), seeded(7, 5, device=device))


def test_streams_are_refused(tracker):
    refused = partial(pytest.raises, tp.ParallelError)
    with refused(match="'other' exists already"):
        tracker.add("other", 9)
    with refused(match="'other' has seed 8 already"):
        tracker.add("third", 8)
    known = r"no random stream 'fourth'; known: model-.*, other"
    with refused(match=known), tracker.fork("fourth"):
        pass
    with refused(match=r"reset\(\) inside fork\('other'\)"), tracker.fork("other"):
        tracker.reset()
    with refused(match=r"set_states\(\) inside fork"), tracker.fork():
        tracker.set_states({})
    # A new tracker knows nothing.
    tracker = tp.RngTracker()
    assert not tracker.is_initialized()
    told = r"known: none. Call seed_model_parallel"
    with pytest.raises(tp.ParallelError, match=told), tracker.fork():
        pass
    tracker.add("some", 1)
    assert tracker.is_initialized()
    tracker.reset()
    assert not tracker.is_initialized()
    tracker.add("some", 1)
    # An accelerator's state on the CPU.
    with pytest.raises(tp.ParallelError, match="has 16 bytes, the CPU's has 5056"):
        tp.RngTracker("cpu").set_states({"some": torch.zeros(16, dtype=torch.uint8)})


def test_states_go_through_a_check_point(tracker, device):
    with tracker.fork():
        torch.rand(3, device=device)
    file = io.BytesIO()
    torch.save(tracker.get_states(), file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    assert {state.device.type for state in states.values()} == {"cpu"}
    expected = []
    for name in (MODEL, "other"):
        with tracker.fork(name):
            expected.append(torch.rand(4, device=device))
    fresh = tp.RngTracker(device)
    fresh.set_states(states)
    assert fresh.is_initialized()
    for name, values in zip((MODEL, "other"), expected, strict=True):
        with fresh.fork(name):
            assert torch.equal(torch.rand(4, device=device), values)
    # They do not change later.
    states = tracker.get_states()
    kept = {name: state.clone() for name, state in states.items()}
    with tracker.fork():
        torch.rand(3, device=device)
    assert all(torch.equal(states[name], kept[name]) for name in kept)
    assert not torch.equal(tracker.get_states()[MODEL], kept[MODEL])
    # Within a fork they are those of now.
    tracker = tp.RngTracker(device=device)
    tracker.add("a", 1)
    with tracker.fork("a"):
        torch.rand(3, device=device)
        states = tracker.get_states()
        expected = torch.rand(3, device=device)
    tracker.set_states(states)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3, device=device), expected)


def region(tracker):
    def run(x):
        with tracker.fork():
            x = nn.functional.dropout(x, 0.5)
        x = nn.functional.dropout(x.sin(), 0.5)
        with tracker.fork("other"):
            return nn.functional.dropout(x.exp(), 0.5).cos()

    return run


def checkpointed(run, tracker, x):
    contexts = partial(tp.rng_contexts, tracker)
    return torch_checkpoint(run, x, use_reentrant=False, context_fn=contexts)


def test_recomputation_repeats_the_streams_and_leaves_them(tracker, device):
    x = torch.randn(64, dtype=torch.float64, device=device, requires_grad=True)
    run, states = region(tracker), tracker.get_states()

    def train(call):
        tracker.set_states(states)
        torch.manual_seed(3)
        x.grad = None
        first, second = call(x), call(x)
        mark = torch.rand(1, device=device)
        loss = (first * second).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with tracker.fork():
            inside = torch.rand(1, device=device)
        return x.grad.clone(), loss.detach(), mark, torch.rand(1, device=device), inside

    plain, ours = train(run), partial(tp.checkpoint_activations, run, tracker=tracker)
    for again in (partial(checkpointed, run, tracker), ours):
        assert all(map(torch.equal, train(again), plain))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_that_would_draw_other_numbers(tracker, use_reentrant):
    x = torch.randn(4, requires_grad=True)
    y = torch_checkpoint(region(tracker), x, use_reentrant=use_reentrant)
    with pytest.raises(tp.ParallelError, match=r"inside a backward pass.*checkpoint_activations"):
        y.sum().backward()
    with tracker.fork():
        pass


def test_recomputation_of_a_region_inside_of_a_fork(tracker):
    run, states = region(tracker), tracker.get_states()
    x = torch.randn(64, dtype=torch.float64, requires_grad=True)
    grads = []
    for call in (run, partial(checkpointed, run, tracker)):
        tracker.set_states(states)
        torch.manual_seed(3)
        with tracker.fork("other"):
            output = call(x)
        grads += torch.autograd.grad(output.sum(), x)
    assert torch.equal(*grads)


def test_recomputation_by_a_function_that_restores_the_streams_itself(tracker):
    """As DeepSpeed's activation checkpointing, which is given the tracker."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.states, ctx.default = tracker.get_states(), torch.get_rng_state()
            ctx.save_for_backward(x)
            return run(x)

        @staticmethod
        def backward(ctx, grad):
            later = tracker.get_states()
            tracker.set_states(ctx.states)
            torch.set_rng_state(ctx.default)
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                run(x).backward(grad)
            tracker.set_states(later)
            return x.grad

    run, states = region(tracker), tracker.get_states()
    x = torch.randn(64, dtype=torch.float64, requires_grad=True)
    grads = []
    for call in (run, Own.apply):
        tracker.set_states(states)
        torch.manual_seed(3)
        grads += torch.autograd.grad(call(x).sum(), x)
    assert torch.equal(*grads)


def first_of(name):
    with tp.get_rng_tracker().fork(name):
        return torch.rand(4)


def test_seeding_alone():
    tp.seed_model_parallel(11)
    assert torch.equal(torch.rand(4), seeded(11, 4))
    assert torch.equal(first_of(DATA), seeded(11, 4))
    assert torch.equal(first_of(MODEL), seeded(11 + 2718, 4))
    assert torch.equal(first_of(EXPERT), seeded(11 + 1024, 4))
    tp.seed_model_parallel(12, tensor_rank=3, expert_rank=2, expert_tensor_rank=1)
    assert torch.equal(first_of(MODEL), seeded(12 + 2718 + 3, 4))
    assert torch.equal(first_of(EXPERT), seeded(12 + 1024 + 201, 4))
    with pytest.raises(ValueError, match="seed -1; expected 0 to"):
        tp.seed_model_parallel(-1)
    # A seed without room for the ranks' own changes nothing.
    tracker = tp.RngTracker(device="cpu")
    tracker.add("a", 1)
    with pytest.raises(ValueError, match=r"seed 18446744073709551615; expected 0 to 2\*\*62 - 1"):
        tp.seed_model_parallel(2**64 - 1, tracker=tracker)
    assert set(tracker.get_states()) == {"a"}


def test_no_seeds_collide_on_any_rank():
    """Trap 4: seed * (rank + 1) * (local_rank + 1) is the same on ranks 2 and 8, four a node."""
    tracker = tp.RngTracker("cpu")
    drawn = {MODEL: set(), EXPERT: set()}
    for tensor in range(16):
        for expert in range(32):
            ranks = {"tensor_rank": tensor, "expert_rank": expert, "expert_tensor_rank": tensor}
            tp.seed_model_parallel(5, tracker=tracker, **ranks)
            for name, numbers in drawn.items():
                with tracker.fork(name):
                    numbers.add(torch.randint(2**62, ()).item())
    inside, experts = drawn.values()
    assert len(inside) == 16
    assert len(experts) == 16 * 32
    assert not inside & experts


def streams_of_a_rank():
    tp.seed_model_parallel(21)
    return torch.rand(4).tolist(), *(first_of(name).tolist() for name in (DATA, MODEL))


def test_ranks_of_a_tensor_group_differ_inside_only():
    ranks = run_ranks(streams_of_a_rank, 4, tensor=2, data=2)
    default, data, inside = zip(*ranks, strict=True)
    assert default == data == default[:1] * 4
    assert inside[:2] == inside[2:]
    assert inside[0] != inside[1]


@on_ranks(2, initialize=False)
def test_seeding_needs_to_know_the_rank():
    with pytest.raises(tp.NotInitializedError):
        tp.seed_model_parallel(1)
    tp.seed_model_parallel(1, tensor_rank=0, expert_rank=0, expert_tensor_rank=0)


@pytest.mark.parametrize("accelerator", [True, False])
@pytest.mark.parametrize("dialect", ["tensor_parallel.random", "model_parallel.random", "mpu"])
def test_megatrons_seed_leaves_the_cpus_stream_where_an_accelerator_is(
    dialect, accelerator, monkeypatch
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    seed = importlib.import_module(f"ezpz_tp.{dialect}").model_parallel_cuda_manual_seed
    try:
        torch.manual_seed(42)
        seed(7)
        drawn = torch.rand(3)
        assert torch.equal(drawn, seeded(42 if accelerator else 7, 3))
        with tp.get_rng_tracker().fork():
            assert torch.equal(torch.rand(3), seeded(7 + 2718, 3))
    finally:
        tp.get_rng_tracker().reset()


def test_alone_it_is_torchs():
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    runs = []

    def function(x, scale, *, weight=weight):
        runs.append(1)
        return (x * weight).sin() * scale, "and anything else"

    plain = torch.autograd.grad(function(x, 2.0)[0].sum(), (x, weight))
    runs.clear()
    with pytest.warns(UserWarning, match=r"distribute_saved_activations=True\) is without effect"):
        y, word = tp.checkpoint(function, True, x, 2.0)
    assert word == "and anything else"
    assert len(runs) == 1
    for found, expected in zip(torch.autograd.grad(y.sum(), (x, weight)), plain, strict=True):
        assert torch.equal(found, expected)
    assert len(runs) == 2

    with torch.no_grad():
        assert tp.checkpoint_activations(torch.sin, torch.zeros(2)).tolist() == [0, 0]


@pytest.mark.slow
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
        seen.append(random.is_checkpointing())
        return x.exp()

    y = tp.checkpoint(function, False, torch.zeros(2, requires_grad=True))
    assert not random.is_checkpointing()
    y.sum().backward()
    assert seen == [True, True]
    assert not random.is_checkpointing()


def two_regions(manager, weights, x, tracker):
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


def test_outputs_that_are_not_freed_or_not_made_again():
    # One that is the input is not freed.
    x = torch.ones(3, requires_grad=True)
    region = CheckpointWithoutOutput(retain_input_tensors=True)
    same, double = region.checkpoint(lambda x: (x.view(3), x * 2), x)
    y = (same * double).sum()
    region.discard_output_and_register_recompute(y)
    assert x.tolist() == [1, 1, 1]
    assert double.untyped_storage().size() == 0
    y.backward()
    assert x.grad.tolist() == [4, 4, 4]
    # What cannot be made again is said.
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


# A torch that was built for CUDA, as the default wheel is, where there is no CUDA device.


@contextlib.contextmanager
def built_for_cuda():
    """Let torch say what the CUDA wheel (2.13.0+cu130) says there."""
    cuda = torch.device("cuda")
    with mock.patch.object(torch._C, "_accelerator_getAccelerator", return_value=cuda):
        assert torch.accelerator.current_accelerator() == cuda
        assert not torch.accelerator.is_available()
        yield


NO_DEVICE = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")


@NO_DEVICE
@on_ranks(2)
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


@NO_DEVICE
def test_a_stream_that_was_saved_on_an_accelerator_is_refused():
    with built_for_cuda(), pytest.raises(tp.ParallelError, match="saved on an accelerator"):
        tp.RngTracker().set_states({"some": torch.zeros(16, dtype=torch.uint8)})
