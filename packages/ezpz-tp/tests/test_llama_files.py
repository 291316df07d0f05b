"""Meta's Llama files: read, written at another number of ranks, and taken to Hugging Face."""

import json

import pytest
import torch
from files import pieces_in, torch_finds

from ezpz_tp import DegreeError, ParallelError, Piece
from ezpz_tp._formats import Options, stretches
from ezpz_tp._reshard import open_source, reshard, save_huggingface, save_llama

LAYERS, WIDTH, HEADS, GROUPS, INNER, VOCABULARY = 2, 32, 8, 4, 48, 64
PARAMS = {
    "dim": WIDTH,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "n_kv_heads": GROUPS,
    "vocab_size": -1,
}


def llama(dtype=torch.bfloat16, groups=GROUPS):
    """A whole model by Meta's names."""
    generator = torch.Generator().manual_seed(0)
    head = WIDTH // HEADS

    def weight(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    whole = {"tok_embeddings.weight": weight(VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        whole |= {
            f"layers.{layer}.{name}.weight": weight(*shape)
            for name, shape in {
                "attention.wq": (WIDTH, WIDTH),
                "attention.wk": (groups * head, WIDTH),
                "attention.wv": (groups * head, WIDTH),
                "attention.wo": (WIDTH, WIDTH),
                "feed_forward.w1": (INNER, WIDTH),
                "feed_forward.w2": (WIDTH, INNER),
                "feed_forward.w3": (INNER, WIDTH),
                "attention_norm": (WIDTH,),
                "ffn_norm": (WIDTH,),
            }.items()
        }
    frequencies = {"rope.freqs": torch.randn(head // 2, generator=generator)}
    return {
        **whole,
        "norm.weight": weight(WIDTH),
        "output.weight": weight(VOCABULARY, WIDTH),
        **frequencies,
    }


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


def full(source):
    found = {}
    for name, entry in source.entries.items():
        found[name] = torch.empty(entry.shard.full_shape, dtype=entry.dtype)
        source.read_into(name, 0, found[name])
    return found


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("generation", [2, 3])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_full_tensors_are_put_together(tmp_path, degree, generation):
    whole = llama()
    source = open_source(save(tmp_path / "in", whole, degree, generation))
    assert_same(full(source), whole)
    for name, entry in source.entries.items():
        assert entry.shard.dim == (dim_of(name, generation) if degree > 1 else dim_of(name, 3))


@pytest.mark.parametrize("generation", [2, 3])
def test_any_stretch_along_any_dim(tmp_path, generation, monkeypatch):
    monkeypatch.setattr(stretches, "CHUNK", 3000)
    whole = llama()
    path = save(tmp_path / "in", whole, 4, generation)
    turned = Options({"tok_embeddings.weight": 1 - dim_of("tok_embeddings.weight", generation)})
    for options in (Options(), turned):
        source = open_source(path, options)
        for name, value in whole.items():
            dim = source.entries[name].shard.dim or 0
            length = value.shape[dim]
            for start, stop in [(0, 1), (1, length - 1), (length // 3, length // 2 + 1)]:
                expected = value.narrow(dim, start, stop - start)
                out = torch.empty_like(expected)
                source.read_into(name, start, out)
                assert torch.equal(out, expected), name


@pytest.mark.parametrize("generation", [2, 3])
def test_written_at_other_numbers_of_ranks_and_back(tmp_path, generation):
    whole = llama()
    path = save(tmp_path / "4", whole, 4, generation)
    for degree in (2, 8, 2, 4):
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


def test_one_file_of_the_second_generation_is_written_for_two(tmp_path):
    """One file does not tell how the embedding is split: the plan does."""
    whole = llama()
    path = save(tmp_path / "1", whole, 1, 2)
    save_llama(path, tmp_path / "2", tp=2, plan={"tok_embeddings.weight": 1})
    for index, held in enumerate(shards(whole, 2, 2)):
        assert_same(torch.load(tmp_path / "2" / f"consolidated.{index:02d}.pth"), held)


def test_a_degree_that_does_not_divide(tmp_path):
    path = save(tmp_path / "in", llama())
    with pytest.raises(
        DegreeError, match=r"'tok_embeddings\.weight': .*\(64, 32\).* 64 over degree 3"
    ):
        save_llama(path, tmp_path / "out", tp=3)
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


def test_to_pieces_that_torch_loads(tmp_path):
    whole = llama()
    reshard(save(tmp_path / "in", whole, 2), tmp_path / "out", tp=4)
    assert_same(torch_finds(tmp_path / "out"), whole)
    for (name, rank), (offsets, sizes) in pieces_in(tmp_path / "out").items():
        held = shards(whole, 4, 3)[rank][name]
        assert torch.equal(whole[name][Piece(offsets, sizes).slices], held)
    assert_same(full(open_source(tmp_path / "out")), whole)


# Rotary embedding, as Meta's and Hugging Face's code have it.


def rotate_pairs(heads):
    """Meta's: channels 2i and 2i + 1 of ``[heads, sequence, size]`` are a complex number."""
    *_, length, size = heads.shape
    angles = torch.arange(length).outer(1e4 ** (-torch.arange(0, size, 2).double() / size))
    turned = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def rotate_halves(heads):
    """Hugging Face's: channels i and i + size / 2 are turned."""
    *_, length, size = heads.shape
    angles = torch.arange(length).outer(1e4 ** (-torch.arange(0, size, 2).double() / size))
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def attention(hidden, q, k, v, out, rotate):
    heads = [
        (hidden @ weight.T).unflatten(-1, (-1, WIDTH // HEADS)).transpose(0, 1)
        for weight in (q, k, v)
    ]
    mixed = torch.nn.functional.scaled_dot_product_attention(
        rotate(heads[0]),
        *(
            part.repeat_interleave(len(heads[0]) // len(part), 0)
            for part in (rotate(heads[1]), heads[2])
        ),
        is_causal=True,
    )
    return mixed.transpose(0, 1).flatten(-2) @ out.T


@pytest.mark.parametrize("groups", [GROUPS, HEADS])
def test_hugging_face_computes_the_same_attention(tmp_path, groups):
    safetensors = pytest.importorskip("safetensors.torch")
    whole = llama(torch.float64, groups)
    path = save(tmp_path / "in", whole)
    (path / "params.json").write_text(json.dumps({**PARAMS, "n_kv_heads": groups}))
    save_huggingface(path, tmp_path / "out")
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    hidden = torch.randn(20, WIDTH, dtype=torch.float64)
    for layer in range(LAYERS):
        meta = [whole[f"layers.{layer}.attention.w{each}.weight"] for each in "qkvo"]
        theirs = [found[f"model.layers.{layer}.self_attn.{each}_proj.weight"] for each in "qkvo"]
        expected = attention(hidden, *meta, rotate_pairs)
        torch.testing.assert_close(
            attention(hidden, *theirs, rotate_halves), expected, rtol=0, atol=1e-12
        )
        assert not torch.allclose(attention(hidden, *meta, rotate_halves), expected)


def test_hugging_face_names(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    whole = llama()
    save_huggingface(save(tmp_path / "in", whole, 4, 2), tmp_path / "out")
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    same = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
    for layer in range(LAYERS):
        ours, theirs = f"model.layers.{layer}", f"layers.{layer}"
        same |= {
            f"{ours}.self_attn.v_proj": f"{theirs}.attention.wv",
            f"{ours}.self_attn.o_proj": f"{theirs}.attention.wo",
            f"{ours}.mlp.gate_proj": f"{theirs}.feed_forward.w1",
            f"{ours}.mlp.up_proj": f"{theirs}.feed_forward.w3",
            f"{ours}.mlp.down_proj": f"{theirs}.feed_forward.w2",
            f"{ours}.input_layernorm": f"{theirs}.attention_norm",
            f"{ours}.post_attention_layernorm": f"{theirs}.ffn_norm",
        }
        for new, old, heads in (("q_proj", "wq", HEADS), ("k_proj", "wk", GROUPS)):
            # As transformers' convert_llama_weights_to_hf.py has it.
            rows = whole[f"{theirs}.attention.{old}.weight"]
            expected = rows.view(heads, -1, 2, WIDTH).transpose(1, 2).reshape(rows.shape)
            assert torch.equal(found.pop(f"{ours}.self_attn.{new}.weight"), expected)
    assert_same(found, {f"{new}.weight": whole[f"{old}.weight"] for new, old in same.items()})
    save_huggingface(tmp_path / "in", tmp_path / "kept", names="keep")
    assert_same(safetensors.load_file(tmp_path / "kept" / "model.safetensors"), whole)
    save_huggingface(tmp_path / "in", tmp_path / "mine", names=lambda name: f"mine.{name}")
    mine = safetensors.load_file(tmp_path / "mine" / "model.safetensors")
    assert_same(mine, {f"mine.{name}": value for name, value in whole.items()})


# What is wrong is said before anything is written.


def change(file, edit):
    held = torch.load(file)
    edit(held)
    torch.save(held, file)


class Sub(torch.Tensor):
    """A weight of another kind than a plain tensor, such as a quantized one."""


def remove(path):
    (path / "consolidated.02.pth").unlink()


def remove_last(path):
    (path / "consolidated.03.pth").unlink()


def truncate(path):
    file = path / "consolidated.01.pth"
    file.write_bytes(file.read_bytes()[:5000])


def lose(path):
    change(path / "consolidated.02.pth", lambda held: held.pop("layers.1.attention.wv.weight"))


def add(path):
    change(path / "consolidated.02.pth", lambda held: held.update({"layers.2.more": torch.ones(3)}))


def reshape(path):
    wq = {"layers.0.attention.wq.weight": torch.zeros(6, WIDTH, dtype=torch.bfloat16)}
    change(path / "consolidated.03.pth", lambda held: held.update(wq))


def retype(path):
    change(
        path / "consolidated.03.pth", lambda held: held.update({"norm.weight": torch.ones(WIDTH)})
    )


def differ(path):
    change(path / "consolidated.01.pth", lambda held: held["layers.1.ffn_norm.weight"][3].add_(1))


def rename(path):
    for file in path.glob("*.pth"):
        change(file, lambda held: held.update({"adapter.down": torch.ones(4, 2)}))


def replace(path):
    torch.save([1, 2], path / "consolidated.01.pth")


def widen(path):
    for file in path.glob("*.pth"):
        change(file, lambda held: held.update({"tok_embeddings.weight": torch.ones(16, 24)}))


def wrap(path):
    wo = "layers.0.attention.wo.weight"
    held = torch.load(path / "consolidated.01.pth")
    held[wo] = held[wo].as_subclass(Sub)
    torch.save(held, path / "consolidated.01.pth")


def scribble(path):
    (path / "params.json").write_text("{")


WRONG = [
    (remove, r"consolidated\.02\.pth: there is no such file, but there is consolidated\.03\.pth"),
    (
        remove_last,
        (
            r"3 files, .*wo\.weight has shape \(32, 8\); expected \(32, 10\), or 4 files: "
            r"consolidated\.03\.pth is missing"
        ),
    ),
    (truncate, r"consolidated\.01\.pth: 5000 bytes .*truncated"),
    (
        lose,
        (
            r"consolidated\.02\.pth: has no tensor layers\.1\.attention\.wv\.weight; expected one "
            r"of shape \(4, 32\)"
        ),
    ),
    (add, r"consolidated\.02\.pth: has a tensor layers\.2\.more of shape \(3,\); expected none"),
    (
        reshape,
        (
            r"consolidated\.03\.pth: tensor layers\.0\.attention\.wq\.weight has shape \(6, 32\) "
            r"and dtype torch\.bfloat16; expected \(8, 32\) and torch\.bfloat16, as .*\.00\.pth"
        ),
    ),
    (
        retype,
        (
            r"consolidated\.03\.pth: tensor norm\.weight has shape \(32,\) and dtype torch\.float32"
            r"; expected \(32,\) and torch\.bfloat16"
        ),
    ),
    (
        differ,
        (
            r"consolidated\.01\.pth: tensor layers\.1\.ffn_norm\.weight of shape \(32,\) is not "
            r"that of .*consolidated\.00\.pth"
        ),
    ),
    (rename, r"in: no rule says how these tensors are split: adapter\.down \[4, 2\]\. Give plan="),
    (replace, r"consolidated\.01\.pth: holds a list; expected a state dict"),
    (widen, r"tok_embeddings\.weight has shape \(16, 24\) in one of 4 files; expected 32 columns"),
    (wrap, r"consolidated\.01\.pth: layers\.0\.attention\.wo\.weight is a .*Sub, which is not"),
    (scribble, r"params\.json: not JSON"),
]


@pytest.mark.parametrize(("damage", "message"), WRONG, ids=[each.__name__ for each, _ in WRONG])
def test_a_wrong_file_is_named_and_nothing_is_written(tmp_path, damage, message):
    path = save(tmp_path / "in", llama(), 4)
    damage(path)
    for write in (
        lambda out: reshard(path, out, tp=2),
        lambda out: save_llama(path, out, tp=2),
        lambda out: save_huggingface(path, out),
    ):
        with pytest.raises(ParallelError, match=message):
            write(tmp_path / "out")
        assert [each.name for each in tmp_path.iterdir()] == ["in"]


def test_heads_that_do_not_fit(tmp_path):
    path = save(tmp_path / "in", llama())
    (path / "params.json").unlink()
    with pytest.raises(ParallelError, match=r"wq\.weight has 32 rows; .* each of 0 heads.*n_heads"):
        save_huggingface(path, tmp_path / "out")
    (path / "params.json").write_text(json.dumps({"n_heads": 8, "n_kv_heads": 3}))
    with pytest.raises(ParallelError, match=r"wk\.weight has 16 rows; .* 3 heads.*n_kv_heads"):
        save_huggingface(path, tmp_path / "out")


def test_a_plan_for_names_of_your_own(tmp_path):
    path = save(tmp_path / "in", llama())
    rename(path)
    save_huggingface(path, tmp_path / "out", names="keep", plan={"adapter.*": 0})
    source = open_source(path, Options({"adapter.*": 0}))
    assert source.entries["adapter.down"].shard.full_shape == (8, 2)


def test_only_metas_files_are_written_as_metas(tmp_path):
    reshard(save(tmp_path / "in", llama()), tmp_path / "ours", tp=1)
    with pytest.raises(ParallelError, match=r"ours: expected Meta's consolidated"):
        save_llama(tmp_path / "ours", tmp_path / "out", tp=1)
    with pytest.raises(ParallelError, match=r"wq\.weight is split along dim 1, as the plan says"):
        save_huggingface(tmp_path / "in", tmp_path / "out", plan={"*.wq.weight": 1})
    with pytest.raises(ParallelError, match=r"names='hf'; expected 'huggingface', 'keep'"):
        save_huggingface(tmp_path / "in", tmp_path / "out", names="hf")
