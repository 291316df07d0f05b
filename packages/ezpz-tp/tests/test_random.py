import importlib
import io
from functools import partial

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ezpz_tp as tp
from ezpz_tp._random import DATA_PARALLEL_RNG, EXPERT_PARALLEL_RNG, MODEL_PARALLEL_RNG
from ezpz_tp.testing import run_ranks

DEVICES = ["cpu"]
if torch.accelerator.is_available():
    DEVICES.append(torch.accelerator.current_accelerator().type)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def tracker(device):
    tracker = tp.RngTracker(device)
    tracker.add(MODEL_PARALLEL_RNG, 7)
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


def test_the_cpu_has_the_stream_too_whatever_the_device(tracker):
    with tracker.fork():
        drawn = torch.rand(4)
    assert torch.equal(drawn, seeded(7, 4))


def test_forks_nest(tracker, device):
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


def test_an_error_inside_a_fork_leaves_it(tracker, device):
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


def test_a_new_tracker_knows_nothing():
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


def test_states_go_through_a_check_point(tracker, device):
    with tracker.fork():
        torch.rand(3, device=device)
    file = io.BytesIO()
    torch.save(tracker.get_states(), file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    assert {state.device.type for state in states.values()} == {"cpu"}
    expected = []
    for name in (MODEL_PARALLEL_RNG, "other"):
        with tracker.fork(name):
            expected.append(torch.rand(4, device=device))
    fresh = tp.RngTracker(device)
    fresh.set_states(states)
    assert fresh.is_initialized()
    for name, values in zip((MODEL_PARALLEL_RNG, "other"), expected, strict=True):
        with fresh.fork(name):
            assert torch.equal(torch.rand(4, device=device), values)


def test_saved_states_do_not_change_later(tracker):
    states = tracker.get_states()
    kept = {name: state.clone() for name, state in states.items()}
    with tracker.fork():
        torch.rand(3)
    assert all(torch.equal(states[name], kept[name]) for name in kept)
    assert not torch.equal(tracker.get_states()[MODEL_PARALLEL_RNG], kept[MODEL_PARALLEL_RNG])


def test_an_accelerators_state_on_the_cpu():
    with pytest.raises(tp.ParallelError, match="has 16 bytes, the CPU's has 5056"):
        tp.RngTracker("cpu").set_states({"some": torch.zeros(16, dtype=torch.uint8)})


def region(tracker):
    def run(x):
        with tracker.fork():
            x = nn.functional.dropout(x, 0.5)
        x = nn.functional.dropout(x.sin(), 0.5)
        with tracker.fork("other"):
            return nn.functional.dropout(x.exp(), 0.5).cos()

    return run


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

    def checked(x):
        contexts = lambda: tp.rng_contexts(tracker)  # noqa: E731
        return torch_checkpoint(run, x, use_reentrant=False, context_fn=contexts)

    for plain, recomputed in zip(train(run), train(checked), strict=True):
        assert torch.equal(plain, recomputed)


def test_recomputation_of_a_region_inside_a_fork(tracker):
    x = torch.randn(64, dtype=torch.float64, requires_grad=True)
    run, states = region(tracker), tracker.get_states()
    grads = []
    for contexts in (None, lambda: tp.rng_contexts(tracker)):
        tracker.set_states(states)
        torch.manual_seed(3)
        with tracker.fork("other"):
            if contexts is None:
                y = run(x)
            else:
                y = torch_checkpoint(run, x, use_reentrant=False, context_fn=contexts)
        grads += torch.autograd.grad(y.sum(), x)
    assert torch.equal(*grads)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_that_would_draw_other_numbers(tracker, use_reentrant):
    x = torch.randn(4, requires_grad=True)
    y = torch_checkpoint(region(tracker), x, use_reentrant=use_reentrant)
    with pytest.raises(tp.ParallelError, match=r"inside a backward pass.*checkpoint_activations"):
        y.sum().backward()
    with tracker.fork():
        pass


def test_a_check_pointing_function_that_restores_the_streams_itself(tracker):
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

    run = region(tracker)
    states = tracker.get_states()
    x = torch.randn(64, requires_grad=True)
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
    assert torch.equal(first_of(DATA_PARALLEL_RNG), seeded(11, 4))
    assert torch.equal(first_of(MODEL_PARALLEL_RNG), seeded(11 + 2718, 4))
    assert torch.equal(first_of(EXPERT_PARALLEL_RNG), seeded(11 + 1024, 4))
    tp.seed_model_parallel(12, tensor_rank=3, expert_rank=2, expert_tensor_rank=1)
    assert torch.equal(first_of(MODEL_PARALLEL_RNG), seeded(12 + 2718 + 3, 4))
    assert torch.equal(first_of(EXPERT_PARALLEL_RNG), seeded(12 + 1024 + 201, 4))
    with pytest.raises(ValueError, match="seed -1; expected 0 to"):
        tp.seed_model_parallel(-1)


def test_no_seeds_collide_on_any_rank():
    """Trap 4: seed * (rank + 1) * (local_rank + 1) is the same on ranks 2 and 8, four a node."""
    tracker = tp.RngTracker("cpu")
    drawn = {MODEL_PARALLEL_RNG: set(), EXPERT_PARALLEL_RNG: set()}
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
    return torch.rand(4).tolist(), *(
        first_of(name).tolist() for name in (DATA_PARALLEL_RNG, MODEL_PARALLEL_RNG)
    )


def test_ranks_of_a_tensor_group_differ_inside_only():
    ranks = run_ranks(streams_of_a_rank, 4, tensor=2, data=2, in_processes=True)
    default, data, inside = zip(*ranks, strict=True)
    assert default == data == default[:1] * 4
    assert inside[:2] == inside[2:]
    assert inside[0] != inside[1]


@on_ranks(2, in_processes=True, initialize=False)
def test_seeding_needs_to_know_the_rank():
    with pytest.raises(tp.NotInitializedError):
        tp.seed_model_parallel(1)
    tp.seed_model_parallel(1, tensor_rank=0, expert_rank=0, expert_tensor_rank=0)


def test_states_within_a_fork_are_those_of_now(device):
    tracker = tp.RngTracker(device=device)
    tracker.add("a", 1)
    with tracker.fork("a"):
        torch.rand(3, device=device)
        states = tracker.get_states()
        expected = torch.rand(3, device=device)
    tracker.set_states(states)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3, device=device), expected)


def test_a_seed_without_room_for_the_ranks_own_changes_nothing():
    tracker = tp.RngTracker(device="cpu")
    tracker.add("a", 1)
    with pytest.raises(ValueError, match=r"seed 18446744073709551615; expected 0 to 2\*\*62 - 1"):
        tp.seed_model_parallel(2**64 - 1, tracker=tracker)
    assert set(tracker.get_states()) == {"a"}


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
