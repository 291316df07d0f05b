"""Sharded logits against `torch.nn.functional.cross_entropy` of the full ones."""

from functools import partial

import pytest
import torch
from on_ranks import MemoryWatch, all_raise, on_ranks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ezpz_tp as tp
from ezpz_tp.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from ezpz_tp.testing import counting, run_ranks

IGNORED = -100
TOKENS = (5, 2)
EVERYTHING = {"label_smoothing": 0.1, "z_loss": 0.1, "chunk_size": 3}


def drawn(columns, vocab_size, dtype=torch.float64, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*TOKENS, columns, dtype=torch.float64, generator=generator) * scale
    target = torch.randint(0, vocab_size, TOKENS, generator=generator)
    target[1, 1] = target[3, 0] = IGNORED
    grad = torch.randn(TOKENS, dtype=torch.float64, generator=generator)
    return logits.to(dtype), target, grad


def unsharded(logits, target, grad, vocab_size, *, label_smoothing=0.0, z_loss=0.0):
    full = logits.double().clone().requires_grad_()
    valid = full[..., :vocab_size]
    loss = functional.cross_entropy(
        valid.reshape(-1, vocab_size),
        target.reshape(-1),
        reduction="none",
        label_smoothing=label_smoothing,
    ).view(target.shape)
    loss = loss + z_loss * valid.logsumexp(-1).square() * (target != IGNORED)
    loss.backward(grad)
    return loss.detach(), full.grad


def own_part(logits, dim=-1):
    state = tp.get_state()
    parts = logits.chunk(state.size("tensor"), dim)
    return parts[state.index("tensor")].clone().requires_grad_()


def sharded(logits, target, grad, options):
    shard = own_part(logits)
    before = shard.detach().clone()
    with counting() as forward:
        loss = tp.vocab_parallel_cross_entropy(shard, target, **options)
    given = grad.to(loss.dtype)
    kept = given.clone()
    with counting() as backward:
        loss.backward(given)
    assert torch.equal(shard.detach().nan_to_num(), before.nan_to_num()), "logits changed"
    assert torch.equal(given, kept), "gradient changed"
    return loss.detach(), shard.grad, dict(forward), dict(backward)


def compare(degree, data, vocab_size, tolerance, **options):
    logits, target, grad = data
    wanted = {k: v for k, v in options.items() if k in {"label_smoothing", "z_loss"}}
    loss, full_grad = unsharded(logits, target, grad, vocab_size, **wanted)
    if vocab_size != logits.shape[-1]:
        options["vocab_size"] = vocab_size
    ranks = run_ranks(sharded, degree, logits, target, grad, options)
    for own, own_grad, forward, backward in ranks:
        assert own.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
        assert own_grad.dtype == logits.dtype
        assert torch.equal(own, ranks[0][0]), "ranks disagree"
        assert forward == ({"all_gather": 1} if degree > 1 else {})
        assert backward == {}
    torch.testing.assert_close(ranks[0][0].double(), loss, **tolerance["loss"])
    got = torch.cat([rank[1] for rank in ranks], -1).double()
    torch.testing.assert_close(got, full_grad, **tolerance["grad"])
    assert not got[..., vocab_size:].any(), "padding has a gradient"
    assert not got[1, 1].any(), "an ignored token has a gradient"


def within(loss, grad):
    return {"loss": {"rtol": loss, "atol": loss}, "grad": {"rtol": grad, "atol": grad}}


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
@pytest.mark.parametrize("vocab_size", [24, 23, 13], ids="V{}".format)
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, EVERYTHING], ids=str
)
def test_loss_and_gradient_in_double_precision(degree, vocab_size, options):
    """Trap 10: smoothing is over the whole vocabulary; a shard's mean differs between ranks."""
    logits, target, grad = drawn(24, vocab_size)
    logits[..., :12] += 2
    data = logits, target, grad
    compare(degree, data, vocab_size, within(1e-12, 1e-12), **options)


@pytest.mark.parametrize(
    ("dtype", "grad"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-10)]
)
def test_lower_precision_computes_in_float32(dtype, grad):
    data, options = drawn(24, 23, dtype), {"label_smoothing": 0.1, "z_loss": 1e-3}
    for chunk_size in (None, 1, 3, 100):
        compare(2, data, 23, within(1e-6, grad), **options, chunk_size=chunk_size)


def test_large_masked_and_nan_logits():
    # The target's logit less the maximum is exact; less the logsumexp it is not.
    logits, target, grad = drawn(24, 24, torch.float32)
    compare(2, (logits + 1000, target, grad), 24, within(1e-6, 1e-6))
    compare(2, (logits * 1e30, target, grad), 24, within(1e-6, 1e-6))
    # Masked, as the layers leave padding; here a whole shard of it.
    logits, target, grad = drawn(24, 5, torch.float32)
    logits[..., 5:] = -torch.inf
    compare(4, (logits, target, grad), 24, within(1e-6, 1e-6))
    compare(4, (logits, target, grad), 5, within(1e-6, 1e-6), label_smoothing=0.1)
    # NaN reaches every rank.
    logits, target, grad = drawn(24, 24, torch.float32)
    logits[0, 0, 20] = torch.nan
    for loss, *_ in run_ranks(sharded, 2, logits, target, grad, {}):
        assert loss[0, 0].isnan()
        assert loss[0, 1].isfinite()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_alone_it_is_torchs_bit_for_bit(dtype, smoothing):
    logits, target, grad = drawn(24, 24, dtype)
    options = {"label_smoothing": smoothing}
    ((loss, own_grad, *_),) = run_ranks(sharded, 1, logits, target, grad, options)
    full = logits.requires_grad_()
    flat = full.view(-1, 24), target.view(-1)
    expected = functional.cross_entropy(*flat, reduction="none", **options)
    expected.backward(grad.to(dtype).view(-1))
    assert torch.equal(loss, expected.detach().view(TOKENS))
    assert torch.equal(own_grad, full.grad)


@on_ranks(2)
def test_shapes():
    generator = torch.Generator().manual_seed(0)
    for shape in ((), (0,), (3,), (2, 1, 3, 2)):
        logits = torch.randn(*shape, 6, generator=generator)
        target = torch.randint(0, 6, shape, generator=generator)
        loss, grad, *_ = sharded(logits, target, torch.ones(shape), {})
        assert loss.shape == target.shape
        assert grad.shape == (*shape, 3)
    logits = torch.randn(6, 4, 3, generator=generator)
    target = torch.randint(0, 6, (3, 4), generator=generator)
    loss = tp.vocab_parallel_cross_entropy(own_part(logits, 0).permute(2, 1, 0), target)
    loss.sum().backward()  # one number for all: an expanded gradient
    wanted = functional.cross_entropy(logits.permute(2, 1, 0).reshape(-1, 6), target.view(-1))
    torch.testing.assert_close(loss.mean(), wanted)


def test_another_ignore_index_that_is_in_the_vocabulary():
    logits, target, grad = drawn(24, 24)
    target[0, 0] = 3
    expected = unsharded(logits, target.masked_fill(target == 3, IGNORED), grad, 24)
    target[target == IGNORED] = 3
    ranks = run_ranks(sharded, 2, logits, target, grad, {"ignore_index": 3})
    found = ranks[0][0], torch.cat([rank[1] for rank in ranks], -1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_backward_twice_and_what_is_saved():
    # Backward twice, and no second derivative.
    logits, target, _ = drawn(8, 8)
    shard = own_part(logits)
    loss = tp.vocab_parallel_cross_entropy(shard, target).sum()
    loss.backward(retain_graph=True)
    once = shard.grad.clone()
    loss.backward()
    assert torch.equal(shard.grad, 2 * once)
    loss = tp.vocab_parallel_cross_entropy(shard, target).sum()
    with pytest.raises(tp.ParallelError, match="no second derivative"):
        torch.autograd.grad(loss, shard, create_graph=True)
    # Little is saved besides the logits.
    logits, target, _ = drawn(2000, 2000, torch.bfloat16)
    shard, saved = own_part(logits), []

    def note(tensor):
        if tensor.data_ptr() != shard.data_ptr():
            saved.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        tp.vocab_parallel_cross_entropy(shard, target)
    assert sum(saved) <= 32 * target.numel()


@pytest.mark.slow
@on_ranks(2)
def test_compiled_whole_and_recomputed():
    logits, target, grad = drawn(24, 19)
    shard = own_part(logits)

    def run(function):
        shard.grad = None
        loss = function(shard * 2, target, **EVERYTHING, vocab_size=19)
        loss.backward(grad)
        return loss.detach(), shard.grad

    eager = run(tp.vocab_parallel_cross_entropy)
    traced = torch.compile(tp.vocab_parallel_cross_entropy, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(traced), eager, rtol=1e-14, atol=1e-14)
    with counting() as counter:
        recomputed = run(partial(checkpoint, tp.vocab_parallel_cross_entropy, use_reentrant=False))
    assert counter == {"all_gather": 2}
    assert all(map(torch.equal, recomputed, eager))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_autocast_changes_nothing(dtype):
    logits, target, _ = drawn(24, 24, dtype)
    shard = own_part(logits)
    with torch.autocast("cpu", torch.bfloat16):
        loss = tp.vocab_parallel_cross_entropy(shard, target)
    loss.sum().backward()
    assert loss.dtype == torch.float32
    assert torch.equal(loss, tp.vocab_parallel_cross_entropy(shard, target))
    assert shard.grad.dtype == dtype


@pytest.mark.parametrize(("chunk", "tokens"), [({}, 10), ({"chunk_size": 2}, 2)], ids=str)
@on_ranks(2)
def test_chunks_bound_the_float32_working_memory(chunk, tokens):
    logits, target, _ = drawn(2000, 1990, torch.bfloat16)
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "vocab_size": 1990, **chunk}
    with MemoryWatch() as memory:
        tp.vocab_parallel_cross_entropy(own_part(logits), target, **options).sum().backward()
    assert memory.largest_float32 == tokens * (1000, 990)[tp.get_tensor_parallel_rank()]


def of_linear(input_, weight, target, grad, vocab_size, options):
    """Loss and gradients of a rank's part of the output layer, beside those of all of it."""
    loss, by_logits = unsharded(input_ @ weight.T, target, grad, vocab_size, **options)
    expected = loss, by_logits @ weight, by_logits.flatten(0, 1).T @ input_.flatten(0, 1)
    sequence_parallel = tp.get_tensor_parallel_world_size() == 5
    own, rows = input_.clone().requires_grad_(), own_part(weight, 0)
    if sequence_parallel:
        own = own_part(input_, 0)
    options = {**options, "vocab_size": vocab_size, "sequence_parallel": sequence_parallel}
    found = tp.vocab_parallel_linear_cross_entropy(own, rows, target, **options, chunk_size=3)
    found.backward(grad)
    by_input, by_weight = (own_part(each, 0) for each in expected[1:])
    if not sequence_parallel:
        by_input = expected[1]
    torch.testing.assert_close(found, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.grad, by_input.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rows.grad, by_weight.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}], ids=str)
@pytest.mark.parametrize("degree", [1, 2, 5])  # 5: with a sequence that is split
def test_with_the_output_layer(degree, options):
    weight, target, grad = drawn(20, 18)
    weight, input_ = weight.view(20, 10)[:, :7], drawn(7, 18, seed=1)[0]
    run_ranks(of_linear, degree, input_, weight, target, grad, 18, options)


@pytest.mark.parametrize("autocast", [False, True])
@on_ranks(2)
def test_with_the_output_layer_in_lower_precision(autocast):
    """The logits of the few tokens of a chunk exist at a time; sums are of float32."""
    dtype = torch.float32 if autocast else torch.bfloat16
    input_, target, _ = drawn(8, 2000, dtype)
    weight = own_part(drawn(2000, 2000, seed=2)[0].reshape(-1)[:16_000].view(2000, 8), 0)
    weight = weight.detach().to(dtype).requires_grad_()
    plain = weight.detach().clone().requires_grad_()
    input_.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), MemoryWatch() as memory:
        loss = tp.vocab_parallel_linear_cross_entropy(input_, weight, target, chunk_size=2)
        loss.mean().backward()
    assert memory.largest_float32 == 8000, "the gradient of the weight; two tokens are 2000"
    assert memory.peak < 80_000, "the logits of all tokens are 40,000"
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = functional.linear(input_.detach(), plain)
        tp.vocab_parallel_cross_entropy(logits, target).mean().backward()
    torch.testing.assert_close(weight.grad, plain.grad, rtol=2e-2, atol=1e-4)


LOGITS, TARGET = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
WRONG = {
    "shape": ((LOGITS, TARGET[:2]), {}, ValueError, r"logits \(3, 4\) and target \(2,\)"),
    "dtype": ((LOGITS, TARGET.int()), {}, ValueError, "target is torch.int32"),
    "logits": ((LOGITS.long(), TARGET), {}, ValueError, "logits are torch.int64"),
    "device": ((LOGITS, TARGET.to("meta")), {}, ValueError, "target on meta"),
    "high": ((LOGITS, TARGET + 8), {}, IndexError, r"target 8 at \[0\]; expected 0 to 7"),
    "low": ((LOGITS, TARGET - 1), {}, IndexError, "target -1"),
    "padding": ((LOGITS, TARGET + 6), {"vocab_size": 6}, IndexError, "expected 0 to 5"),
    "ignore": ((LOGITS, TARGET - 100), {"ignore_index": -1}, IndexError, "ignore_index=-1"),
    "vocab": ((LOGITS, TARGET), {"vocab_size": 9}, tp.DegreeError, "vocab_size=9; expected 1 to 8"),
    "smooth": ((LOGITS, TARGET), {"label_smoothing": 1.5}, ValueError, "label_smoothing=1.5"),
    "chunk": ((LOGITS, TARGET), {"chunk_size": 0}, ValueError, "chunk_size=0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input(case):
    args, options, error, message = WRONG[case]
    refused = partial(tp.vocab_parallel_cross_entropy, *args, **options)
    all_raise(2, refused, error, message)


def test_a_weight_that_does_not_fit():
    with pytest.raises(ValueError, match=r"input \(3, 4\) .* and weight \(8, 5\)"):
        tp.vocab_parallel_linear_cross_entropy(LOGITS, torch.zeros(8, 5), TARGET)


def test_a_bad_target_where_nobody_can_look_first():
    """As on a device: the index itself is refused, on every rank."""
    target = torch.tensor([9, 0, 0]).as_subclass(Uninspected)
    with pytest.raises(RuntimeError, match="out of bounds"):
        run_ranks(lambda: tp.vocab_parallel_cross_entropy(LOGITS, target), 2)


class Uninspected(torch.Tensor):
    """A target that is not looked at, as one on a device."""


def test_megatrons_steps_make_its_loss_and_change_nothing():
    logits, target, grad = drawn(8, 8, torch.float32)
    target = target.clamp(min=0)
    expected, gradient = unsharded(logits, target, grad, 8)
    halves, steps = logits.chunk(2, -1), VocabParallelCrossEntropy
    kept = logits.clone()
    wide = [steps.calculate_logits_max(half.contiguous()) for half in halves]
    most = torch.stack([most for _, most in wide]).amax(0)
    made = [
        steps.calculate_predicted_logits(each, target, most, 4 * rank, 4 * rank + 4)
        for rank, (each, _) in enumerate(wide)
    ]
    predicted, total = (made[0][i] + made[1][i] for i in (2, 3))
    for rank, (foreign, column, _, _, exponentials) in enumerate(made):
        softmax, loss = steps.calculate_cross_entropy_loss(exponentials, predicted, total)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
        for _ in range(2):  # the saved softmax serves a second backward, too
            flat, rows, update, found = steps.prepare_gradient_calculation_operands(
                softmax, foreign
            )
            found = steps.calculate_gradients(flat, rows, column, update, found, grad.float())
            own = gradient.chunk(2, -1)[rank]
            torch.testing.assert_close(found.double(), own, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits, kept)
