"""Hugging Face's layout: ``model-00001-of-00002.safetensors``, ... and an index, or one file.

Names and splits are those of transformers' ``modeling_llama.py`` (and its `base_model_tp_plan`),
read in 2026; full tensors of other formats' names are split as those say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ezpz_tp._errors import ParallelError
from ezpz_tp._shard import Entry, parameter_of

from . import (
    COLUMN,
    GATED,
    ROW,
    VOCABULARY,
    WHOLE,
    Format,
    Options,
    Rows,
    Source,
    Split,
    Splits,
    StoredPieces,
    all_splits,
    stretches_of,
    unknown,
)
from .safetensors import TensorFile, TensorWriter

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

HUGGINGFACE: dict[str, Split] = {
    "*embed_tokens.weight": VOCABULARY,
    "*lm_head.weight": VOCABULARY,
    "*lm_head.bias": VOCABULARY,
    "*.[qkv]_proj.weight": COLUMN,
    "*.[qkv]_proj.bias": COLUMN,
    "*.gate_proj.weight": COLUMN,
    "*.gate_proj.bias": COLUMN,
    "*.up_proj.weight": COLUMN,
    "*.up_proj.bias": COLUMN,
    "*.gate_up_proj.weight": GATED,
    "*.gate_up_proj.bias": GATED,
    "*.o_proj.weight": ROW,
    "*.o_proj.bias": WHOLE,
    "*.down_proj.weight": ROW,
    "*.down_proj.bias": WHOLE,
    "*norm.weight": WHOLE,
    "*norm.bias": WHOLE,
    "*.rotary_emb.inv_freq": WHOLE,
}


def _recognizes(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".safetensors"
    return (path / INDEX).is_file() or (path / SINGLE).is_file()


def _open(path: Path, options: Options) -> Source:
    splits = Splits(all_splits(), options)
    source, lost = StoredPieces(), dict[str, tuple[int, ...]]()
    for name, file in _files(path).items():
        stored = file.tensors[name]
        shard = splits.shard(name, stored.shape)
        if shard is None:
            lost[name] = stored.shape
        else:
            source.add_whole(Entry(name, stored.dtype, shard), partial(file.read, name))
    if lost:
        raise unknown(path, lost)
    return source


FORMAT = Format("Hugging Face's safetensors", _recognizes, _open, HUGGINGFACE)


def _files(path: Path) -> dict[str, TensorFile]:
    """Return the file of each tensor, in the order of the index or of the file."""
    index = path / INDEX
    if not index.is_file():
        file = TensorFile.open(path if path.is_file() else path / SINGLE)
        return dict.fromkeys(file.tensors, file)
    names = load_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ParallelError(f"{index}: has no weight_map; expected names of files by tensor")
    files = {name: TensorFile.open(path / name) for name in dict.fromkeys(names.values())}
    for name, file in names.items():
        if name not in files[file].tensors:
            raise ParallelError(
                f"{path / file}: has no tensor {name}, which {INDEX} says is in it; the files are "
                "of different models: copy the folder again"
            )
    for file, opened in files.items():
        for name, stored in opened.tensors.items():
            if names.get(name) != file:
                raise ParallelError(
                    f"{path / file}: has a tensor {name} of shape {stored.shape}, which {INDEX} "
                    f"says is in {names.get(name, 'no file')}; the files are of different models: "
                    "copy the folder again"
                )
    return {name: files[file] for name, file in names.items()}


def load_object(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds."""
    try:
        said = json.loads(file.read_bytes())
    except ValueError as error:
        raise ParallelError(f"{file}: not JSON: {error}") from error
    if not isinstance(said, dict):
        raise ParallelError(f"{file}: holds a {type(said).__name__}; expected a JSON object")
    return said


# Writing.


def write_huggingface(source: Source, folder: Path, max_shard_size: int) -> None:
    """Write full tensors, but for an optimizer's, into a folder."""
    entries = [entry for name, entry in source.entries.items() if parameter_of(name)[1] is None]
    files = _in_files(entries, max_shard_size)
    where: dict[str, str] = {}
    for number, found in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_full(source, found, folder / (SINGLE if len(files) == 1 else file))
        where |= {entry.name: file for entry in found}
    if len(files) > 1:
        total = sum(entry.nbytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _in_files(entries: list[Entry], max_shard_size: int) -> list[list[Entry]]:
    """Return the tensors of each file: as many, in order, as do not exceed a size."""
    files: list[list[Entry]] = [[]]
    held = 0
    for entry in entries:
        size = entry.nbytes
        if files[-1] and held + size > max_shard_size:
            files.append([])
            held = 0
        files[-1].append(entry)
        held += size
    return files


def _write_full(source: Source, entries: list[Entry], path: Path) -> None:
    tensors = {entry.name: (entry.dtype, entry.shard.full_shape) for entry in entries}
    with TensorWriter(path, tensors, {"format": "pt"}) as writer:
        for entry in entries:
            dim = entry.shard.dim or 0
            length = entry.shard.size if entry.shard.full_shape else 1
            for start, part in stretches_of(source, entry, 0, length):
                writer.write(entry.name, part, dim, start)


# Names and rows of Llama-like models, for the formats that have others.


def head_rows(number: int, size: int, *, interleaved: bool) -> list[Rows]:
    """Return a head's rows as Hugging Face has them."""
    # There rotary embedding turns channel i with channel i + size / 2; where it is interleaved,
    # it turns 2i with 2i + 1: the even ones first, then the odd ones, makes the same.
    start = number * size
    if not interleaved:
        return [Rows(start, size)]
    return [Rows(start, size // 2, 2), Rows(start + 1, size // 2, 2)]


def layer_of(name: str) -> str:
    return str(_NUMBER.findall(name)[0])


def translated(name: str, table: Mapping[str, str]) -> str:
    module, _, kind = name.replace(".layer_norm_", ".layer_norm.").rpartition(".")
    numbers = _NUMBER.findall(module)
    new = table.get(_NUMBER.sub("{}", module))
    if new is None:
        raise ParallelError(
            f"tensor {name} has no counterpart in Hugging Face's Llama; keep the names "
            '(names="keep"), or give a function of names'
        )
    return f"{new.format(*numbers)}.{kind}"
