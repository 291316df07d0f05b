"""Files of shards at other degrees: one process, one tensor at a time."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch

from ezpz_tp._errors import DegreeError

from .folder import new_folder
from .formats import open_source
from .index import KEPT, Index, file_name, plain
from .safetensors import TensorWriter, name_of
from .source import Entry, Held, Options, Source
from .stages import StageOf, stages_of


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
