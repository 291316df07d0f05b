import re
from functools import partial

import pytest
import torch
from on_ranks import all_raise, on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ezpz_tp as tp
from ezpz_tp.testing import counting, run_ranks

LAYERS, WIDTH, BATCH = 6, 5, 12

# Ranks, schedule, chunks a rank, microbatches.
PLANS = [
    (2, "gpipe", 1, 1),
    (3, "gpipe", 1, 2),
    (2, "1f1b", 1, 2),
    (3, "1f1b", 1, 6),
    (2, "interleaved", 2, 4),
    (2, "interleaved", 3, 1),
    (2, "interleaved", 2, 3),
    (3, "interleaved", 2, 6),
]


class Layer(nn.Module):
    """Depends on nothing but its number, so that any split of the model is the same model."""

    def __init__(self, number):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        weight = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(weight / WIDTH**0.5)

    def forward(self, hidden):
        return (hidden @ self.weight).tanh()


class Part(nn.Module):
    def __init__(self, layers, first, last, between="one"):
        super().__init__()
        self.first, self.last, self.between = first, last, between
        self.layers = nn.ModuleDict({str(number): Layer(number) for number in layers})
        if between == "frozen" and first:
            self.requires_grad_(False)

    def forward(self, hidden, *more):
        if self.between == "two" and more:
            hidden = hidden + more[0]
        elif self.between == "numbers" and not self.first:
            assert more[0].tolist() == [1, 2]
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.last:
            return hidden
        if self.between == "turned":
            return hidden.t().contiguous().t()
        if self.between == "numbers":
            return hidden, torch.tensor([1, 2])
        # One chunk's second output is used by the next one only.
        return (hidden, hidden * 0.5) if self.between == "two" else hidden


def mean_square(output, target):
    return (output - target).square().mean()


def assert_close(gradients, wanted, rtol=1e-11, atol=1e-13):
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=rtol, atol=atol)


def gradients_of(module):
    return {name: one.grad for name, one in module.named_parameters()}


def batch(rows=BATCH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64).unbind()


def pipeline_of(plan, **options):
    _, schedule, virtual, microbatches = plan
    settings = {"layers": LAYERS, "microbatches": microbatches, "loss": mean_square}
    settings |= {"schedule": schedule, "virtual": virtual, **options}
    return tp.Pipeline(settings.pop("build", Part), **settings)


def on(plan, function, *args):
    how = {"pipeline": plan[0], "tensor": 1, "data": 1, "timeout": 120}
    return run_ranks(function, plan[0], plan, *args, **how)


def train(plan):
    asked = []

    def build(layers, first, last):
        asked.append((layers, first, last))
        return Part(layers, first, last)

    pipeline = pipeline_of(plan, build=build)
    losses = []
    for seed in (0, 1):
        inputs, targets = batch(seed=seed)
        given = inputs if pipeline.is_first else None, targets if pipeline.is_last else None
        losses.append(pipeline.step(*given))
    gradients = gradients_of(pipeline.module)
    assert set(pipeline.module.state_dict()) == set(gradients)
    assert pipeline.layers == tuple(layers for layers, _, _ in asked)
    assert pipeline.is_first == asked[0][1]
    assert pipeline.is_last == asked[-1][2]
    return asked, losses, gradients


def whole_model(seeds=(0, 1)):
    model, losses = Part(range(LAYERS), True, True), []
    for seed in seeds:
        inputs, targets = batch(seed=seed)
        loss = mean_square(model(inputs), targets)
        loss.backward()
        losses.append(loss.item())
    return losses, gradients_of(model)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_step_gives_the_whole_models_losses_and_gradients(plan):
    ranks, _, virtual, microbatches = plan
    wanted_losses, wanted = whole_model()
    split = tp.split_layers(LAYERS, ranks * virtual)
    results = on(plan, train)
    for rank, (asked, losses, gradients) in enumerate(results):
        assert asked == [(own, own.start == 0, own.stop == LAYERS) for own in split[rank::ranks]]
        if rank < ranks - 1:
            assert losses == [None, None]
        else:
            assert [one.shape for one in losses] == [(microbatches,)] * 2
            assert not losses[0].requires_grad
            assert [one.mean().item() for one in losses] == pytest.approx(wanted_losses, rel=1e-12)
        assert_close(gradients, wanted)
    assert sum(len(gradients) for _, _, gradients in results) == LAYERS


@on_ranks(3, pipeline=3)
def test_schedules_keep_as_many_activations_as_they_should():
    """GPipe all microbatches, 1F1B as many as there are stages from a rank to the last."""
    now, most = [0], [0]

    class Counted(Part):
        def forward(self, hidden):
            hidden = super().forward(hidden)
            now[0] += 1
            most[0] = max(most[0], now[0])
            hidden.register_hook(lambda _: now.__setitem__(0, now[0] - 1))
            return hidden

    for name, expected in (("gpipe", [6, 6, 6]), ("1f1b", [3, 2, 1])):
        pipeline = pipeline_of((3, name, 1, 6), build=Counted)
        pipeline.step(*batch())
        now[0] = most[0] = 0  # the first step's trial went forward only
        pipeline.step(*batch())
        assert most[0] == expected[tp.get_state().rank]


@pytest.mark.parametrize("plan", [PLANS[2], PLANS[4]], ids=str)
@on_ranks(2, pipeline=2)
def test_what_chunks_may_hand_on(plan):
    """A transposed tensor, one of integers, several of them, one that needs no gradient."""
    split = tp.split_layers(LAYERS, plan[0] * plan[2])
    last = len(split) - 1
    for between in ("turned", "numbers", "two", "frozen"):
        parts = (Part(own, n == 0, n == last, between) for n, own in enumerate(split))
        model = nn.Sequential(*parts)
        value, targets = batch()
        for part in model:
            value = part(*value) if isinstance(value, tuple) else part(value)
        mean_square(value, targets).backward()
        wanted = {name.partition(".")[2]: grad for name, grad in gradients_of(model).items()}
        pipeline = pipeline_of(plan, build=partial(Part, between=between))
        pipeline.step(*batch())
        assert_close(gradients_of(pipeline.module), wanted)


class Noisy(nn.Module):
    """Draws from both kinds of random streams, and counts how often it ran."""

    def __init__(self, layers, first, last):
        super().__init__()
        self.part, self.norm = Part(layers, first, last), nn.BatchNorm1d(WIDTH).double()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, hidden):
        self.runs = self.runs + 1  # another tensor in its place
        hidden = nn.functional.dropout(self.norm(self.part(hidden)))
        with tp.get_rng_tracker().fork():
            return nn.functional.dropout(hidden)


@on_ranks(2, pipeline=2)
def test_the_trial_leaves_no_trace():
    """The first step, which has one, is as the second: random numbers, buffers and all."""
    pipeline = pipeline_of(PLANS[2], build=Noisy)

    def state():
        return {name: one.clone() for name, one in pipeline.module.state_dict().items()}

    before, found = state(), []
    for _ in range(2):
        tp.seed_model_parallel(3)
        losses, after, drawn = pipeline.step(*batch()), state(), torch.rand(4)
        with tp.get_rng_tracker().fork():
            found.append((losses, after, drawn, torch.rand(4)))
        pipeline.module.load_state_dict(before)
    first, second = found
    assert (first[0] is None) == pipeline.is_first
    assert first[1]["norm.num_batches_tracked"] == first[1]["runs"] == 2
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def evaluated(plan):
    pipeline = pipeline_of(plan)
    before = pipeline.evaluate(*batch())
    assert all(one.grad is None for one in pipeline.module.parameters())
    stepped = pipeline.step(*batch())
    gradients = [one.grad.clone() for one in pipeline.module.parameters()]
    larger = pipeline.evaluate(*batch(2 * BATCH))
    after = [one.grad for one in pipeline.module.parameters()]
    assert all(map(torch.equal, gradients, after))
    return before, stepped, larger


@pytest.mark.parametrize("plan", [PLANS[3], PLANS[4]], ids=str)
def test_evaluation(plan):
    model = Part(range(LAYERS), True, True)
    inputs, targets = batch(2 * BATCH)
    before, stepped, larger = on(plan, evaluated)[-1]
    assert torch.equal(before, stepped)
    assert larger.mean().item() == pytest.approx(mean_square(model(inputs), targets).item())


def alone():
    """What a loop over microbatches gives, to the last bit."""
    model = Part(range(LAYERS), True, True)
    inputs, targets = batch()
    losses = []
    for one, target in zip(inputs.chunk(4), targets.chunk(4), strict=True):
        loss = mean_square(model(one), target)
        (loss / 4).backward()
        losses.append(loss.item())
    for schedule, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        pipeline = pipeline_of((1, schedule, virtual, 4))
        with counting() as counter:
            found = pipeline.step(inputs, targets)
            assert torch.equal(pipeline.evaluate(inputs, targets), found)
        assert not counter
        assert found.tolist() == losses
        assert pipeline.layers == (range(LAYERS),)
        assert pipeline.is_first
        assert pipeline.is_last
        for one, other in zip(pipeline.module.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def test_a_pipeline_of_one_rank_is_gradient_accumulation():
    alone()  # before anything is initialized
    run_ranks(alone, 2, tensor=2)


def test_batches_of_several_tensors():
    def loss(output, target, weight):
        return ((output - target) * weight).square().mean()

    inputs, targets = batch()
    pipeline = pipeline_of((1, "gpipe", 1, 2), build=partial(Part, between="two"), loss=loss)
    found = pipeline.step((inputs, inputs), (targets, targets)).mean().item()
    output = Part(range(LAYERS), True, True)(2 * inputs)
    assert found == pytest.approx(loss(output, targets, targets).item())


@on_ranks(2, pipeline=2)
def test_ranges_of_ones_own_and_activations_of_sixteen_bits():
    wanted_losses, wanted = whole_model(seeds=(0,))
    pipeline = pipeline_of(PLANS[2], layers=[range(1), range(1, 6)])
    pipeline.step(*batch())
    assert pipeline.layers == ((range(1) if pipeline.is_first else range(1, 6)),)
    assert_close(gradients_of(pipeline.module), wanted)

    seen = set()  # under autocast activations are bf16 between the chunks, and weights are not

    class Watched(Part):
        def forward(self, hidden):
            seen.add(hidden.dtype)
            return super().forward(hidden)

    pipeline = pipeline_of(PLANS[2], build=Watched)
    pipeline.module.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = pipeline.step(*(one.float() for one in batch()))
    assert seen == {torch.float32 if pipeline.is_first else torch.bfloat16}
    assert {one.grad.dtype for one in pipeline.module.parameters()} == {torch.float32}
    if losses is not None:
        assert losses.mean().item() == pytest.approx(wanted_losses[0], rel=0.02)


@on_ranks(4, pipeline=2, data=2)
def test_chunks_that_fsdp2_shards():
    _, wanted = whole_model(seeds=(0,))
    state = tp.get_state()
    mesh = state.to_mesh("cpu")["dp"]
    pipeline = pipeline_of(PLANS[2], build=lambda **of: fully_shard(Part(**of), mesh=mesh))
    mine = slice(state.index("data"), None, 2)
    pipeline.step(*(one[mine] for one in batch()))
    found = gradients_of(pipeline.module)
    assert_close({name: one.full_tensor() for name, one in found.items()}, wanted)


@pytest.mark.parametrize("plan", [PLANS[2], PLANS[4]], ids=str)
@on_ranks(2, pipeline=2)
def test_shapes_may_change_once_they_are_forgotten(plan):
    """Thawed layers, other shapes, other numbers."""
    inputs, targets = (one.float() for one in batch(2 * BATCH))
    model = Part(range(LAYERS), True, True).float()
    mean_square(model(inputs), targets).backward()
    pipeline = pipeline_of(plan, build=partial(Part, between="frozen"))
    pipeline.step(*batch())
    pipeline.module.requires_grad_(True)
    pipeline.module.float().zero_grad()
    pipeline.forget_shapes()
    pipeline.step(inputs, targets)
    assert_close(gradients_of(pipeline.module), gradients_of(model), rtol=1e-4, atol=1e-6)


@on_ranks(2, pipeline=2)
def test_a_ranks_chunks_are_one_module_with_the_whole_models_names():
    pipeline = pipeline_of(PLANS[4])
    module = pipeline.module
    kept = {name: one.clone() for name, one in module.state_dict().items()}
    assert set(kept) == {f"layers.{n}.weight" for own in pipeline.layers for n in own}
    for one in module.parameters():
        one.data.zero_()
    assert str(module.load_state_dict(kept)) == "<All keys matched successfully>"
    assert all(torch.equal(one, kept[name]) for name, one in module.named_parameters())
    module.float()
    assert all(one.dtype == torch.float32 for one in module.parameters())
    module.eval()
    assert not any(one.training for one in module.modules())
    (name, *_), extra = kept, {"head.weight": torch.ones(1)}
    told = rf"2 chunks: missing are {re.escape(name)}; unexpected are head\.weight"
    with pytest.raises(RuntimeError, match=told):
        module.load_state_dict({key: kept[key] for key in kept if key != name} | extra)


def odd(answer, **of):
    part = Part(**of)
    part.register_forward_hook(lambda _part, _given, output: answer(output))
    return part


def stepped(inputs=None, targets=None, plan=PLANS[2], **options):
    usual = batch()
    inputs, targets = usual[0] if inputs is None else inputs, targets or usual[1]
    pipeline_of(plan, **options).step(inputs, targets)


def answered(answer):
    stepped(build=partial(odd, answer))


def changed():
    pipeline = pipeline_of(TWO)
    pipeline.step(*batch())
    pipeline.step(*batch(2 * BATCH))


def other_precision(_):
    """The first chunk's weights change, and its inputs do not."""
    pipeline = pipeline_of(TWO, build=partial(odd, lambda hidden: hidden.to(wanted[0])))
    wanted = [torch.float64]
    pipeline.step(*batch())
    wanted[0] = torch.float32
    pipeline.step(*batch())


def with_ddp():
    group = tp.get_data_parallel_group()
    stepped(build=lambda **of: DistributedDataParallel(Part(**of), process_group=group))


def numbered_from_0(layers, **_):
    return nn.Sequential(*map(Layer, layers))


TWO, TWICE, FIRST, LAST, BOTH = PLANS[2], PLANS[4], (0,), (1,), (0, 1)
# On which ranks, what is done, and what it is told: before the other rank waits for anything.
BAD = [
    (BOTH, lambda: stepped(plan=TWICE, build=numbered_from_0),
     r"chunk 1 of this rank has another 0\.weight"),
    (BOTH, lambda: pipeline_of(TWO).step(*batch(7)),
     r"inputs of shape \(7, 5\) for 2 microbatches.*multiple"),
    (BOTH, lambda: stepped({"tokens": batch()[0]}),
     r"inputs are a dict that holds a str; expected a tens"),
    (BOTH, lambda: stepped(targets=[1.0, 2.0]),
     r"targets are a list that holds a float; expected a tensor"),
    (BOTH, with_ddp, r"returned DistributedDataParallel; .*average_over"),
    (BOTH, changed, r"inputs are \(12, 5\) of torch\.float64; expected .* \(6, 5\)"),
    (FIRST, lambda: pipeline_of(TWO).step(None, batch()[1]),
     r"no inputs on a rank that has the first chunk"),
    (LAST, lambda: pipeline_of(TWO).step(batch()[0], None),
     r"no targets on a rank that has the last chunk"),
    (FIRST, lambda: answered(lambda hidden: {"hidden": hidden}),
     r"chunk 0 of 2 returned dict; expected a tensor"),
    (FIRST, lambda: answered(lambda hidden: hidden + 1j),
     r"a tensor of torch\.complex128; expected one"),
    (FIRST, lambda: answered(lambda hidden: [hidden] * 20),
     r"returned 20 tensors, whose shapes are 101 numbers"),
]  # fmt: skip


@on_ranks(2, pipeline=2)
def test_bad_use_is_one_clear_error():
    for ranks, use, told in BAD:
        if tp.get_state().rank in ranks:
            with pytest.raises(tp.ParallelError, match=told):
                use()


def test_an_error_in_the_middle_of_a_schedule_is_raised_as_it_is():
    told = r"chunk 0 of 2 returned .*float32 .*; expected.*float64.*forget_shapes"
    with pytest.raises(tp.ParallelError, match=told):
        on(TWO, other_precision)


def test_a_loss_that_is_no_number():
    for loss, told in (
        (lambda one, other: (one - other).mean(-1), r"a tensor of shape \(6,\); expected a 0-dim"),
        (lambda one, other: 0.5, "float; expected a 0-dim tensor"),
    ):
        with pytest.raises(tp.ParallelError, match=f"loss returned {told}"):
            stepped(plan=(1, "gpipe", 1, 2), loss=loss)


pipeline_with = partial(pipeline_of, (2, "1f1b", 1, 4))
INTERLEAVED = {"schedule": "interleaved", "virtual": 2}


@pytest.mark.parametrize(
    ("ranks", "options", "told"),
    [
        (2, {"layers": 3, **INTERLEAVED}, "3 layers for 4 stages"),
        (2, {"schedule": "zigzag"}, "schedule 'zigzag'; expected one of gpipe, 1f1b, inter"),
        (2, {"schedule": "interleaved"}, "virtual=1 chunks a rank; expected 2 or more"),
        (2, {"virtual": 2}, r"'1f1b' with virtual=2 chunks a rank; expected 1"),
        (2, {"microbatches": 0}, "microbatches=0; expected at least 1"),
        (2, {"microbatches": 1}, "1 microbatches in a pipeline of 2 ranks; expected at least"),
        (
            *(2, {"microbatches": 5, **INTERLEAVED}),
            "5 microbatches in a pipeline of 2 ranks; expected a multiple of the 2 rounds",
        ),
        (1, {"layers": [range(3), range(3, 6)]}, "layers has 2 ranges; expected 1"),
        (1, {"layers": [range(1, 6)]}, r"range\(1, 6\) where layer 0 is next"),
    ],
)
def test_plans_that_do_not_fit(ranks, options, told):
    refused = partial(pipeline_with, **options)
    all_raise(ranks, refused, tp.DegreeError, told, pipeline=ranks, tensor=1)


def test_no_stages_and_no_module():
    with pytest.raises(tp.DegreeError, match="0 stages; expected at least 1"):
        tp.split_layers(4, 0)
    told = r"layers=range\(0, 6\), first=True.* returned NoneType"
    with pytest.raises(tp.ParallelError, match=told):
        pipeline_of((1, "gpipe", 1, 1), build=lambda **of: None)


@on_ranks(2, initialize=False)
def test_several_ranks_without_groups():
    with pytest.raises(tp.NotInitializedError, match="initialize_tensor_parallel"):
        pipeline_of((2, "gpipe", 1, 1))
