"""Hugging Face's layout, in and out, against the library that its files are made with."""

import json
from functools import partial

import pytest
import torch
from files import assert_refused, assert_same, pieces_in, torch_finds, transformer

import ezpz_tp._formats
from ezpz_tp import DegreeError, ParallelError, Piece, reshard, save_huggingface
from ezpz_tp._formats import Options, open_source
from ezpz_tp._shard import Shard

safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("numpy")  # by which that library writes

LAYERS, WIDTH, HEADS, GROUPS, CHANNELS, INNER, VOCABULARY = 2, 16, 4, 2, 8, 24, 43
SIZES = LAYERS, WIDTH, HEADS, GROUPS, INNER, VOCABULARY
model = partial(transformer, *SIZES, biases=("q_proj", "o_proj"))


def dim_of(name):
    module, kind = name.split(".")[-2:]
    if module in {"o_proj", "down_proj"}:
        return 1 if kind == "weight" else None
    return None if module.endswith("norm") else 0


def save(folder, whole, files=3):
    """What ``save_pretrained`` writes."""
    folder.mkdir()
    names, where = list(whole), {}
    for number in range(files):
        held = {name: whole[name] for name in names[number::files]}
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        safetensors.save_file(held, folder / file, {"format": "pt"})
        where |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        held = safetensors.load_file(file)
        assert not found.keys() & held.keys()
        found |= held
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_in_at_any_degree_and_out_again(tmp_path, dtype):
    whole = model(dtype)
    path = save(tmp_path / "in", whole)
    for degree in (1, 2, 8, 4):
        ours, out = tmp_path / f"{degree}", tmp_path / f"out-{degree}"
        reshard(path, ours, tp=degree)
        for (name, rank), (offsets, sizes) in pieces_in(ours).items():
            value, dim = whole[name], dim_of(name)
            expected = value if dim is None else value.split(-(-value.shape[dim] // degree), dim)
            held = value[Piece(offsets, sizes).slices]
            assert_same({name: held}, {name: value if dim is None else expected[rank]})
        assert_same(torch_finds(ours), whole)
        save_huggingface(ours, out)
        assert_same(load(out), whole)
        path = out if degree > 1 else out / "model.safetensors"  # or a file of its own


def test_files_of_a_size_and_their_index(tmp_path, monkeypatch):
    monkeypatch.setattr(ezpz_tp._formats, "CHUNK", 300)  # so that tensors are written in pieces
    whole = {**model(), "model.layers.0.mlp.gate_proj.bias": torch.zeros(0)}
    total = sum(value.nbytes for value in whole.values())
    save_huggingface(save(tmp_path / "in", whole), tmp_path / "out", max_shard_size=3000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": total}
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 2
    assert files == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for file in files:
        held = safetensors.load_file(tmp_path / "out" / file)
        assert sum(value.nbytes for value in held.values()) <= 3000
        assert all(index["weight_map"][name] == file for name in held)
    assert_same(load(tmp_path / "out"), whole)
    with safetensors.safe_open(tmp_path / "out" / files[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    save_huggingface(tmp_path / "out", tmp_path / "tiny", max_shard_size=1)
    assert len(list((tmp_path / "tiny").glob("*.safetensors"))) == len(whole)


def test_stacked_matrices_by_rule_and_by_plan(tmp_path):
    q, k, v = HEADS * CHANNELS, GROUPS * CHANNELS, GROUPS * CHANNELS
    whole = {
        "layers.0.self_attn.qkv_proj.weight": torch.randn(q + k + v, WIDTH),
        "layers.0.mlp.gate_up_proj.weight": torch.randn(2 * INNER, WIDTH),
        "layers.0.mlp.c_fc.weight": torch.randn(WIDTH, 3 * INNER),
        "layers.0.mlp.router.weight": torch.randn(8, WIDTH),
    }
    path = save(tmp_path / "in", whole, 1)
    with pytest.raises(ParallelError, match=r"qkv_proj\.weight \[64, 16\], layers\.0\.mlp\.c_fc"):
        reshard(path, tmp_path / "out", tp=2)
    for odd in ("0", (0, "2"), [0, 2.0]):
        with pytest.raises(ParallelError, match=r"plan\['\*\.c_fc\.\*'\]=.*; expected a dim, None"):
            open_source(path, Options({"*.c_fc.*": odd}))
    plan = {"*.qkv_proj.*": (0, (q, k, v)), "*.c_fc.*": (-1, 3), "*.router.*": None}
    shards = {name: entry.shard for name, entry in open_source(path, Options(plan)).entries.items()}
    assert shards == {
        "layers.0.self_attn.qkv_proj.weight": Shard((q + k + v, WIDTH), 0, (q, k, v)),
        "layers.0.mlp.gate_up_proj.weight": Shard((2 * INNER, WIDTH), 0, (INNER, INNER)),
        "layers.0.mlp.c_fc.weight": Shard((WIDTH, 3 * INNER), 1, (INNER,) * 3),
        "layers.0.mlp.router.weight": Shard((8, WIDTH)),
    }
    reshard(path, tmp_path / "out", tp=2, plan=plan)
    pieces, name = pieces_in(tmp_path / "out"), "layers.0.self_attn.qkv_proj.weight"
    for number, size in enumerate((q, k, v)):
        assert pieces[f"{name}.block{number}", 1] == ((size // 2, 0), (size // 2, WIDTH))
    save_huggingface(tmp_path / "out", tmp_path / "back")
    assert_same(load(tmp_path / "back"), whole)
    for way, message in [
        ((0, 3), r"dim 0 of a tensor of shape \(64, 16\) is not 3 matrices"),
        ((0, (1, 2)), r"blocks \(1, 2\) add up to 3; expected 64"),
    ]:
        with pytest.raises((ParallelError, DegreeError), match=message):
            open_source(path, Options({**plan, "*.qkv_proj.*": way}))


def test_the_plan_comes_before_the_rules_and_keeps_a_vocabulary_padded(tmp_path):
    path = save(tmp_path / "in", model(), 1)
    plan = {"*.embed_tokens.*": 1, "lm_head.*": 0, "*.o_proj.weight": None}
    entries = open_source(path, Options(plan)).entries
    assert entries["model.embed_tokens.weight"].shard == Shard((VOCABULARY, WIDTH), 1)
    assert entries["lm_head.weight"].shard == Shard((VOCABULARY, WIDTH), 0, padded=True)
    assert entries["model.layers.0.self_attn.o_proj.weight"].shard.dim is None


FIRST, INDEX = "model-00001-of-00003.safetensors", "model.safetensors.index.json"


def lose(path):
    held = safetensors.load_file(path / FIRST)
    del held["model.embed_tokens.weight"]
    safetensors.save_file(held, path / FIRST)


def add(path):
    held = safetensors.load_file(path / FIRST)
    safetensors.save_file({**held, "more.norm.weight": torch.ones(3)}, path / FIRST)


WRONG = {
    rf"{FIRST}: has no tensor model\.embed_tokens\.weight, which": lose,
    rf"{FIRST}: has a tensor more\.norm\.weight of shape \(3,\), which {INDEX} says is in no": add,
    rf"{INDEX}: has no weight_map": lambda path: (path / INDEX).write_text('{"metadata": {}}'),
    rf"{INDEX}: not JSON": lambda path: (path / INDEX).write_text("{"),
    rf"{INDEX}: holds a list; expected a JSON object": lambda path: (path / INDEX).write_text("[]"),
}


@pytest.mark.parametrize("message", WRONG, ids=range(len(WRONG)))
def test_a_wrong_file_is_named_and_nothing_is_written(tmp_path, message):
    WRONG[message](save(tmp_path / "in", model()))
    assert_refused(tmp_path, message, partial(reshard, tp=2), save_huggingface)


def test_two_tensors_of_one_name(tmp_path):
    save(tmp_path / "in", model())
    write = partial(save_huggingface, names=lambda name: "mine")
    told = r"layers\.0\.\S+ and model\.embed_tokens\.weight would both be mine"
    assert_refused(tmp_path, told, write)
