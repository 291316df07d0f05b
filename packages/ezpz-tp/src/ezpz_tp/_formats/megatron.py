"""Megatron-LM's files: ``iter_0000010/mp_rank_01_000/model_optim_rng.pt`` for each model rank.

Of ``--ckpt-format torch``: the directory's name has the tensor rank and, with a pipeline, the
stage; the file has ``model``, or ``model0``, ``model1``, ... for the chunks of an interleaved
schedule, in which layers are numbered from 0 in every chunk (megatron/training/checkpointing.py).
The weights are read; optimizer and random state are not. Names are those of Megatron-LM's
``megatron/core/models/gpt`` and ``tools/checkpoint/schema_core.py``, read in 2026.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ezpz_tp._errors import ParallelError
from ezpz_tp._shard import Entry

from . import Format, Options, Source, Stored, check_equal, join, same_names, splits
from .huggingface import NUMBER, head_rows, translated
from .torch_file import TorchFile

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_LATEST = "latest_checkpointed_iteration.txt"
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_LAYER = re.compile(r"(?<=(?:de|en)coder\.layers\.)\d+(?=\.)")
_TIED = "output_layer.weight"
_EMBEDDING = "embedding.word_embeddings.weight"

# Not linear_fc1: one matrix, or a gate above an up projection, as the arguments say.
MEGATRON = splits(
    vocabulary="*embedding.word_embeddings.weight *output_layer.weight *output_layer.bias",
    columns="*.linear_qkv.weight *.linear_qkv.bias",
    rows="*.linear_proj.weight *.linear_fc2.weight",
    whole="*embedding.position_embeddings.weight *.linear_proj.bias *.linear_fc2.bias "
    "*layernorm.weight *layernorm.bias *.layer_norm_weight *.layer_norm_bias "
    "*.rotary_pos_emb.inv_freq *.router.weight *.router.expert_bias",
)

FROM_MEGATRON = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
    "decoder.layers.{}.input_layernorm": "model.layers.{}.input_layernorm",
    "decoder.layers.{}.self_attention.linear_qkv.layer_norm": "model.layers.{}.input_layernorm",
    "decoder.layers.{}.self_attention.linear_proj": "model.layers.{}.self_attn.o_proj",
    "decoder.layers.{}.self_attention.q_layernorm": "model.layers.{}.self_attn.q_norm",
    "decoder.layers.{}.self_attention.k_layernorm": "model.layers.{}.self_attn.k_norm",
    "decoder.layers.{}.pre_mlp_layernorm": "model.layers.{}.post_attention_layernorm",
    "decoder.layers.{}.mlp.linear_fc1.layer_norm": "model.layers.{}.post_attention_layernorm",
    "decoder.layers.{}.mlp.linear_fc2": "model.layers.{}.mlp.down_proj",
}
"""Modules of GPT, but for those that are two or three of Hugging Face's."""


def _recognizes(path: Path) -> bool:
    return path.is_dir() and ((path / _LATEST).is_file() or bool(_ranks(path)))


def _open(path: Path, options: Options) -> Source:
    folder = path if _ranks(path) else _latest(path)
    stages = _stages(folder)
    args = _arguments(stages[0][0])
    tied = not args.get("untie_embeddings_and_output_weights", True)
    embedding: list[Stored] = []
    gates = [args[name] for name in ("swiglu", "gated_linear_unit") if name in args]
    way = "gated" if any(gates) else "columns"
    table = MEGATRON | (splits(**{way: "*.linear_fc1.weight *.linear_fc1.bias"}) if gates else {})
    source = Source({"said": args})
    for name, parts in _in_order(stages):
        file = parts[0].path
        if name in source.entries:
            raise ParallelError(
                f"{file}: tensor {name} is in an earlier stage too; expected each tensor on one "
                "stage, but for a tied output layer"
            )
        if name == _EMBEDDING:
            embedding = parts
        if name == _TIED and tied:  # the last stage's copy of the embedding
            if not embedding:
                raise ParallelError(
                    f"{file}: tensor {name} is tied to {_EMBEDDING}, as the arguments say, which "
                    "no stage has"
                )
            for copies in zip(embedding, parts, strict=True):
                check_equal(name, copies)
        else:
            join(source, name, parts, table, options)
    return source.checked(folder)


def _ranks(folder: Path) -> dict[tuple[int, int], Path]:
    found: dict[tuple[int, int], Path] = {}
    for entry in filter(Path.is_dir, folder.iterdir() if folder.is_dir() else ()):
        if match := _RANK.fullmatch(entry.name):
            found[int(match[1]), int(match[2] or 0)] = entry
        elif entry.name.startswith("mp_rank_"):
            raise ParallelError(
                f"{entry}: expected mp_rank_TT, or mp_rank_TT_PPP; files of expert parallelism "
                "are not supported"
            )
    return found


def _latest(path: Path) -> Path:
    word = (path / _LATEST).read_text().strip()
    folder = path / (f"iter_{int(word):07d}" if word.isdecimal() else word)
    if not _ranks(folder):
        raise ParallelError(
            f"{folder}: there are no mp_rank_NN folders in it, but {path / _LATEST} says {word!r}; "
            "expected files of --ckpt-format torch (others are torch.distributed.checkpoint's)"
        )
    return folder


def _stages(folder: Path) -> list[list[TorchFile]]:
    ranks = _ranks(folder)
    some = _file(next(iter(ranks.values())))
    args = _arguments(some)
    if (experts := args.get("expert_model_parallel_size") or 1) != 1:
        raise ParallelError(
            f"{some.path}: expert_model_parallel_size={experts}; files of expert parallelism are "
            "not supported"
        )
    # Of a degree that the arguments do not say, what is there is all.
    tensor = args.get("tensor_model_parallel_size") or 1 + max(index for index, _ in ranks)
    pipeline = args.get("pipeline_model_parallel_size") or 1 + max(stage for _, stage in ranks)
    if len(ranks) > tensor * pipeline:
        raise ParallelError(
            f"{folder}: {len(ranks)} mp_rank folders; expected {tensor * pipeline}, as its "
            f"arguments say tensor {tensor} x pipeline {pipeline}"
        )
    end = "_{:03d}" if pipeline > 1 else ""
    return [
        [
            _file(ranks.get((index, stage), folder / f"mp_rank_{index:02d}{end.format(stage)}"))
            for index in range(tensor)
        ]
        for stage in range(pipeline)
    ]


def _file(folder: Path) -> TorchFile:
    found = [folder / name for name in _FILES if (folder / name).exists()]
    file = TorchFile(found[0] if found else folder / _FILES[0])
    file.dict_of("a dict with 'model'")
    return file


def _arguments(file: TorchFile) -> dict[str, Any]:
    args = file.contents.get("args")
    version = file.contents.get("checkpoint_version", 3.0)
    if isinstance(version, (int, float)) and version < 2.0:
        raise ParallelError(
            f"{file.path}: checkpoint_version {version}, whose queries, keys and values are in "
            "another order; expected 2.0 or later: load and save it by Megatron-LM"
        )
    return dict(vars(args)) if hasattr(args, "__dict__") else dict(args or {})


def _chunks(files: list[TorchFile]) -> list[list[dict[str, Stored]]]:
    keys = [key for key in files[0].contents if re.fullmatch(r"model\d*", str(key))]
    if not keys:
        raise ParallelError(
            f"{files[0].path}: has {', '.join(map(repr, files[0].contents))}; expected 'model'"
        )
    chunks = []
    for key in sorted(keys, key=lambda key: int(key.removeprefix("model") or 0)):
        chunks.append([_tensors(file, key) for file in files])
        same_names([file.path for file in files], chunks[-1], f", {key!r}")
    return chunks


def _tensors(file: TorchFile, key: str) -> dict[str, Stored]:
    if key not in file.contents:
        raise ParallelError(
            f"{file.path}: has no {key!r}, only {', '.join(map(repr, file.contents))}; expected "
            "the keys that the files of the same stage have"
        )
    model = file.contents[key]
    if not isinstance(model, dict) or any(isinstance(value, dict) for value in model.values()):
        raise ParallelError(
            f"{file.path}: {key!r} is not a state dict of Megatron Core; expected names such as "
            f"{_EMBEDDING}: load and save it by a Megatron-LM of 2024 or later"
        )
    return file.tensors(model)


def _in_order(stages: list[list[TorchFile]]) -> Iterator[tuple[str, list[Stored]]]:
    """Yield each tensor's name in the whole model and its parts, in the model's order."""
    chunks = [_chunks(files) for files in stages]
    for files, found in zip(stages, chunks, strict=True):
        if len(found) != len(chunks[0]):
            raise ParallelError(
                f"{files[0].path}: {len(found)} chunks of the model; expected {len(chunks[0])}, as "
                f"{stages[0][0].path} has"
            )
    layers = 0  # before the chunk, in each of which they are numbered from 0
    for chunk in (chunk for turn in zip(*chunks, strict=True) for chunk in turn):
        last = -1
        for local in chunk[0]:
            name = local
            if match := _LAYER.search(local):
                number = int(match[0])
                last = max(last, number)
                name = f"{local[: match.start()]}{layers + number}{local[match.end() :]}"
            yield name, [held[local] for held in chunk]
        layers += 1 + last


# As Hugging Face has it.


def _as_huggingface(source: Source) -> Source:
    args, made = source.metadata["said"], Source()
    refused = {"apply_layernorm_1p": "norms that add 1 to their weights"}
    if args.get("rotary_interleaved") and args.get("rotary_percent", 1.0) != 1.0:
        refused["rotary_percent"] = "interleaved rotary embedding of some channels only"
    for name, what in refused.items():
        if args.get(name):
            raise ParallelError(
                f"the arguments say {name}={args[name]}: {what} are not what Hugging Face's Llama "
                'has; keep the names (names="keep"), or give a function of names'
            )
    for name, entry in source.entries.items():
        if ".linear_qkv." in name and "layer_norm" not in name:
            parts = _unfused(entry, args)
        elif name.endswith((".linear_fc1.weight", ".linear_fc1.bias")):
            if len(entry.shard.blocks) != 2:
                raise ParallelError(
                    f"{name} is one matrix; Hugging Face's Llama has a gate and an up projection. "
                    'Keep the names (names="keep"), or give a function of names'
                )
            half = entry.shard.blocks[0]
            parts = {"mlp.gate_proj": [range(half)], "mlp.up_proj": [range(half, 2 * half)]}
        else:
            made.take(source, name, translated(name, FROM_MEGATRON))
            continue
        layer, kind = NUMBER.findall(name)[0], name.rpartition(".")[2]
        for module, rows in parts.items():
            made.take(source, name, f"model.layers.{layer}.{module}.{kind}", rows)
    return made


def _unfused(entry: Entry, args: Mapping[str, Any]) -> dict[str, list[range]]:
    """Return the rows of queries, keys and values: each group is its queries, key and value."""
    heads: int = args.get("num_attention_heads") or 0
    grouped = args.get("group_query_attention")
    groups: int = (args.get("num_query_groups") or 0) if grouped else heads
    size = entry.shard.full_shape[0]
    each: int = args.get("kv_channels") or args.get("hidden_size", 0) // max(1, heads)
    if not heads or not groups or heads % groups or size != (heads + 2 * groups) * each:
        raise ParallelError(
            f"tensor {entry.name} has {size} rows; expected those of {heads} heads and 2 x "
            f"{groups} groups of {each} channels, as the arguments num_attention_heads, "
            "num_query_groups and kv_channels say"
        )
    per, interleaved = heads // groups, bool(args.get("rotary_interleaved"))
    queries, keys, values = list[range](), list[range](), list[range]()
    for first in range(0, groups * (per + 2), per + 2):
        for head in range(first, first + per):
            queries += head_rows(head, each, interleaved=interleaved)
        keys += head_rows(first + per, each, interleaved=interleaved)
        values += head_rows(first + per + 1, each, interleaved=False)
    return {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": values}


FORMAT = Format("Megatron-LM's mp_rank_NN", _recognizes, _open, MEGATRON, _as_huggingface)
