"""From files to files: for other degrees, or in another format; one process, a piece at a time."""

from __future__ import annotations

import functools
import json
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ezpz_tp._shard import Entry, Held, parameter_of

from ._errors import DegreeError, ParallelError
from ._formats import Format, Options, Source, Way, huggingface, llama, megatron, shards
from ._formats.huggingface import INDEX, SINGLE, as_huggingface, renamed
from ._formats.safetensors import TensorWriter, name_of
from ._formats.shards import KEPT, Index, file_name, plain
from ._formats.stretches import new_folder
from ._formats.torch_file import JoinedTensors, write_torch_file
from ._shard import Shard

# The formats of files that can be read: one table.

FORMATS: tuple[Format, ...] = (
    shards.FORMAT,
    llama.FORMAT,
    megatron.FORMAT,
    huggingface.FORMAT,
)
"""In the order in which they are tried."""


def open_source(path: str | Path, options: Options | None = None) -> Source:
    """Open files of a model, of whichever format they are.

    Headers are read; of Meta's and Megatron-LM's files also what every rank holds whole, to see
    that it is the same in all of them.

    Raises:
        ParallelError: No format is recognized, or a file is missing, truncated or does not fit
            the others.
    """
    path = Path(path)
    for each in FORMATS:
        if each.recognizes(path):
            return each.open(path, options or Options())
    found = "there is no such file or folder"
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        found = (
            f"found {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            if names
            else ("the folder is empty")
        )
    raise ParallelError(
        f"{path}: not a checkpoint of a known format ({', '.join(each.name for each in FORMATS)}); "
        f"{found}. A save that was interrupted has no index, and is not whole"
    )


# Which pipeline stage holds a tensor: told from its name.

StageOf = Callable[[str], int | Iterable[int]]
"""From a parameter's name to the stage that holds it, or to all those that do."""

_LAYER = re.compile(r"^(?:|.*?\.)(?:layers?|h|blocks)\.(\d+)\.")
_FIRST = re.compile(r"emb|\bwte\b|\bwpe\b", re.IGNORECASE)
_LAST = re.compile(r"norm|ln_f|head|output|logits|classifier|score", re.IGNORECASE)


def stages_of(
    entries: Mapping[str, Entry], pp: int, stage_of: StageOf | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the pipeline stages of every tensor.

    Layers are known by their number (``layers.N.``, ``h.N.``, ``blocks.N.``) and are shared out
    evenly, one more to the first stages where they do not divide. What comes before the first
    layer, and embeddings, are on the first stage; what comes after the last, and norms and heads,
    on the last. An embedding of the vocabulary is on both if the last has no head of its shape:
    it is tied. An optimizer's tensors are with their parameter.

    Args:
        entries: All tensors, in the model's order.
        pp: Number of stages.
        stage_of: Instead of all this, for parameters' names.

    Raises:
        DegreeError: There are fewer layers than stages, or ``stage_of`` gives no stage.
        ParallelError: There are two rows of layers, which could be divided in many ways.
    """
    names = {parameter_of(name)[0]: None for name in entries}
    if stage_of is not None:
        found = {name: _asked(name, stage_of(name), pp) for name in names}
    elif pp == 1:
        found = dict.fromkeys(names, (0,))
    else:
        found = _by_name(entries, list(names), pp)
    return {name: found[parameter_of(name)[0]] for name in entries}


def _by_name(entries: Mapping[str, Entry], names: list[str], pp: int) -> dict[str, tuple[int, ...]]:
    layers = {name: match for name in names if (match := _LAYER.match(name))}
    rows = {name[: match.start(1)] for name, match in layers.items()}
    if len(rows) > 1:
        raise ParallelError(
            f"layers of {len(rows)} kinds, {', '.join(sorted(rows))}: expected one row of layers "
            f"to divide over {pp} stages; give stage_of="
        )
    numbers = sorted({int(match[1]) for match in layers.values()})
    if len(numbers) < pp:
        raise DegreeError(
            f"{len(numbers)} layers (names with layers.N., h.N. or blocks.N.) for {pp} pipeline "
            "stages; expected at least as many: lower pp, or give stage_of="
        )
    each, more = divmod(len(numbers), pp)
    stage_by_number = {
        number: (at // (each + 1) if at < more * (each + 1) else (at - more) // each,)
        for at, number in enumerate(numbers)
    }
    first = min(names.index(name) for name in layers)
    found: dict[str, tuple[int, ...]] = {}
    for at, name in enumerate(names):
        if name in layers:
            found[name] = stage_by_number[int(layers[name][1])]
        elif _FIRST.search(name):
            found[name] = (0,)
        else:
            found[name] = (pp - 1,) if at > first or _LAST.search(name) else (0,)
    last = {entries[name].shard for name in names if found[name] == (pp - 1,) and name in entries}
    for name in names:
        entry = entries.get(name)
        if entry and found[name] == (0,) and entry.shard.padded and entry.shard not in last:
            found[name] = (0, pp - 1)
    return found


def _asked(name: str, stages: int | Iterable[int], pp: int) -> tuple[int, ...]:
    found = (stages,) if isinstance(stages, int) else tuple(sorted(set(stages)))
    if not found or not all(0 <= stage < pp for stage in found):
        raise DegreeError(
            f"stage_of({name!r}) gives {stages!r}; expected one or more of 0 to {pp - 1}"
        )
    return found


# Files of shards at other degrees: one process, one tensor at a time.


def reshard(
    path_in: str | Path,
    path_out: str | Path,
    *,
    tp: int,
    pp: int = 1,
    stage_of: StageOf | None = None,
    plan: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    progress: bool = True,
) -> None:
    """Write a checkpoint anew for other degrees, to the last bit, with its optimizer's state.

    One process, no process groups. Of the model one tensor is in memory at a time, and little
    else. (To load at another degree needs none of this: `load_shards` reads any.)

    Everything is checked before anything is written, and ``path_out`` is there once it is whole:
    after an error nothing is.

    Args:
        path_in: What `save_shards` or this wrote, or files of another format that is known.
        path_out: A folder that is not there yet, or is empty.
        tp: The tensor-parallel degree to write for.
        pp: The number of pipeline stages to write for.
        stage_of: From a parameter's name to its stage, or stages. By default layers are known by
            their numbers (``layers.N.``, ``h.N.``, ``blocks.N.``) and divided evenly, with one
            more for the first stages.
        plan: How tensors are split, for files that do not say it.
        vocab_size: The vocabulary without padding, for files that do not say it.
        progress: Show how far it is, if standard error is a terminal.

    Raises:
        DegreeError: A degree does not divide a tensor; names it.
        ParallelError: A file is missing, truncated or does not fit the others; ``path_out`` is
            there already.
    """
    source = open_source(path_in, Options(plan, vocab_size))
    write_shards(source, path_out, tp=tp, pp=pp, stage_of=stage_of, progress=progress)


def write_shards(
    source: Source,
    path_out: str | Path,
    *,
    tp: int,
    pp: int = 1,
    stage_of: StageOf | None = None,
    progress: bool = True,
) -> None:
    """Write the files of shards of any source; the rest is `reshard`'s."""
    for what, degree in (("tp", tp), ("pp", pp)):
        if degree < 1:
            raise DegreeError(f"{what}={degree}; expected at least 1")
    stages = stages_of(source.entries, pp, stage_of)
    held = {name: Held(entry, stages[name]) for name, entry in source.entries.items()}
    for name, entry in source.entries.items():
        name_of(entry.dtype, name)
        entry.check(tp)
    passed_on = {key: source.metadata[key] for key in KEPT if key in source.metadata}
    index = Index(tp, pp, secrets.token_hex(8), held, plain("metadata", passed_on))
    with new_folder(path_out) as folder, _Progress(held, enabled=progress) as done:
        for stage in range(pp):
            entries = {name: one.entry for name, one in held.items() if stage in one.stages}
            _write_stage(source, folder, index, stage, entries, done)
        index.write(folder)


def _write_stage(
    source: Source,
    folder: Path,
    index: Index,
    stage: int,
    entries: Mapping[str, Entry],
    done: Callable[[Entry], None],
) -> None:
    """Write the files of one pipeline stage, all at once."""
    with ExitStack() as stack:
        writers = []
        for rank in range(index.tp):
            local = {
                name: (entry.dtype, entry.shard.local_shape(rank, index.tp))
                for name, entry in entries.items()
            }
            path = folder / file_name(stage, rank)
            writers.append(stack.enter_context(TensorWriter(path, local, index.stamp(stage, rank))))
        for name, entry in entries.items():
            shard = entry.shard
            full = torch.empty(shard.full_shape, dtype=entry.dtype)
            source.read_into(name, 0, full)
            for rank, writer in enumerate(writers):
                if shard.dim is None:
                    writer.write(name, full)
                    continue
                for at, start, length in shard.pieces(rank, index.tp):
                    writer.write(name, full.narrow(shard.dim, start, length), shard.dim, at)
            del full  # before the next is made
            done(entry)


class _Progress:
    """Shows on a terminal how many tensors are done, in one line that goes at the end."""

    def __init__(self, held: Mapping[str, Held], *, enabled: bool) -> None:
        self.shown = enabled and sys.stderr.isatty()
        self.tensors = sum(len(one.stages) for one in held.values())
        self.bytes = sum(one.entry.nbytes * len(one.stages) for one in held.values())
        self.tensors_done = self.bytes_done = 0

    def __call__(self, entry: Entry) -> None:
        self.tensors_done += 1
        self.bytes_done += entry.nbytes
        if self.shown:
            sys.stderr.write(
                f"\rresharding: {self.tensors_done} of {self.tensors} tensors, "
                f"{self.bytes_done / 1e9:.1f} of {self.bytes / 1e9:.1f} GB"
            )
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[K")


# Writes full tensors as Hugging Face has them, and shards as Meta's Llama has them.

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
            write_torch_file(folder / llama.file_name(index), tensors, parts)
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
