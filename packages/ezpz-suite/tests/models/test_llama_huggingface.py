"""Hugging Face's Llama and this one give the same logits, and have each other's weights."""

import json

import pytest
import torch

from ezpz.models import Llama, LlamaConfig, ModelError, huggingface_state_dict, load_huggingface
from ezpz_tp.testing import run_ranks

from .conftest import LONG, theirs

pytest.importorskip("transformers", reason="the extra huggingface")


def tokens():
    return torch.randint(131, (2, 100), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rope", [None, LONG], ids=["plain", "llama3"])
def test_the_logits_are_theirs(tied, rope):
    model = theirs(tied, rope)
    ours = Llama(LlamaConfig.from_huggingface(model.config))
    load_huggingface(ours, model.state_dict())
    wanted = model(tokens()).logits
    assert wanted.std() > 0.1
    torch.testing.assert_close(ours(tokens()), wanted, atol=1e-5, rtol=1e-5)
    if rope:
        unscaled = Llama(LlamaConfig.from_huggingface(theirs(tied, None).config))
        load_huggingface(unscaled, model.state_dict())
        assert not torch.allclose(unscaled(tokens()), wanted, atol=1e-3)


def test_from_files_and_back(folder):
    config = LlamaConfig.from_huggingface(folder)
    model = Llama(config)
    load_huggingface(model, folder)
    back = huggingface_state_dict(model)
    wanted = theirs().state_dict()
    assert back.keys() == wanted.keys()
    assert all(torch.equal(back[name], one) for name, one in wanted.items())
    half = Llama(config, dtype=torch.bfloat16, device="meta").to_empty(device="cpu")
    load_huggingface(half, folder)
    assert torch.equal(half.norm.weight, model.norm.weight.bfloat16())


def load_parallel(folder, options):
    config = LlamaConfig.from_huggingface(folder)
    model = Llama(config, parallel=True, seed=7, **options)
    load_huggingface(model, folder)
    return huggingface_state_dict(model), model.loss(tokens(), tokens()).item()


def test_each_rank_loads_its_part(folder):
    """131 tokens over two ranks: the vocabulary is padded."""
    wanted = theirs().state_dict()
    loss = Llama(LlamaConfig.from_huggingface(folder))
    load_huggingface(loss, folder)
    for found, value in run_ranks(load_parallel, 2, folder, {"sequence_parallel": True}):
        assert all(torch.equal(found[name], one) for name, one in wanted.items())
        assert value == pytest.approx(loss.loss(tokens(), tokens()).item(), abs=1e-5)


def test_a_tied_head_is_the_table_whatever_is_stored():
    model = theirs(tied=True)
    weights = {**model.state_dict(), "lm_head.weight": torch.zeros(131, 64)}
    ours = Llama(LlamaConfig.from_huggingface(model.config))
    load_huggingface(ours, weights)
    torch.testing.assert_close(ours(tokens()), model(tokens()).logits, atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused(folder, tmp_path):
    config = LlamaConfig.from_huggingface(folder)
    weights = dict(theirs().state_dict())
    model = Llama(config)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    without = {name: one for name, one in weights.items() if "layers.1.mlp.up" not in name}
    transposed = {**weights, "model.norm.weight": torch.ones(65)}
    deeper = {**weights, "model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}
    biased = {**weights, "model.layers.0.self_attn.q_proj.bias": torch.ones(64)}
    for given, words in (
        (without, "has no model.layers.1.mlp.up_proj.weight"),
        (transposed, r"model.norm.weight has shape \(65,\); expected \(64,\)"),
        (deeper, "has model.layers.2.mlp.up_proj.weight, which this model of 2 layers has not"),
        (biased, "has model.layers.0.self_attn.q_proj.bias, which this model"),
        (tmp_path, "has neither model.safetensors nor"),
    ):
        with pytest.raises(ModelError, match=words):
            load_huggingface(model, given)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    with pytest.raises(ModelError, match="has no data: call to_empty"):
        load_huggingface(Llama(config, device="meta"), weights)
    with pytest.raises(ModelError, match="Sequential; expected a Llama that is not wrapped"):
        load_huggingface(torch.nn.Sequential(model), weights)  # as DDP is around it
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match="expected a whole safetensors file"):
        load_huggingface(model, tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mistral"}, "model_type='mistral'; expected 'llama'"),
        ({"attention_bias": True}, "attention_bias=True; expected False"),
        ({"head_dim": 32}, "head_dim=32 with 4 heads"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "says no 'low_freq_factor'"),
        ({"hidden_size": None}, "says no 'hidden_size'"),
        ([1], "holds a list"),
        (None, "expected a model's config.json"),
    ],
)
def test_other_configurations_are_refused(folder, tmp_path, change, words):
    said = change
    if isinstance(change, dict):
        given = {**json.loads((folder / "config.json").read_text()), **change}
        said = {name: value for name, value in given.items() if value is not None}
    if said is not None:
        (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match=words):
        LlamaConfig.from_huggingface(tmp_path)


def test_configurations_before_transformers_5_and_what_is_none():
    found = LlamaConfig.from_huggingface({
        "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 131, "num_hidden_layers": 2,
        "intermediate_size": 96, "rope_theta": 5e5, "rope_scaling": LONG | {"rope_theta": None},
    })  # fmt: skip
    assert (found.rope_theta, found.rope_scaling.original_length, found.kv_heads) == (5e5, 32, 4)
    with pytest.raises(ModelError, match="of type int"):
        LlamaConfig.from_huggingface(3)
