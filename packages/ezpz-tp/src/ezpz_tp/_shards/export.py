"""Writes full tensors as Hugging Face has them, and shards as Meta's Llama has them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ezpz_tp._errors import ParallelError

from .folder import new_folder
from .formats import open_source
from .huggingface import INDEX, SINGLE
from .joined import JoinedTensors
from .llama import file_name
from .plan import Way
from .rearranged import as_huggingface, renamed
from .safetensors import TensorWriter
from .source import Entry, Options, Source, parameter_of
from .spec import Shard
from .torch_writer import write_torch_file

_PIECE = 64 << 20
"""Bytes of a tensor that are held at a time."""


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

    From Megatron-LM's files queries, keys and values are taken apart by their groups, and gate
    and up projections; from Meta's, the rows of queries and keys are put in the order that Hugging
    Face's rotary embedding has.

    Args:
        path_in: Shards of this package, of Megatron-LM (``mp_rank_NN``) or of Meta's Llama
            (``consolidated.NN.pth``), or full tensors in safetensors files.
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
        source = renamed(source, names)
    elif names == "huggingface":
        source = as_huggingface(source)
    elif names != "keep":
        raise ParallelError(f"names={names!r}; expected 'huggingface', 'keep' or a function")
    entries = [entry for name, entry in source.entries.items() if parameter_of(name)[1] is None]
    files = _in_files(entries, max_shard_size)
    with new_folder(path_out) as folder:
        where: dict[str, str] = {}
        for number, found in enumerate(files, 1):
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            _write_full(source, found, folder / (SINGLE if len(files) == 1 else file))
            where |= {entry.name: file for entry in found}
        if len(files) > 1:
            total = sum(entry.nbytes for entry in entries)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def save_llama(
    path_in: str | Path, path_out: str | Path, *, tp: int, plan: Mapping[str, Way] | None = None
) -> None:
    """Write Meta's Llama files anew for another number of ranks, to a new folder.

    ``consolidated.00.pth`` and so on, and a copy of ``params.json``. In one process, a tensor's
    part at a time.

    Args:
        path_in: A folder of such files.
        path_out: A folder; there is none yet, or an empty one.
        tp: The number of tensor-parallel ranks, and of files.
        plan: As of `reshard`. A single file does not tell how Meta's code splits the embedding:
            along its rows, as of Llama 3, unless ``{"tok_embeddings.weight": 1}`` says that it
            is along its columns, as of Llama 1 and 2.

    Raises:
        DegreeError: ``tp`` does not divide a dim that is split.
        ParallelError: A file is missing, truncated or does not fit the others. Nothing is written
            then.
    """
    source = open_source(path_in, Options(plan))
    if not isinstance(source, JoinedTensors) or source.form != "llama":
        raise ParallelError(f"{path_in}: expected Meta's consolidated.NN.pth and params.json")
    entries: dict[str, Entry] = {}
    for name, entry in source.entries.items():
        # Here nothing is padded.
        entries[name] = replace(entry, shard=Shard(entry.shard.full_shape, entry.shard.dim))
        entries[name].check(tp)
    with new_folder(path_out) as folder:
        for index in range(tp):
            tensors = {
                name: (entry.dtype, entry.shard.local_shape(index, tp))
                for name, entry in entries.items()
            }
            parts = functools.partial(_parts, source, entries, index, tp)
            write_torch_file(folder / file_name(index), tensors, parts)
        params = Path(path_in) / "params.json"
        if params.is_file():
            (folder / params.name).write_bytes(params.read_bytes())


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
            for start, part in _stretches(source, entry, 0, length):
                writer.write(entry.name, part, dim, start)


def _parts(
    source: Source, entries: Mapping[str, Entry], index: int, tp: int, name: str
) -> Iterator[Tensor]:
    """Yield a rank's part of a tensor, in memory order."""
    entry = entries[name]
    ((_, start, length),) = entry.shard.pieces(index, tp) or ((0, 0, 0),)
    if entry.shard.dim:  # not the first dim: a part of what lies in between each row
        out = torch.empty(entry.shard.local_shape(index, tp), dtype=entry.dtype)
        source.read_into(name, start, out)
        yield out
        return
    for _, part in _stretches(source, entry, start, length):
        yield part


def _stretches(
    source: Source, entry: Entry, start: int, length: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield where a stretch of a tensor begins, and its values, a piece at a time."""
    shape, dim = entry.shard.full_shape, entry.shard.dim or 0
    step = max(1, _PIECE * entry.shard.size // max(1, entry.nbytes) if shape else 1)
    for first in range(start, start + length, step):
        count = min(step, start + length - first)
        held = (*shape[:dim], count, *shape[dim + 1 :]) if shape else ()
        out = torch.empty(held, dtype=entry.dtype)
        source.read_into(entry.name, first, out)
        yield first, out
