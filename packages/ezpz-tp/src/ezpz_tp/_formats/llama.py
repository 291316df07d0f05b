"""Meta's Llama: ``consolidated.00.pth``, ``consolidated.01.pth``, ... beside a ``params.json``.

One file for each tensor-parallel rank, a flat state dict, as fairscale's layers hold it. Llama 1
and 2 split the embedding along its columns, Llama 3 along its rows (the vocabulary). Names are
those of Meta's ``llama/model.py`` and ``llama_models``, read in 2026.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ezpz_tp._errors import ParallelError

from . import (
    Format,
    Options,
    Source,
    Split,
    Stored,
    Way,
    format_of,
    join,
    load_json,
    new_folder,
    open_source,
    same_names,
    splits,
    values_of,
)
from .huggingface import head_rows, translated
from .torch_file import TorchFile, write_torch_file

_FILE = re.compile(r"consolidated\.(\d+)\.pth")
_EMBEDDING = "tok_embeddings.weight"

LLAMA = splits(
    vocabulary="tok_embeddings.weight output.weight",
    columns="layers.*.attention.w[qkv].weight layers.*.feed_forward.w[13].weight",
    rows="layers.*.attention.wo.weight layers.*.feed_forward.w2.weight",
    whole="layers.*_norm.weight norm.weight rope.freqs",
)

FROM_LLAMA = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.attention.wq": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.wk": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.wv": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.wo": "model.layers.{}.self_attn.o_proj",
    "layers.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.feed_forward.w1": "model.layers.{}.mlp.gate_proj",
    "layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",
    "layers.{}.feed_forward.w3": "model.layers.{}.mlp.up_proj",
}
"""Modules, by Hugging Face's names; ``{}`` is the number of a layer."""


def _recognizes(path: Path) -> bool:
    return path.is_dir() and any(_FILE.fullmatch(entry.name) for entry in path.iterdir())


def _open(path: Path, options: Options) -> Source:
    files = [TorchFile(file) for file in _files(path)]
    tensors = [file.tensors(file.dict_of("a state dict")) for file in files]
    for file, found in zip(files, tensors, strict=True):
        if not found:
            raise ParallelError(f"{file.path}: holds no tensors; expected a state dict")
    params = path / "params.json"
    source = Source({"said": load_json(params) if params.is_file() else {}})
    table = _table(files, tensors[0])
    same_names([file.path for file in files], tensors)
    for name in tensors[0]:
        join(source, name, [found[name] for found in tensors], table, options)
    return source.checked(path)


def _files(path: Path) -> list[Path]:
    numbers = sorted(int(m[1]) for entry in path.iterdir() if (m := _FILE.fullmatch(entry.name)))
    for expected, number in enumerate(numbers):
        if number != expected:
            raise ParallelError(
                f"{path / file_name(expected)}: there is no such file, but there "
                f"is {file_name(number)}; expected one for each of {numbers[-1] + 1} ranks"
            )
    return [path / file_name(number) for number in numbers]


def file_name(number: int) -> str:
    return f"consolidated.{number:02d}.pth"


def _table(files: list[TorchFile], tensors: dict[str, Stored]) -> dict[str, Split]:
    degree, first = len(files), files[0].path
    for name, tensor in tensors.items():
        if name.endswith(".attention.wo.weight") and len(tensor.shape) == 2:
            rows, columns = tensor.shape  # heads make up the model's width
            if columns * degree < rows:
                raise ParallelError(
                    f"{first.parent}: {degree} files, in which tensor {name} has shape "
                    f"{tensor.shape}; expected ({rows}, {rows // degree}), or {rows // columns} "
                    f"files: {file_name(degree)} is missing"
                )
            break
    embedding, norm = tensors.get(_EMBEDDING), tensors.get("norm.weight")
    if embedding is None or norm is None or degree == 1:
        return LLAMA
    width = math.prod(norm.shape)
    if embedding.shape[-1:] == (width,):
        return LLAMA
    if math.prod(embedding.shape[-1:]) * degree == width:  # the dim that is not the model's own
        return {**LLAMA, _EMBEDDING: Split(1)}
    raise ParallelError(
        f"{first}: tensor {_EMBEDDING} has shape {embedding.shape} in one of {degree} files; "
        f"expected {width} columns, or {width} / {degree}, as norm.weight is of {width}: a file is "
        "missing, or is another model's"
    )


def _as_huggingface(source: Source) -> Source:
    params, made = source.metadata["said"], Source()
    for name, entry in source.entries.items():
        if name == "rope.freqs":
            continue  # it is computed
        rows: list[range] = []
        if name.endswith((".wq.weight", ".wk.weight")):
            grouped = name.endswith(".wk.weight") and "n_kv_heads" in params
            key = "n_kv_heads" if grouped else "n_heads"
            heads, size = params.get(key) or 0, entry.shard.full_shape[0]
            if heads < 1 or size % (2 * heads):
                raise ParallelError(
                    f"tensor {name} has {size} rows; expected an even number for each of {heads} "
                    f"heads, as params.json's {key} says"
                )
            for head in range(heads):
                rows += head_rows(head, size // heads, interleaved=True)
        made.take(source, name, translated(name, FROM_LLAMA), rows)
    return made


FORMAT = Format("Meta's consolidated.NN.pth", _recognizes, _open, LLAMA, _as_huggingface)


def save_llama(
    path_in: str | Path, path_out: str | Path, *, tp: int, plan: Mapping[str, Way] | None = None
) -> None:
    """Write Meta's Llama files again, for another number of ranks, to a new folder.

    ``consolidated.00.pth`` and so on, and a copy of ``params.json``. In one process, a tensor's
    part at a time.

    Args:
        path_in: A folder of such files.
        path_out: A folder; there is none yet, or an empty one.
        tp: The number of tensor-parallel ranks, and of files.
        plan: As of `reshard`. A single file does not tell how Meta's code splits the embedding.
            It is along its rows, as of Llama 3. ``{"tok_embeddings.weight": 1}`` says that it is
            along its columns, as of Llama 1 and 2.

    Raises:
        DegreeError: ``tp`` does not divide a dim that is split.
        ParallelError: A file is missing, truncated or does not fit the others. Nothing is written
            then.
    """
    if format_of(Path(path_in)) is not FORMAT:
        raise ParallelError(f"{path_in}: expected Meta's consolidated.NN.pth and params.json")
    source = open_source(path_in, Options(plan))
    with new_folder(path_out) as folder:
        _write(source, folder, tp)
        params = Path(path_in) / "params.json"
        if params.is_file():
            (folder / params.name).write_bytes(params.read_bytes())


def _write(source: Source, folder: Path, tp: int) -> None:
    for index in range(tp):
        tensors = {}
        for name, padded in source.entries.items():
            # Here nothing is padded.
            entry = replace(padded, shard=replace(padded.shard, blocks=(), padded=False))
            shape = entry.local_shape(index, tp)
            boxes = [box for _, box in entry.shard.boxes(index, tp)]
            tensors[name] = entry.dtype, shape, values_of(source, name, *boxes)
        write_torch_file(folder / file_name(index), tensors)
