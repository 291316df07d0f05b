"""Hugging Face's layout: ``model-00001-of-00002.safetensors``, ... and an index, or one file.

Names and splits are those of transformers' ``modeling_llama.py`` (and its `base_model_tp_plan`),
read in 2026; full tensors of other formats' names are split as those say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ezpz_tp._errors import ParallelError
from ezpz_tp._shard import parameter_of, whole

from . import (
    Format,
    Options,
    Source,
    Stored,
    Way,
    all_splits,
    format_of,
    load_json,
    new_folder,
    open_source,
    splits,
    values_of,
)
from .safetensors import open_safetensors, write_safetensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

HUGGINGFACE = splits(
    vocabulary="*embed_tokens.weight *lm_head.weight *lm_head.bias",
    columns="*.[qkv]_proj.weight *.[qkv]_proj.bias "
    "*.gate_proj.weight *.gate_proj.bias *.up_proj.weight *.up_proj.bias",
    gated="*.gate_up_proj.weight *.gate_up_proj.bias",
    rows="*.o_proj.weight *.down_proj.weight",
    whole="*.o_proj.bias *.down_proj.bias *norm.weight *norm.bias *.rotary_emb.inv_freq",
)


def _recognizes(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".safetensors"
    return (path / INDEX).is_file() or (path / SINGLE).is_file()


def _open(path: Path, options: Options) -> Source:
    table, source = all_splits(), Source()
    for name, stored in _tensors(path).items():
        pieces = [(whole(stored.shape), stored)]
        source.add(name, stored.dtype, options.shard(table, name, stored.shape), pieces)
    return source.checked(path)


FORMAT = Format("Hugging Face's safetensors", _recognizes, _open, HUGGINGFACE)


def _tensors(path: Path) -> Mapping[str, Stored]:
    """Return the tensors of all files, in the order of the index or of the file."""
    index = path / INDEX
    if not index.is_file():
        return open_safetensors(path if path.is_file() else path / SINGLE)[0]
    names = load_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ParallelError(f"{index}: has no weight_map; expected names of files by tensor")
    files = {file: open_safetensors(path / file)[0] for file in dict.fromkeys(names.values())}
    said = [(file, name) for name, file in names.items()]
    held = [(file, name) for file, tensors in files.items() for name in tensors]
    for file, name in [*said, *held]:
        if name not in files[file]:
            what = f"no tensor {name}, which {INDEX} says is in it"
        elif names.get(name) != file:
            what = f"a tensor {name} of shape {files[file][name].shape}, which {INDEX} says is in "
            what += names.get(name, "no file")
        else:
            continue
        raise ParallelError(
            f"{path / file}: has {what}; the files are of different models: copy the folder again"
        )
    return {name: files[file][name] for file, name in said}


def save_huggingface(
    path_in: str | Path,
    path_out: str | Path,
    *,
    names: str | Callable[[str], str] = "huggingface",
    max_shard_size: int = 5_000_000_000,
    plan: Mapping[str, Way] | None = None,
    vocab_size: int | None = None,
) -> None:
    """Write the full tensors of a model to a new folder, in Hugging Face's layout.

    ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on with their index. In
    one process, without process groups, and a piece of a tensor at a time. An optimizer's tensors
    are left out. ``config.json`` and the tokenizer are not made.

    Queries, keys and values of Megatron-LM's files are separated by their groups, and so are gate
    and up projections. The rows of queries and keys of Meta's files are put in the order of
    Hugging Face's rotary embedding.

    Args:
        path_in: As of `reshard`, or a step's folder of ezpz_dist's checkpoints.
        path_out: A folder; there is none yet, or an empty one.
        names: ``huggingface`` translates the names of Megatron-LM's and Meta's files and leaves
            others; ``keep`` leaves all, and the order of rows; a function gives a name for each.
        max_shard_size: Bytes of tensors in a file; a larger tensor has one of its own.
        plan: As of `reshard`: how tensors of files with unknown names are split.
        vocab_size: The vocabulary without Megatron-LM's padding.

    Raises:
        ParallelError: A file is missing, truncated or does not fit the others, or a tensor has no
            name there. Nothing is written then.
    """
    source = open_source(path_in, Options(plan, vocab_size))
    if callable(names):
        made = Source()
        for name in source.entries:
            made.take(source, name, names(name))
        source = made
    elif names == "huggingface":
        translate = format_of(Path(path_in)).as_huggingface
        source = translate(source) if translate else source
    elif names != "keep":
        raise ParallelError(f"names={names!r}; expected 'huggingface', 'keep' or a function")
    with new_folder(path_out) as folder:
        _write(source, folder, max_shard_size)


def _write(source: Source, folder: Path, max_shard_size: int) -> None:
    entries = {name: one for name, one in source.entries.items() if parameter_of(name)[1] is None}
    files: list[list[str]] = [[]]
    total = held = 0
    for name, entry in entries.items():  # as many in a file, in order, as do not exceed the size
        if files[-1] and held + entry.nbytes > max_shard_size:
            files.append([])
            held = 0
        files[-1].append(name)
        held, total = held + entry.nbytes, total + entry.nbytes
    where: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SINGLE
        tensors = {}
        for name in names:
            shape = entries[name].shard.full_shape
            tensors[name] = entries[name].dtype, shape, values_of(source, name, whole(shape))
        write_safetensors(folder / file, tensors, {"format": "pt"})
        where |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


# Names and rows of Llama-like models, for the formats that have others.


def head_rows(number: int, size: int, *, interleaved: bool) -> list[range]:
    """Return a head's rows as Hugging Face has them."""
    # There rotary embedding turns channel i with channel i + size / 2; where it is interleaved,
    # it turns 2i with 2i + 1: the even ones first, then the odd ones, makes the same.
    rows = range(number * size, (number + 1) * size)
    return [rows[::2], rows[1::2]] if interleaved else [rows]


def translated(name: str, table: Mapping[str, str]) -> str:
    module, _, kind = name.replace(".layer_norm_", ".layer_norm.").rpartition(".")
    numbers = NUMBER.findall(module)
    if (new := table.get(NUMBER.sub("{}", module))) is None:
        raise ParallelError(
            f"tensor {name} has no counterpart in Hugging Face's Llama; keep the names "
            '(names="keep"), or give a function of names'
        )
    return f"{new.format(*numbers)}.{kind}"
