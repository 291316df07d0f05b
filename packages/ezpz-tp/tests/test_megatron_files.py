"""Megatron-LM's mp_rank files: read at any degree, and taken to Hugging Face."""

import argparse
import enum
import io
import random

import pytest
import torch
from files import pieces_in, torch_finds

from ezpz_tp import DegreeError, ParallelError
from ezpz_tp._formats import Options
from ezpz_tp._reshard import open_source, reshard, save_huggingface

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
    """A whole model by Hugging Face's names, its vocabulary padded."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"model.embed_tokens.weight": (PADDED, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm.weight": (WIDTH,),
                "self_attn.q_proj.weight": (HEADS * CHANNELS, WIDTH),
                "self_attn.q_proj.bias": (HEADS * CHANNELS,),
                "self_attn.k_proj.weight": (GROUPS * CHANNELS, WIDTH),
                "self_attn.k_proj.bias": (GROUPS * CHANNELS,),
                "self_attn.v_proj.weight": (GROUPS * CHANNELS, WIDTH),
                "self_attn.v_proj.bias": (GROUPS * CHANNELS,),
                "self_attn.o_proj.weight": (WIDTH, HEADS * CHANNELS),
                "post_attention_layernorm.weight": (WIDTH,),
                **({"mlp.gate_proj.weight": (INNER, WIDTH)} if gated else {}),
                "mlp.up_proj.weight": (INNER, WIDTH),
                "mlp.down_proj.weight": (WIDTH, INNER),
                "mlp.down_proj.bias": (WIDTH,),
            }.items()
        }
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (PADDED, WIDTH)}
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


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
    each = GROUPS // degree
    for number, layer in enumerate(layers):
        theirs, ours = f"model.layers.{layer}", f"decoder.layers.{number}"
        fc1 = ([part(f"{theirs}.mlp.gate_proj.weight", 0)] if gated else []) + [
            part(f"{theirs}.mlp.up_proj.weight", 0)
        ]
        names = (
            ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
            if engine
            else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
        )
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


def save(folder, whole, args, *, chunks=1, **others):
    """Write what Megatron-LM's ``save_checkpoint`` does at iteration 10."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    each = LAYERS // (pp * chunks)
    for index in range(tp):
        for at in range(pp):
            held = {"args": args, "checkpoint_version": 3.0, "iteration": 10}
            for chunk in range(chunks):
                begin = (chunk * pp + at) * each
                held["model" if chunks == 1 else f"model{chunk}"] = stage(
                    whole,
                    range(begin, begin + each),
                    index,
                    tp,
                    first=begin == 0,
                    last=begin + each == LAYERS,
                    **others,
                )
            held["optimizer"] = {"optimizer": {"state": {0: {"exp_avg": torch.zeros(5)}}}}
            held["rng_state"] = [
                {"random_rng_state": random.getstate(), "cuda": torch.ones(4).byte()}
            ]
            path = (
                folder
                / "iter_0000010"
                / (f"mp_rank_{index:02d}" + (f"_{at:03d}" if pp > 1 else ""))
            )
            path.mkdir(parents=True)
            torch.save(held, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
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


def own(whole, **others):
    """The whole model by Megatron-LM's names, as one rank has it."""
    found = stage(whole, range(LAYERS), 0, 1, **others)
    return {name: value for name, value in found.items() if not name.endswith("_extra_state")}


LAYOUTS = {
    "tp2": ((2, 1), 1),
    "pp2": ((1, 2), 1),
    "tp2 pp2": ((2, 2), 1),
    "tp2 pp2 interleaved": ((2, 2), 2),
    "pp4": ((1, 4), 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("engine", [True, False], ids=["te", "local"])
def test_full_tensors_are_put_together(tmp_path, layout, engine):
    (tp, pp), chunks = LAYOUTS[layout]
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


def test_without_a_gate_and_without_arguments(tmp_path):
    whole = hugging_face(gated=False)
    args = arguments(swiglu=False)
    source = open_source(save(tmp_path / "in", whole, args, gated=False))
    assert_same(full(source), own(whole, gated=False))
    with pytest.raises(ParallelError, match=r"fc1\.weight is one matrix; .*names=\"keep\""):
        save_huggingface(tmp_path / "in", tmp_path / "out")
    for file in (tmp_path / "in").rglob("*.pt"):
        held = torch.load(file, weights_only=False)
        torch.save({"model": held["model"]}, file)
    with pytest.raises(
        ParallelError, match=r"decoder\.layers\.0\.mlp\.linear_fc1\.weight \[16, 24\]"
    ):
        open_source(tmp_path / "in")
    plain = open_source(tmp_path / "in", Options({"*.linear_fc1.weight": 0}))
    assert_same(full(plain), own(whole, gated=False))


def test_the_plan_says_what_the_arguments_do_not(tmp_path):
    whole = hugging_face()
    path = save(tmp_path / "in", whole, arguments())
    for file in path.rglob("*.pt"):
        held = torch.load(file, weights_only=False)
        torch.save({"model": held["model"]}, file)
    found = full(open_source(path, Options({"*.linear_fc1.weight": (0, 2)})))
    assert_same(found, own(whole))
    sizes = Options({"*.linear_fc1.weight": (0, (INNER, INNER))})
    assert_same(full(open_source(path, sizes)), own(whole))


def test_a_gated_projection_at_other_degrees(tmp_path):
    whole = hugging_face()
    path = save(tmp_path / "in", whole, arguments())
    reshard(path, tmp_path / "4", tp=4, vocab_size=VOCABULARY)
    reshard(tmp_path / "4", tmp_path / "1", tp=1)
    expected = own(whole)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        expected[name] = expected[name][:VOCABULARY]
    assert_same(full(open_source(tmp_path / "1")), expected)
    pieces, fc1 = pieces_in(tmp_path / "4"), "decoder.layers.2.mlp.linear_fc1.weight"
    found = torch_finds(tmp_path / "4")
    for number, each in enumerate(("gate", "up")):
        assert torch.equal(
            found[f"{fc1}.block{number}"], whole[f"model.layers.2.mlp.{each}_proj.weight"]
        )
    for index in range(4):
        assert pieces[f"{fc1}.block1", index] == ((index * INNER // 4, 0), (INNER // 4, WIDTH))
        rows = 16 if index < 3 else 13  # ceil(61 / 4)
        assert pieces["embedding.word_embeddings.weight", index] == ((16 * index, 0), (rows, WIDTH))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pipeline", [1, 2])
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
    for each, heads in (("q", HEADS), ("k", GROUPS)):
        for kind in ("weight", "bias"):
            name = f"model.layers.3.self_attn.{each}_proj.{kind}"
            rows = whole[name]
            pairs = rows.view(heads, CHANNELS // 2, 2, -1).transpose(1, 2).reshape(rows.shape)
            assert torch.equal(found[name], pairs)
    name = "model.layers.3.self_attn.v_proj.weight"
    assert torch.equal(found[name], whole[name])
    assert found["model.layers.0.input_layernorm.weight"].shape == (WIDTH,)


# What is wrong is said before anything is written.


def file_of(path, name="mp_rank_01_001"):
    return path / "iter_0000010" / name / "model_optim_rng.pt"


def change(path, edit, name="mp_rank_01_001"):
    held = torch.load(file_of(path, name), weights_only=False)
    edit(held)
    torch.save(held, file_of(path, name))


def change_all(path, edit):
    for file in path.rglob("*.pt"):
        change(path, edit, file.parent.name)


def remove(path):
    file_of(path).unlink()


def remove_folder(path):
    file_of(path).unlink()
    file_of(path).parent.rmdir()


def add_folder(path):
    file_of(path).parent.rename(file_of(path, "mp_rank_02_001").parent)
    (path / "iter_0000010" / "mp_rank_01_001").mkdir()


def truncate(path):
    file_of(path).write_bytes(file_of(path).read_bytes()[:-100])


def lose(path):
    change(path, lambda held: held["model"].pop("decoder.layers.1.mlp.linear_fc2.weight"))


def reshape(path):
    fc2 = {"decoder.layers.1.mlp.linear_fc2.weight": torch.zeros(24, 15).bfloat16()}
    change(path, lambda held: held["model"].update(fc2))


def differ(path):
    name = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    change(path, lambda held: held["model"][name][0].add_(1))


def forget(path):
    change(path, lambda held: held.pop("model"))


def forget_all(path):
    change_all(path, lambda held: held.pop("model"))


def age(path):
    change_all(path, lambda held: held.update(checkpoint_version=1.0))


def nest(path):
    model = {"language_model": {"encoder": {"layers.0.a": torch.ones(3)}}}
    change_all(path, lambda held: held.update(model=model))


def experts(path):
    change_all(path, lambda held: setattr(held["args"], "expert_model_parallel_size", 2))


def expert_folder(path):
    file_of(path).parent.rename(path / "iter_0000010" / "mp_rank_01_001_000")


def more_chunks(path):
    for name in ("mp_rank_00_001", "mp_rank_01_001"):
        change(path, lambda held: held.update(model0=held.pop("model"), model1={}), name)


def twice(path):
    table = {"embedding.word_embeddings.weight": torch.ones(32, 24).bfloat16()}
    for name in ("mp_rank_00_001", "mp_rank_01_001"):
        change(path, lambda held: held["model"].update(table), name)


def untie(path):
    change_all(
        path, lambda held: setattr(held["args"], "untie_embeddings_and_output_weights", False)
    )


def move(path):
    (path / "latest_checkpointed_iteration.txt").write_text("20")


WRONG = [
    (remove, r"mp_rank_01_001/model_optim_rng\.pt: there is no such file"),
    (remove_folder, r"mp_rank_01_001/model_optim_rng\.pt: there is no such file"),
    (add_folder, r"iter_0000010: 5 mp_rank folders; expected 4, .*tensor 2 x pipeline 2"),
    (truncate, r"mp_rank_01_001/model_optim_rng\.pt: \d+ bytes .*truncated"),
    (
        lose,
        (
            r"mp_rank_01_001/.*'model': has no tensor decoder\.layers\.1\.mlp\.linear_fc2\.weight; "
            r"expected one of shape \(24, 16\), as .*mp_rank_00_001"
        ),
    ),
    (
        reshape,
        (
            r"mp_rank_01_001/.*: tensor decoder\.layers\.3\.mlp\.linear_fc2\.weight has shape "
            r"\(24, 15\) and dtype torch\.bfloat16; expected \(24, 16\) and torch\.bfloat16"
        ),
    ),
    (
        differ,
        (
            r"mp_rank_01_001/.*: tensor decoder\.layers\.2\.self_attention\.linear_qkv\."
            r"layer_norm_weight of shape \(24,\) is not that of .*mp_rank_00_001"
        ),
    ),
    (forget, r"mp_rank_01_001/.*: has no 'model', only 'args', 'checkpoint_version'"),
    (forget_all, r"mp_rank_00_000/.*: has 'args', 'checkpoint_version', .*; expected 'model'"),
    (age, r"checkpoint_version 1\.0, .*expected 2\.0 or later"),
    (nest, r"'model' is not a state dict of Megatron Core"),
    (experts, r"expert_model_parallel_size=2; files of expert parallelism are not supported"),
    (expert_folder, r"mp_rank_01_001_000: expected mp_rank_TT, or mp_rank_TT_PPP"),
    (more_chunks, r"mp_rank_00_001/.*: 2 chunks of the model; expected 1"),
    (twice, r"embedding\.word_embeddings\.weight is in an earlier stage too"),
    (untie, r"tensor output_layer\.weight of shape \(32, 24\) is not that of .*mp_rank_00_000"),
    (move, r"iter_0000020: there are no mp_rank_NN folders .* says '20'"),
]


@pytest.mark.parametrize(("damage", "message"), WRONG, ids=[each.__name__ for each, _ in WRONG])
def test_a_wrong_file_is_named_and_nothing_is_written(tmp_path, damage, message):
    path = save(tmp_path / "in", hugging_face(), arguments())
    damage(path)
    for write in (
        lambda out: reshard(path, out, tp=1),
        lambda out: save_huggingface(path, out),
    ):
        with pytest.raises(ParallelError, match=message):
            write(tmp_path / "out")
        assert [each.name for each in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"apply_layernorm_1p": True}, r"apply_layernorm_1p=True: norms that add 1"),
        ({"rotary_interleaved": True, "rotary_percent": 0.5}, r"rotary_percent=0\.5: interleaved"),
    ],
)
def test_what_hugging_faces_llama_has_not(tmp_path, said, message):
    path = save(tmp_path / "in", hugging_face(), arguments(**said))
    with pytest.raises(ParallelError, match=message):
        save_huggingface(path, tmp_path / "out")
    save_huggingface(path, tmp_path / "out", names="keep")


def test_deepspeeds_files_are_not_megatrons(tmp_path):
    torch.save({"module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(ParallelError, match=r"not a checkpoint of a known format"):
        open_source(tmp_path)


def test_options_that_do_not_fit(tmp_path):
    path = save(tmp_path / "in", hugging_face(), arguments())
    with pytest.raises(ParallelError, match=r"vocab_size=65; expected 1 to 64: .*word_embeddings"):
        reshard(path, tmp_path / "out", tp=1, vocab_size=65)
    with pytest.raises(DegreeError, match=r"layers\.0.* does not divide: .*over degree 5"):
        reshard(path, tmp_path / "out", tp=5)
    change_all(path, lambda held: setattr(held["args"], "num_query_groups", 4))
    with pytest.raises(
        ParallelError, match=r"linear_qkv\.weight has 64 rows; .* 2 x 4 groups of 8"
    ):
        save_huggingface(path, tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["in"]
