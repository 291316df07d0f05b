"""Meta's Llama files: read, written at another number of ranks, and taken to Hugging Face."""

import json
from functools import partial

import pytest
import torch
from files import assert_refused, assert_same, full, transformer

import ezpz_tp._formats
from ezpz_tp import ParallelError, reshard, save_huggingface, save_llama
from ezpz_tp._formats import Options, open_source

LAYERS, WIDTH, HEADS, GROUPS, INNER, VOCABULARY = 2, 64, 8, 4, 48, 128
PARAMS = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": GROUPS}
MODULES = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def metas(name):
    name = name.removeprefix("model.")
    for theirs, own in MODULES.items():
        name = name.replace(theirs, own)
    return name


def llama():
    whole = transformer(LAYERS, WIDTH, HEADS, GROUPS, INNER, VOCABULARY)
    found = {metas(name): value for name, value in whole.items()}
    return {**found, "rope.freqs": torch.arange(4.0)}


def dim_of(name, generation):
    """How Meta's code splits, written down a second time."""
    module = name.split(".")[-2]
    if module in {"wq", "wk", "wv", "w1", "w3", "output"}:
        return 0
    if module in {"wo", "w2"}:
        return 1
    return {2: 1, 3: 0}[generation] if module == "tok_embeddings" else None


def shards(whole, degree, generation):
    found = [{} for _ in range(degree)]
    for name, value in whole.items():
        dim = dim_of(name, generation)
        parts = [value] * degree if dim is None else value.chunk(degree, dim)
        for held, part in zip(found, parts, strict=True):
            held[name] = part.clone()
    return found


def save(folder, whole, degree=2, generation=3):
    folder.mkdir()
    for index, held in enumerate(shards(whole, degree, generation)):
        torch.save(held, folder / f"consolidated.{index:02d}.pth")
    (folder / "params.json").write_text(json.dumps(PARAMS))
    return folder


@pytest.mark.parametrize("generation", [2, 3])
def test_written_at_other_numbers_of_ranks_and_back(tmp_path, generation, monkeypatch):
    monkeypatch.setattr(ezpz_tp._formats, "CHUNK", 3000)  # so that tensors are read in parts
    whole = llama()
    path = save(tmp_path / "4", whole, 4, generation)
    for degree in (2, 8, 4):
        before, path = path, tmp_path / f"{degree}-of-{path.name}"
        save_llama(before, path, tp=degree)
        expected = shards(whole, degree, generation)
        assert len(list(path.glob("*.pth"))) == degree
        for index, held in enumerate(expected):
            file = path / f"consolidated.{index:02d}.pth"
            assert_same(torch.load(file, weights_only=True, mmap=True), held)
        assert json.loads((path / "params.json").read_text()) == PARAMS
    save_llama(path, tmp_path / "1", tp=1)
    assert_same(torch.load(tmp_path / "1" / "consolidated.00.pth"), whole)
    assert_same(full(open_source(tmp_path / "1")), whole)
    # One file does not tell how the embedding is split: for the second generation the plan does.
    plan = {"tok_embeddings.weight": 1} if generation == 2 else None
    save_llama(tmp_path / "1", tmp_path / "2", tp=2, plan=plan)
    for index, held in enumerate(shards(whole, 2, generation)):
        assert_same(torch.load(tmp_path / "2" / f"consolidated.{index:02d}.pth"), held)


def test_hugging_face_names(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    whole = llama()
    plan = {"*.wq.weight": 1}  # which is all the same here
    save_huggingface(save(tmp_path / "in", whole, 4, 2), tmp_path / "out", plan=plan)
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    del whole["rope.freqs"]
    expected = {name: whole.pop(metas(name)) for name in found}
    assert not whole
    for name, rows in expected.items():
        heads = {"q_proj": HEADS, "k_proj": GROUPS}.get(name.split(".")[-2])
        if heads:  # as transformers' convert_llama_weights_to_hf.py has it
            pairs = rows.view(heads, -1, 2, WIDTH).transpose(1, 2)
            expected[name] = pairs.reshape(rows.shape)
    assert_same(found, expected)
    whole = llama()
    save_huggingface(tmp_path / "in", tmp_path / "kept", names="keep")
    assert_same(safetensors.load_file(tmp_path / "kept" / "model.safetensors"), whole)
    save_huggingface(tmp_path / "in", tmp_path / "mine", names=lambda name: f"mine.{name}")
    mine = safetensors.load_file(tmp_path / "mine" / "model.safetensors")
    assert_same(mine, {f"mine.{name}": value for name, value in whole.items()})


# What is wrong is said before anything is written.


def file_of(path, number):
    return path / f"consolidated.{number:02d}.pth"


def changed(number, **tensors):
    """Give a file other tensors; a function makes one of what is there, and None takes it out."""

    def change(path):
        held = torch.load(file_of(path, number))
        for module, value in tensors.items():
            name = f"{module.replace('__', '.')}.weight"
            held[name] = value(held[name]) if callable(value) else value
            if value is None:
                del held[name]
        torch.save(held, file_of(path, number))

    return change


def on_all(**tensors):
    return lambda path: [changed(number, **tensors)(path) for number in range(4)]


adapt = on_all(adapter=torch.ones(4, 2))
WRONG = {
    r"\.02\.pth: there is no such file, but there is consolidated\.03\.pth": lambda path: file_of(
        path, 2
    ).unlink(),
    r"3 files, .*wo\.weight has shape \(64, 16\); expected \(64, 21\), or 4 files: consolidated\.03"
    r"\.pth is missing": lambda path: file_of(path, 3).unlink(),
    r"\.02\.pth: has no tensor layers\.1\.attention\.wv\.weight; expected one of shape \(8, 64\)": (
        changed(2, layers__1__attention__wv=None)
    ),
    r"\.02\.pth: has a tensor layers\.2\.more\.weight of shape \(3,\); expected none": changed(
        2, layers__2__more=torch.ones(3)
    ),
    r"\.03\.pth: tensor norm\.weight has shape \(64,\) and dtype torch\.float32; expected \(64,\) "
    r"and torch\.bfloat16": changed(3, norm=torch.ones(WIDTH)),
    r"\.01\.pth: tensor layers\.1\.ffn_norm\.weight of shape \(64,\) is not that of .*\.00\.pth": (
        changed(1, layers__1__ffn_norm=lambda held: held + torch.eye(WIDTH)[3].bfloat16())
    ),
    r"in: no rule says how these tensors are split: adapter\.weight \[4, 2\]\. Give plan=": adapt,
    r"consolidated\.01\.pth: holds a list; expected a state dict": lambda path: torch.save(
        [1, 2], file_of(path, 1)
    ),
    r"tok_embeddings\.weight has shape \(32, 24\) in one of 4 files; expected 64 columns": on_all(
        tok_embeddings=torch.ones(32, 24)
    ),
}


@pytest.mark.parametrize("message", WRONG, ids=range(len(WRONG)))
def test_a_wrong_file_is_named_and_nothing_is_written(tmp_path, message):
    WRONG[message](save(tmp_path / "in", llama(), 4))
    writes = partial(reshard, tp=2), partial(save_llama, tp=2), save_huggingface
    assert_refused(tmp_path, message, *writes)


def test_heads_and_degrees_that_do_not_fit(tmp_path):
    path = save(tmp_path / "in", llama())
    message = r"'tok_embeddings\.weight': .*\(128, 64\).* 128 over degree 3"
    assert_refused(tmp_path, message, partial(save_llama, tp=3))
    for params, message in [
        ({}, r"wq\.weight has 64 rows; .* each of 0 heads.*n_heads"),
        ({"n_heads": 8, "n_kv_heads": 3}, r"wk\.weight has 32 rows; .* 3 heads.*n_kv_heads"),
    ]:
        (path / "params.json").write_text(json.dumps(params))
        assert_refused(tmp_path, message, save_huggingface)
    (path / "params.json").unlink()
    assert_refused(tmp_path, r"each of 0 heads", save_huggingface)


def test_a_plan_for_names_of_your_own(tmp_path):
    path = save(tmp_path / "in", llama(), 4)
    adapt(path)
    plan = {"adapter.*": 0}
    save_huggingface(path, tmp_path / "out", names="keep", plan=plan)
    assert open_source(path, Options(plan)).entries["adapter.weight"].shard.full_shape == (16, 2)
    with pytest.raises(ParallelError, match=r"adapter\.weight has no counterpart in Hugging Fac"):
        save_huggingface(path, tmp_path / "other", plan=plan)


def test_only_metas_files_are_written_as_metas(tmp_path):
    reshard(save(tmp_path / "in", llama()), tmp_path / "ours", tp=1)
    with pytest.raises(ParallelError, match=r"ours: expected Meta's consolidated"):
        save_llama(tmp_path / "ours", tmp_path / "out", tp=1)
    with pytest.raises(ParallelError, match=r"names='hf'; expected 'huggingface', 'keep'"):
        save_huggingface(tmp_path / "in", tmp_path / "out", names="hf")
