"""Llama over several ranks is Llama on one: loss and every gradient, at every degree."""

import pytest
import torch

import ezpz_spmd
import ezpz_tp
from ezpz.models import Llama, LlamaConfig, huggingface_state_dict, llama_pipeline, load_huggingface
from ezpz_device import count_flops
from ezpz_tp.testing import run_ranks

SIZES = {"dim": 64, "heads": 8, "kv_heads": 4, "hidden": 96}
CONFIG = LlamaConfig(layers=2, **SIZES)
ODD = LlamaConfig(vocab_size=251, layers=2, **SIZES)  # its vocabulary does not divide
DEEP = LlamaConfig(layers=4, **SIZES)


def batch(size=2, length=32, *, uneven=False):
    tokens = torch.randint(251, (size, length + 1), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].contiguous()
    if uneven:  # left out, most of them in what one rank has
        targets[:, 3:8] = targets[:, 28:] = -100
    return tokens[:, :-1].contiguous(), targets


def plain(config, **given):
    """The loss and the gradients, by name, of the model on one rank."""
    model = Llama(config)
    loss = model.loss(*batch(**given))
    loss.backward()
    return loss.item(), {name: one.grad for name, one in model.named_parameters()}


def differences(model, wanted):
    """By how much this rank's gradients differ at most from their parts of the whole ones."""
    found = []
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        place = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
        shard = ezpz_tp.shard_of(parameter)
        for into, start, length in shard.pieces(*place):
            dim = shard.dim or 0
            part = parameter.grad.narrow(dim, into, length)
            found.append((part - wanted[name].narrow(dim, start, length)).abs().max().item())
    return max(found)


def step(config, wanted, options, given):
    """Loss and differences on one rank."""
    model = Llama(config, parallel=True, **options)
    tokens, targets = (model.shard_sequence(each) for each in batch(**given))
    logits = model(tokens)
    degree = ezpz_tp.get_tensor_parallel_world_size()
    assert logits.shape == (*tokens.shape, -(-config.vocab_size // degree))
    loss = model.loss(tokens, targets)
    loss.backward()
    ezpz_tp.finalize_grads(model, average_over="context")
    return loss.item(), differences(model, wanted)


@pytest.mark.parametrize(
    ("config", "ranks", "context", "options"),
    [
        (CONFIG, 2, 1, {}),
        (ODD, 4, 1, {"checkpoint": True}),
        (CONFIG, 2, 1, {"sequence_parallel": True}),
        (ODD, 2, 1, {"sequence_parallel": True, "checkpoint": True}),
        (CONFIG, 2, 2, {}),
        (CONFIG, 2, 2, {"context_parallel": "ulysses", "checkpoint": True}),
        (ODD, 4, 2, {"sequence_parallel": True}),
        (ODD, 4, 2, {"context_parallel": "ulysses"}),
        (CONFIG, 4, 4, {"context_parallel": "unified", "ulysses": 2}),
    ],
    ids=lambda value: {CONFIG: "even", ODD: "odd"}[value] if value in (CONFIG, ODD) else str(value),
)
def test_parallel_is_plain(config, ranks, context, options):
    loss, wanted = plain(config)
    done = run_ranks(step, ranks, config, wanted, options, {}, context=context, timeout=180)
    assert sum(each for each, _ in done) / ranks == pytest.approx(loss, abs=1e-5)
    assert max(difference for _, difference in done) < 1e-6


def test_targets_that_are_left_out_unevenly():
    """The ranks' average is the mean over all tokens that count."""
    loss, wanted = plain(CONFIG, uneven=True)
    done = run_ranks(step, 2, CONFIG, wanted, {}, {"uneven": True}, context=2)
    assert sum(each for each, _ in done) / 2 == pytest.approx(loss, abs=1e-5)
    assert max(difference for _, difference in done) < 1e-6


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}], ids=str)
def test_the_types_of_all_operations_fit(options, context):
    """`ezpz_spmd.check` finds no reduction that is missing, or that is one too many."""

    def checked():
        model = Llama(CONFIG, parallel=True, **options)
        tokens, targets = (model.shard_sequence(each) for each in batch())
        with ezpz_spmd.check(model) as checker:
            model.loss(tokens, targets).backward()
            ezpz_tp.finalize_grads(model, average_over="context")
        ezpz_tp.verify_replicated(model)
        return checker.operations

    assert min(run_ranks(checked, 2 * context, context=context)) > 50


def test_what_is_sent():
    """Forward one all-reduce a half-block, backward as many: not one for each projection."""
    from ezpz_tp.testing import counting

    def count(options):
        model = Llama(CONFIG, parallel=True, **options)
        with counting() as counter:
            model.loss(*batch()).backward()
        return dict(counter)

    halves = 2 * CONFIG.layers
    # Forward the embedding's too, backward the head's; the loss gathers three numbers a token.
    assert run_ranks(count, 2, {})[0] == {"all_reduce": 2 * halves + 2, "all_gather": 1}
    shared = run_ranks(count, 2, {"sequence_parallel": True})[0]
    assert shared["reduce_scatter"] == 2 * halves + 2
    assert "all_reduce" not in shared


@pytest.mark.slow
def test_each_rank_has_its_share_of_the_operations():
    """Attention, projections and the loss's logits are split; nothing is done twice."""

    def count():
        return count_flops(Llama(CONFIG, parallel=True), *batch())

    assert run_ranks(count, 2) == [count_flops(Llama(CONFIG), *batch()) // 2] * 2


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ezpz_tp.DegreeError, match=r"kv_heads=4 is not divisible by .* degree 8"):
        run_ranks(lambda: Llama(CONFIG, parallel=True), 8)


def from_meta(options):
    torch.manual_seed(ezpz_tp.get_tensor_parallel_rank())  # which is nobody's business
    model = Llama(ODD, parallel=True, device="meta", **options)
    model.to_empty(device="cpu")
    model.reset_parameters()
    marked = [bool(getattr(one, "sequence_parallel", False)) for one in model.parameters()]
    return ezpz_tp.gather_state_dict(model), sum(marked)


def test_every_rank_has_its_own_part_of_the_same_weights():
    wanted = Llama(ODD).state_dict()
    for options, norms in (({}, 0), ({"sequence_parallel": True}, 5)):
        for found, marked in run_ranks(from_meta, 2, options):
            assert marked == norms, "to_empty kept what the parameters say"
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], one) for name, one in wanted.items())


@torch.no_grad()
def descend(model):
    for parameter in model.parameters():
        parameter.sub_(parameter.grad)
        parameter.grad = None


def learn(config, degrees, options):
    """Two steps of SGD on a pipeline; the losses, on ranks that have them, and the weights."""
    ezpz_tp.initialize_tensor_parallel(**degrees, embedding=config.tie_embeddings)
    pipeline = llama_pipeline(config, microbatches=2, **options)
    tokens, targets = (pipeline.shard_sequence(each) for each in batch(4))
    losses = []
    for _ in range(2):
        found = pipeline.step(tokens, targets)
        ezpz_tp.finalize_grads(pipeline.module, average_over=("data", "context"))
        ezpz_tp.clip_grad_norm_(pipeline.module.parameters(), 1.0)
        descend(pipeline.module)
        losses.append(None if found is None else found.mean().item())
    return losses, ezpz_tp.gather_state_dict(pipeline.module)


@pytest.mark.parametrize(
    ("axis", "tied", "options"),
    [
        ("tensor", False, {"sequence_parallel": True}),
        ("tensor", True, {"sequence_parallel": True, "schedule": "interleaved", "virtual": 2}),
        ("context", True, {}),
    ],
    ids=str,
)
def test_a_pipeline_is_the_whole_model(axis, tied, options):
    config = LlamaConfig(layers=4, tie_embeddings=tied, **SIZES)
    model = Llama(config)
    expected = []
    for _ in range(2):
        loss = model.loss(*batch(4))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        descend(model)
        expected.append(loss.item())
    degrees = {"pipeline_parallel_size": 2, f"{axis}_parallel_size": 2}
    done = run_ranks(learn, 4, config, degrees, options, timeout=180, initialize=False)
    losses = [found for found, _ in done if None not in found]
    assert len(losses) == 2
    # Of context-parallel ranks each has the loss of its part.
    means = [sum(each) / 2 for each in zip(*losses, strict=True)]
    assert means == pytest.approx(expected, abs=1e-5)
    if axis == "tensor":
        assert losses[0] == losses[1]
    wanted = model.state_dict()
    for _, weights in done:
        assert weights.keys() == wanted.keys()
        for name, one in wanted.items():
            torch.testing.assert_close(weights[name], one, atol=1e-5, rtol=0)


def of_chunks():
    pipeline = llama_pipeline(DEEP, microbatches=2, schedule="interleaved", virtual=2)
    load_huggingface(pipeline.module, huggingface_state_dict(Llama(DEEP, seed=3)))
    return huggingface_state_dict(pipeline.module)


def test_the_chunks_of_a_pipeline_load_their_layers():
    """From Hugging Face's names, which the chunks' are once `model.` is put before them."""
    wanted = huggingface_state_dict(Llama(DEEP, seed=3))
    for found in run_ranks(of_chunks, 4, tensor=2, pipeline=2, timeout=180):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], one) for name, one in wanted.items())
