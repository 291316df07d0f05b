"""Hugging Face's layout: `model-00001-of-00002.safetensors`, ... and an index, or one file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ezpz_tp._errors import ParallelError
from ezpz_tp._shard import Entry, Shard

from . import ALL, FROM_LLAMA, FROM_MEGATRON, Format, Options, Source, Splits, unknown
from .safetensors import TensorFile
from .torch_file import JoinedTensors

# Hugging Face's layout: ``model-00001-of-00002.safetensors``, ... and an index, or one file.

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class FullTensors:
    """A `Source` of full tensors in safetensors files.

    Attributes:
        entries: The tensors, by name.
        metadata: Nothing.
    """

    def __init__(self, entries: Mapping[str, Entry], files: Mapping[str, TensorFile]) -> None:
        self.entries, self._files = entries, files
        self.metadata: dict[str, Any] = {}

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with a stretch of a full tensor (`Source.read_into`)."""
        self._files[name].read_into(name, self.entries[name].shard.dim or 0, start, out)


def _recognizes(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".safetensors"
    return (path / INDEX).is_file() or (path / SINGLE).is_file()


def open_huggingface(path: Path, options: Options) -> Source:
    """Open a folder, or one file, of full tensors; `open_source` says what is raised."""
    files = _files(path)
    splits = Splits(ALL, options)
    entries: dict[str, Entry] = {}
    lost: dict[str, tuple[int, ...]] = {}
    for name, file in files.items():
        stored = file.tensors[name]
        shard = splits.shard(name, stored.shape)
        if shard is None:
            lost[name] = stored.shape
        else:
            entries[name] = Entry(name, stored.dtype, shard)
    if lost:
        raise unknown(path, lost)
    return FullTensors(entries, files)


FORMAT = Format("Hugging Face's safetensors", _recognizes, open_huggingface)


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
    """Return what a JSON file says.

    Raises:
        ParallelError: It is not an object.
    """
    try:
        said = json.loads(file.read_bytes())
    except ValueError as error:
        raise ParallelError(f"{file}: not JSON: {error}") from error
    if not isinstance(said, dict):
        raise ParallelError(f"{file}: holds a {type(said).__name__}; expected a JSON object")
    return said


# Other names and another order of rows: a `Source` over a `Source`, which copies nothing.

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a tensor: ``count`` of them, from ``start`` on, every ``step``-th."""

    start: int
    count: int
    step: int = 1


class Rearranged:
    """A `Source` whose tensors are another's, or rows of them, under other names."""

    def __init__(self, source: Source) -> None:
        self.entries: dict[str, Entry] = {}
        self._source = source
        self._from: dict[str, tuple[str, tuple[Rows, ...]]] = {}

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the source says."""
        return self._source.metadata

    def add(self, name: str, old: str, rows: tuple[Rows, ...] = ()) -> None:
        """Take a tensor of the source, whole and as it is split; or these rows of it, in order."""
        entry = self._source.entries[old]
        if name in self.entries:
            raise ParallelError(f"{old} and {self._from[name][0]} would both be {name}")
        shard = entry.shard
        if rows:
            if shard.dim:
                raise ParallelError(
                    f"{old} is split along dim {shard.dim}, as the plan says, so that its rows "
                    'cannot be put in another order; leave it out, or keep the names (names="keep")'
                )
            count = sum(each.count for each in rows)
            shard = Shard((count, *shard.full_shape[1:]), 0)
        self.entries[name] = Entry(name, entry.dtype, shard)
        self._from[name] = old, rows

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with a stretch of a full tensor (`Source.read_into`)."""
        old, rows = self._from[name]
        if not rows:
            self._source.read_into(old, start, out)
            return
        stop, begin = start + len(out), 0
        for each in rows:
            first, last = max(start, begin), min(stop, begin + each.count)
            if first < last:
                wanted = out[first - start : last - start]
                at = each.start + (first - begin) * each.step
                if each.step == 1:
                    self._source.read_into(old, at, wanted)
                else:
                    span = (last - first - 1) * each.step + 1
                    held = torch.empty((span, *out.shape[1:]), dtype=out.dtype)
                    self._source.read_into(old, at, held)
                    wanted.copy_(held[:: each.step])
            begin += each.count


def renamed(source: Source, rename: Callable[[str], str]) -> Source:
    """Return a source with other names."""
    made = Rearranged(source)
    for name in source.entries:
        made.add(rename(name), name)
    return made


def as_huggingface(source: Source) -> Source:
    """Return a source with Hugging Face's names, and its order of rows, of Llama-like models.

    Of Meta's and of Megatron-LM's files; any other source is returned as it is.

    Raises:
        ParallelError: A tensor has no counterpart, or its shape is not what the heads make.
    """
    if not isinstance(source, JoinedTensors):
        return source
    return _from_llama(source) if source.form == "llama" else _from_megatron(source)


def _from_llama(source: JoinedTensors) -> Source:
    params, made = source.said, Rearranged(source)
    for name, entry in source.entries.items():
        if name == "rope.freqs":
            continue  # it is computed
        rows: list[Rows] = []
        if name.endswith((".wq.weight", ".wk.weight")):
            key = (
                "n_kv_heads"
                if name.endswith(".wk.weight") and "n_kv_heads" in params
                else "n_heads"
            )
            heads, size = params.get(key) or 0, entry.shard.full_shape[0]
            if heads < 1 or size % (2 * heads):
                raise ParallelError(
                    f"tensor {name} has {size} rows; expected an even number for each of {heads} "
                    f"heads, as params.json's {key} says"
                )
            for head in range(heads):
                rows += _head(head, size // heads, interleaved=True)
        made.add(_translated(name, FROM_LLAMA), name, tuple(rows))
    return made


def _from_megatron(source: JoinedTensors) -> Source:
    args, made = source.said, Rearranged(source)
    _refuse(args, "apply_layernorm_1p", "norms that add 1 to their weights")
    if args.get("rotary_interleaved") and args.get("rotary_percent", 1.0) != 1.0:
        _refuse(args, "rotary_percent", "interleaved rotary embedding of some channels only")
    for name, entry in source.entries.items():
        if ".linear_qkv." in name and "layer_norm" not in name:
            _unfuse(made, source, name, args)
        elif name.endswith((".linear_fc1.weight", ".linear_fc1.bias")):
            if len(entry.shard.blocks) != 2:
                raise ParallelError(
                    f"{name} is one matrix; Hugging Face's Llama has a gate and an up projection. "
                    'Keep the names (names="keep"), or give a function of names'
                )
            half, layer = entry.shard.blocks[0], _layer(name)
            for new, start in (("gate_proj", 0), ("up_proj", half)):
                kind = name.rpartition(".")[2]
                made.add(f"model.layers.{layer}.mlp.{new}.{kind}", name, (Rows(start, half),))
        else:
            made.add(_translated(name, FROM_MEGATRON), name)
    return made


def _refuse(args: Mapping[str, Any], name: str, what: str) -> None:
    if args.get(name):
        raise ParallelError(
            f"the arguments say {name}={args[name]}: {what} are not what Hugging Face's Llama "
            'has; keep the names (names="keep"), or give a function of names'
        )


def _unfuse(made: Rearranged, source: Source, name: str, args: Mapping[str, Any]) -> None:
    """Take queries, keys and values apart: each group is its queries, its key and its value."""
    heads: int = args.get("num_attention_heads") or 0
    groups: int = (
        (args.get("num_query_groups") or 0) if args.get("group_query_attention") else heads
    )
    size = source.entries[name].shard.full_shape[0]
    each: int = args.get("kv_channels") or args.get("hidden_size", 0) // max(1, heads)
    if not heads or not groups or heads % groups or size != (heads + 2 * groups) * each:
        raise ParallelError(
            f"tensor {name} has {size} rows; expected those of {heads} heads and 2 x {groups} "
            f"groups of {each} channels, as the arguments num_attention_heads, num_query_groups "
            "and kv_channels say"
        )
    per, interleaved = heads // groups, bool(args.get("rotary_interleaved"))
    queries: list[Rows] = []
    keys: list[Rows] = []
    values: list[Rows] = []
    for first in range(0, groups * (per + 2), per + 2):
        for head in range(first, first + per):
            queries += _head(head, each, interleaved=interleaved)
        keys += _head(first + per, each, interleaved=interleaved)
        values += _head(first + per + 1, each, interleaved=False)
    layer, kind = _layer(name), name.rpartition(".")[2]
    for new, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", values)):
        made.add(f"model.layers.{layer}.self_attn.{new}.{kind}", name, tuple(rows))


def _head(number: int, size: int, *, interleaved: bool) -> list[Rows]:
    """Return a head's rows as Hugging Face has them.

    There rotary embedding turns channel i with channel i + size / 2; where it is interleaved,
    it turns 2i with 2i + 1: the even ones first, then the odd ones, makes the same.
    """
    start = number * size
    if not interleaved:
        return [Rows(start, size)]
    return [Rows(start, size // 2, 2), Rows(start + 1, size // 2, 2)]


def _layer(name: str) -> str:
    return str(_NUMBER.findall(name)[0])


def _translated(name: str, table: Mapping[str, str]) -> str:
    """Return Hugging Face's name of a tensor."""
    module, _, kind = name.replace(".layer_norm_", ".layer_norm.").rpartition(".")
    numbers = _NUMBER.findall(module)
    new = table.get(_NUMBER.sub("{}", module))
    if new is None:
        raise ParallelError(
            f"tensor {name} has no counterpart in Hugging Face's Llama; keep the names "
            '(names="keep"), or give a function of names'
        )
    return f"{new.format(*numbers)}.{kind}"
