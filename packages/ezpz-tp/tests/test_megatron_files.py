"""Megatron-LM's mp_rank files: read at any degree, and taken to Hugging Face."""

import argparse
import enum
import io
import itertools
import random
from functools import partial

import pytest
import torch
from files import assert_refused, assert_same, full, transformer

from ezpz_tp import ParallelError, reshard, save_huggingface
from ezpz_tp._formats import Options, open_source

LAYERS, WIDTH, HEADS, GROUPS, CHANNELS, INNER = 4, 24, 4, 2, 8, 32
VOCABULARY, PADDED = 61, 64


class Backend(enum.Enum):
    """Arguments hold enumerations of the program that wrote them."""

    AUTO = 5


def arguments(**others):
    said = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 1,
        "num_layers": LAYERS,
        "num_attention_heads": HEADS,
        "group_query_attention": True,
        "num_query_groups": GROUPS,
        "kv_channels": CHANNELS,
        "swiglu": True,
        "padded_vocab_size": PADDED,
        "untie_embeddings_and_output_weights": True,
        "params_dtype": torch.bfloat16,
        "attention_backend": Backend.AUTO,
    }
    return argparse.Namespace(**{**said, **others})


def hugging_face(*, gated=True):
    biases = ("q_proj", "k_proj", "v_proj", "down_proj")
    found = transformer(LAYERS, WIDTH, HEADS, GROUPS, INNER, PADDED, biases=biases)
    return {name: value for name, value in found.items() if gated or "gate_proj" not in name}


def fused(whole, layer, kind, groups):
    """Megatron-LM's fused projection: for each group its queries, its key and its value."""
    rows = []
    for group in groups:
        for each, per in (("q", HEADS // GROUPS), ("k", 1), ("v", 1)):
            weight = whole[f"model.layers.{layer}.self_attn.{each}_proj.{kind}"]
            rows.append(weight.unflatten(0, (GROUPS, per * CHANNELS))[group])
    return torch.cat(rows)


def stage(
    whole, layers, rank, degree, *, engine=True, first=True, last=True, tied=False, gated=True
):
    """One chunk of one tensor-parallel rank, its layers numbered from 0."""

    def part(name, dim):
        return whole[name].chunk(degree, dim)[rank].clone()

    found = {}
    if first:
        found["embedding.word_embeddings.weight"] = part("model.embed_tokens.weight", 0)
    each, names = GROUPS // degree, ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    if engine:
        names = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
    for number, layer in enumerate(layers):
        theirs, ours = f"model.layers.{layer}", f"decoder.layers.{number}"
        halves = ("gate", "up") if gated else ("up",)
        fc1 = [part(f"{theirs}.mlp.{half}_proj.weight", 0) for half in halves]
        own = range(rank * each, (rank + 1) * each)
        found |= {
            f"{ours}.{names[0]}": whole[f"{theirs}.input_layernorm.weight"].clone(),
            f"{ours}.self_attention.linear_qkv.weight": fused(whole, layer, "weight", own),
            f"{ours}.self_attention.linear_qkv.bias": fused(whole, layer, "bias", own),
            f"{ours}.self_attention.linear_proj.weight": part(
                f"{theirs}.self_attn.o_proj.weight", 1
            ),
            f"{ours}.{names[1]}": whole[f"{theirs}.post_attention_layernorm.weight"].clone(),
            f"{ours}.mlp.linear_fc1.weight": torch.cat(fc1),
            f"{ours}.mlp.linear_fc2.weight": part(f"{theirs}.mlp.down_proj.weight", 1),
            f"{ours}.mlp.linear_fc2.bias": whole[f"{theirs}.mlp.down_proj.bias"].clone(),
            f"{ours}.self_attention.core_attention._extra_state": io.BytesIO(b"fp8"),
            f"{ours}.mlp.linear_fc1._extra_state": torch.ones(3),
        }
    if last:
        found["decoder.final_layernorm.weight"] = whole["model.norm.weight"].clone()
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        found["output_layer.weight"] = part(head, 0)
    return found


def file_of(path, name="mp_rank_01_001"):
    return path / "iter_0000010" / name / "model_optim_rng.pt"


def save(folder, whole, args, *, chunks=1, **others):
    """Write what Megatron-LM's ``save_checkpoint`` does at iteration 10."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    each = LAYERS // (pp * chunks)
    for index, at in itertools.product(range(tp), range(pp)):
        held = {
            "args": args,
            "checkpoint_version": 3.0,
            "optimizer": {"optimizer": {"state": {0: {"exp_avg": torch.zeros(5)}}}},
            "rng_state": [{"random_rng_state": random.getstate(), "cuda": torch.ones(4).byte()}],
        }
        for chunk in range(chunks):
            begin = (chunk * pp + at) * each
            ends = {"first": begin == 0, "last": begin + each == LAYERS}
            layers = range(begin, begin + each)
            key = "model" if chunks == 1 else f"model{chunk}"
            held[key] = stage(whole, layers, index, tp, **ends, **others)
        name = f"mp_rank_{index:02d}" + (f"_{at:03d}" if pp > 1 else "")
        file_of(folder, name).parent.mkdir(parents=True)
        torch.save(held, file_of(folder, name))
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return folder


def own(whole, **others):
    found = stage(whole, range(LAYERS), 0, 1, **others)
    return {name: value for name, value in found.items() if not name.endswith("_extra_state")}


@pytest.mark.parametrize(
    ("tp", "pp", "chunks", "engine"),
    [(2, 1, 1, True), (1, 2, 1, False), (2, 2, 1, False), (2, 2, 2, True), (1, 4, 1, True)],
)
def test_full_tensors_are_put_together(tmp_path, tp, pp, chunks, engine):
    whole = hugging_face()
    args = arguments(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    source = open_source(save(tmp_path / "in", whole, args, chunks=chunks, engine=engine))
    assert_same(full(source), own(whole, engine=engine))
    order = list(source.entries)
    assert order[0] == "embedding.word_embeddings.weight"
    assert order[-1] == "output_layer.weight"
    assert source.entries["decoder.layers.3.mlp.linear_fc1.weight"].shard.blocks == (INNER, INNER)
    inner = open_source(tmp_path / "in" / "iter_0000010")  # without the file that names it
    assert_same(full(inner), own(whole, engine=engine))


@pytest.mark.parametrize("gated", [True, False])
def test_without_arguments_the_plan_says_how_fc1_is_split(tmp_path, gated):
    whole = hugging_face(gated=gated)
    path = save(tmp_path / "in", whole, arguments(swiglu=gated), gated=gated)
    assert_same(full(open_source(path)), own(whole, gated=gated))
    if not gated:
        message = r"fc1\.weight is one matrix; .*names=\"keep\""
        assert_refused(tmp_path, message, save_huggingface)
    without_arguments(path)
    message = rf"decoder\.layers\.0\.mlp\.linear_fc1\.weight \[{32 if gated else 16}, 24\]"
    assert_refused(tmp_path, message, save_huggingface)
    for way in ((0, 2), (0, (INNER, INNER))) if gated else (0,):
        source = open_source(path, Options({"*.linear_fc1.weight": way}))
        assert_same(full(source), own(whole, gated=gated))


def test_a_gated_projection_at_other_degrees(tmp_path):
    whole = hugging_face()
    path = save(tmp_path / "in", whole, arguments())
    reshard(path, tmp_path / "4", tp=4, vocab_size=VOCABULARY)
    reshard(tmp_path / "4", tmp_path / "1", tp=1)
    expected = own(whole)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        expected[name] = expected[name][:VOCABULARY]
    assert_same(full(open_source(tmp_path / "1")), expected)


@pytest.mark.parametrize(("tied", "pipeline"), [(False, 1), (True, 1), (True, 2)])
def test_hugging_face(tmp_path, tied, pipeline):
    safetensors = pytest.importorskip("safetensors.torch")
    whole = hugging_face()
    args = arguments(
        untie_embeddings_and_output_weights=not tied, pipeline_model_parallel_size=pipeline
    )
    path = save(tmp_path / "in", whole, args, tied=tied)
    save_huggingface(path, tmp_path / "out", vocab_size=VOCABULARY)
    expected = dict(whole)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        expected[name] = expected[name][:VOCABULARY]
    if tied:
        del expected["lm_head.weight"]
    assert_same(safetensors.load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_interleaved_rotary_embedding_and_local_names(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    whole = hugging_face()
    path = save(tmp_path / "in", whole, arguments(rotary_interleaved=True), engine=False)
    save_huggingface(path, tmp_path / "out")
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    for kind, (each, heads) in itertools.product(("weight", "bias"), (("q", HEADS), ("k", GROUPS))):
        name = f"model.layers.3.self_attn.{each}_proj.{kind}"
        pairs = whole[name].view(heads, CHANNELS // 2, 2, -1).transpose(1, 2)
        assert torch.equal(found[name], pairs.reshape(whole[name].shape))
    name = "model.layers.3.self_attn.v_proj.weight"
    assert torch.equal(found[name], whole[name])
    assert found["model.layers.0.input_layernorm.weight"].shape == (WIDTH,)


# What is wrong is said before anything is written.


LAST = ("mp_rank_01_001",)
STAGE = ("mp_rank_00_001", "mp_rank_01_001")
ALL = ("mp_rank_00_000", "mp_rank_01_000", *STAGE)


def changed(names, edit):
    def change(path):
        for name in names:
            held = torch.load(file_of(path, name), weights_only=False)
            edit(held)
            torch.save(held, file_of(path, name))

    return change


def with_arguments(**said):
    return changed(ALL, lambda held: vars(held["args"]).update(said))


def without_arguments(path):
    for file in path.rglob("*.pt"):
        torch.save({"model": torch.load(file, weights_only=False)["model"]}, file)


def add_folder(path):
    file_of(path).parent.rename(file_of(path, "mp_rank_02_001").parent)
    file_of(path).parent.mkdir()


FC2, TABLE = "decoder.layers.1.mlp.linear_fc2.weight", "embedding.word_embeddings.weight"
WRONG = {
    r"rank_01_001/model_optim_rng\.pt: there is no such file": lambda path: (
        file_of(path).rename(path / "elsewhere.pt"),
        file_of(path).parent.rmdir(),
    ),
    r"iter_0000010: 5 mp_rank folders; expected 4, .*tensor 2 x pipeline 2": add_folder,
    r"01_001/.*'model': has no tensor decoder\.layers\.1\.mlp\.linear_fc2\.weight; expected one of "
    r"shape \(24, 16\), as .*mp_rank_00_001": changed(LAST, lambda held: held["model"].pop(FC2)),
    r"mp_rank_01_001/.*: has no 'model', only 'args', 'checkpoint_version'": changed(
        LAST, lambda held: held.pop("model")
    ),
    r"mp_rank_00_000/.*: has 'args', 'checkpoint_version', .*; expected 'model'": changed(
        ALL, lambda held: held.pop("model")
    ),
    r"checkpoint_version 1\.0, .*expected 2\.0 or later": changed(
        ALL, lambda held: held.update(checkpoint_version=1.0)
    ),
    r"'model' is not a state dict of Megatron Core": changed(
        ALL, lambda held: held.update(model={"encoder": {"layers.0.a": torch.ones(3)}})
    ),
    r"expert_model_parallel_size=2; files of expert parallelism are not": with_arguments(
        expert_model_parallel_size=2
    ),
    r"mp_rank_01_001_000: expected mp_rank_TT, or mp_rank_TT_PPP": lambda path: file_of(
        path
    ).parent.rename(path / "iter_0000010" / "mp_rank_01_001_000"),
    r"mp_rank_00_001/.*: 2 chunks of the model; expected 1": changed(
        STAGE, lambda held: held.update(model0=held.pop("model"), model1={})
    ),
    r"embedding\.word_embeddings\.weight is in an earlier stage too": changed(
        STAGE, lambda held: held["model"].update({TABLE: torch.ones(32, 24).bfloat16()})
    ),
    r"tensor output_layer\.weight of shape \(32, 24\) is not that of .*00_000": with_arguments(
        untie_embeddings_and_output_weights=False
    ),
    r"iter_0000020: there are no mp_rank_NN folders .* says '20'": lambda path: (
        path / "latest_checkpointed_iteration.txt"
    ).write_text("20"),
}


@pytest.mark.parametrize("message", WRONG, ids=range(len(WRONG)))
def test_a_wrong_file_is_named_and_nothing_is_written(tmp_path, message):
    WRONG[message](save(tmp_path / "in", hugging_face(), arguments()))
    assert_refused(tmp_path, message, partial(reshard, tp=1), save_huggingface)


def test_what_hugging_faces_llama_has_not(tmp_path):
    path = save(tmp_path / "in", hugging_face(), arguments(apply_layernorm_1p=True))
    assert_refused(tmp_path, r"apply_layernorm_1p=True: norms that add 1", save_huggingface)
    with_arguments(apply_layernorm_1p=False, rotary_interleaved=True, rotary_percent=0.5)(path)
    assert_refused(tmp_path, r"rotary_percent=0\.5: interleaved", save_huggingface)
    save_huggingface(path, tmp_path / "out", names="keep")


def test_deepspeeds_files_are_not_megatrons(tmp_path):
    torch.save({"module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(ParallelError, match=r"not a checkpoint of a known format"):
        open_source(tmp_path)


def test_options_that_do_not_fit(tmp_path):
    path = save(tmp_path / "in", hugging_face(), arguments())
    message = r"vocab_size=65; expected 1 to 64: .*word_embeddings"
    assert_refused(tmp_path, message, partial(reshard, tp=1, vocab_size=65))
    with_arguments(num_query_groups=4)(path)
    message = r"linear_qkv\.weight has 64 rows; .* 2 x 4 groups of 8"
    assert_refused(tmp_path, message, save_huggingface)
