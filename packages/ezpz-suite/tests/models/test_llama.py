"""Llama on one rank: shapes, sizes, what it learns, and how it is built."""

import pytest
import torch

from ezpz.models import LLAMA_SIZES, Llama, LlamaConfig, ModelError
from ezpz_device import count_flops
from ezpz_obs import transformer_flops

CONFIG = LlamaConfig(dim=64, layers=2, heads=4, kv_heads=2, hidden=96, max_seq_len=64)


def batch(seed=0, size=2, length=32):
    tokens = torch.randint(256, (size, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def test_logits_and_loss():
    model, (tokens, targets) = Llama(CONFIG), batch()
    logits = model(tokens)
    assert logits.shape == (2, 32, 256)
    loss = model.loss(tokens, targets)
    assert loss.dtype == torch.float32
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model(tokens, targets), loss)
    assert 5 < loss < 6.2  # log 256 is 5.5
    half = targets.clone()
    half[:, 16:] = -100
    torch.testing.assert_close(
        model.loss(tokens, half),
        torch.nn.functional.cross_entropy(logits[:, :16].flatten(0, 1), targets[:, :16].flatten()),
    )


def test_a_token_sees_those_before_it_only():
    model, (tokens, _) = Llama(CONFIG), batch()
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert (before[:, 20:] - after[:, 20:]).abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_and_operations(tied):
    config = LlamaConfig(dim=64, layers=2, heads=4, kv_heads=2, hidden=96, tie_embeddings=tied)
    model = Llama(config)
    assert sum(one.numel() for one in model.parameters()) == config.parameters()
    assert config.flops_per_token(32) == transformer_flops(config.parameters(), 2, 64, 32)
    tokens, targets = batch()
    # A look-up multiplies nothing, unless its table is the output layer's as well; nor do norms.
    idle = 5 * 64 + (0 if tied else 256 * 64)
    counted = transformer_flops(config.parameters() - idle, 2, 64, 32) * tokens.numel()
    assert count_flops(model, tokens, targets) == counted
    assert next(model.parameters()).grad is None


def test_named_sizes_have_the_published_numbers_of_parameters():
    published = {"1b": 1_235_814_400, "7b": 6_738_415_616, "8b": 8_030_261_248,
                 "70b": 70_553_706_496}  # fmt: skip
    for name, number in published.items():
        assert LLAMA_SIZES[name].parameters() == number
    for name in ("debug", "8b"):
        with torch.device("meta"):
            model = Llama(LlamaConfig.named(name))
        assert sum(one.numel() for one in model.parameters()) == LLAMA_SIZES[name].parameters()
    assert LlamaConfig.named("8b", layers=2).layers == 2
    with pytest.raises(ModelError, match="no Llama of size '9b'; expected one of debug, 125m, 7b"):
        LlamaConfig.named("9b")


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ({"dim": 60, "heads": 8}, {}, "make dim a multiple of 16"),
        ({"dim": 24, "heads": 8}, {}, "heads of an even size"),
        ({"heads": 8, "kv_heads": 3}, {}, "expected kv_heads that divide heads"),
        ({"layers": 0}, {}, r"layers=0\); expected a whole number from 1"),
        ({"vocab_size": 2.5}, {}, "vocab_size=2.5"),
        ({}, {"sequence_parallel": True}, "expected parallel=True"),
        ({}, {"context_parallel": "ring"}, "expected parallel=True"),
        ({}, {"parallel": True, "context_parallel": "rings"}, "one of ring, ulysses, unified"),
        ({}, {"parallel": True, "context_parallel": "unified"}, "ulysses= .* with 'unified'"),
        ({}, {"parallel": True, "context_parallel": "ring", "ulysses": 2}, "and only there"),
        ({"max_seq_len": 31}, {}, "a sequence of 32 tokens; expected at most 31"),
        ({}, {"last": False}, "without the output layer has no loss"),
    ],
)
def test_what_does_not_fit_is_refused(sizes, options, words):
    with pytest.raises(ModelError, match=words):
        Llama(LlamaConfig(**sizes), **options).loss(*batch())


def test_the_first_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    model = Llama(CONFIG)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again, other = Llama(CONFIG), Llama(CONFIG, seed=1)
    assert torch.equal(torch.get_rng_state(), state), "nobody's random numbers change"
    found = model.state_dict()
    assert all(torch.equal(found[name], one) for name, one in again.state_dict().items())
    matrices = [name for name, one in found.items() if one.dim() > 1]
    assert not any(torch.equal(found[name], other.state_dict()[name]) for name in matrices)
    seen = [found[name].flatten()[:64] for name in matrices]
    assert len(torch.stack(seen).unique(dim=0)) == len(matrices), "no two are drawn alike"
    assert found["layers.0.self_attn.q_proj.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert found["layers.1.mlp.down_proj.weight"].std() == pytest.approx(0.01, rel=0.05)


def test_half_precision():
    model = Llama(CONFIG, dtype="bf16")
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    tokens, targets = batch()
    loss = model.loss(tokens, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, Llama(CONFIG).loss(tokens, targets), rtol=0.01, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = Llama(CONFIG).loss(tokens, targets)
    torch.testing.assert_close(mixed, loss, rtol=0.01, atol=0)
