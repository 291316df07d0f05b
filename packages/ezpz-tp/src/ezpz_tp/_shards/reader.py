"""Reads the shards that this package writes."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ezpz_tp._errors import ParallelError

from . import index as index_file
from .index import Index, file_name
from .safetensors import TensorFile
from .source import Entry, Format, Options
from .spec import Shard


class ShardFiles:
    """A folder of shards as one source of full tensors.

    The headers of the files are read when first needed, or all at once by `check`.

    Attributes:
        path: The folder.
        index: What it says it holds.
        entries: The full tensors, by name.
        metadata: What else was saved.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = Index.read(path)
        self.entries: Mapping[str, Entry] = {
            name: held.entry for name, held in self.index.tensors.items()
        }
        self.metadata: Mapping[str, Any] = self.index.metadata
        self._file = functools.cache(self._open)

    def check(self) -> None:
        """Compare every file with the index.

        Raises:
            ParallelError: A file is missing, truncated, of another save, or lacks a tensor, or a
                tensor has another shape or dtype.
        """
        for stage in range(self.index.pp):
            for index in range(self.index.tp):
                self._file(stage, index)

    def check_for(self, name: str, shard: Shard, index: int, degree: int) -> None:
        """Compare the files that `read_part` would read with the index.

        Raises:
            ParallelError: As of `check`.
        """
        stage = self.index.tensors[name].stages[0]
        for each in (index,) if self._is_kept(name, shard, degree) else range(self.index.tp):
            self._file(stage, each)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with a stretch of a full tensor, see `Source`.

        Of a tensor that is not split, the first tensor-parallel rank's copy is read.
        """
        shard, stage = self.entries[name].shard, self.index.tensors[name].stages[0]
        if shard.dim is None:
            self._file(stage, 0).read_into(name, 0, start, out)
            return
        stop = start + out.shape[shard.dim]
        for index in range(self.index.tp):
            for begin, into, length in shard.overlap(index, self.index.tp, start, stop):
                wanted = out.narrow(shard.dim, into, length)
                self._file(stage, index).read_into(name, shard.dim, begin, wanted)

    def read_part(self, name: str, shard: Shard, index: int, degree: int, out: Tensor) -> None:
        """Fill ``out`` with what a rank holds of a tensor at any degree; padding is zero.

        At the degree of the files it is what that rank saved, padding included.
        """
        if self._is_kept(name, shard, degree):
            stage = self.index.tensors[name].stages[0]
            self._file(stage, index).read_into(name, 0, 0, out)
            return
        pieces, dim = shard.pieces(index, degree), shard.dim
        if dim is None:
            self.read_into(name, 0, out)
            return
        if sum(length for *_, length in pieces) < out.shape[dim]:
            out.zero_()
        for into, start, length in pieces:
            self.read_into(name, start, out.narrow(dim, into, length))

    def _is_kept(self, name: str, shard: Shard, degree: int) -> bool:
        """Whether each rank saved just what it is to hold."""
        return degree == self.index.tp and shard == self.entries[name].shard

    def _open(self, stage: int, index: int) -> TensorFile:
        """Open a file and check that it is what the index says."""
        name, tp = file_name(stage, index), self.index.tp
        path = self.path / name
        file = TensorFile.open(path)
        try:
            stamp = json.loads(file.metadata.get("ezpz_tp", "{}"))
            found = [stamp.get(key) for key in ("save", "tp", "tp_size", "pp", "pp_size")]
        except (ValueError, AttributeError) as error:
            raise ParallelError(f"{path}: its metadata are damaged: {error}") from error
        expected = [self.index.save, index, tp, stage, self.index.pp]
        if found != expected:
            raise ParallelError(
                f"{path}: is of save, tp, tp_size, pp, pp_size {found}; expected {expected}, as in "
                f"{index_file.NAME}: it was copied from elsewhere, or renamed"
            )
        for entry, stages in ((held.entry, held.stages) for held in self.index.tensors.values()):
            if stage not in stages:
                continue
            shape = entry.shard.local_shape(index, tp)
            stored = file.tensors.get(entry.name)
            if stored is None:
                raise ParallelError(
                    f"{path}: has no tensor {entry.name!r}; expected one of shape {shape}, rank "
                    f"{index} of {tp}'s part of {entry.shard.full_shape}"
                )
            if (stored.shape, stored.dtype) != (shape, entry.dtype):
                raise ParallelError(
                    f"{path}: tensor {entry.name!r} has shape {stored.shape} and {stored.dtype}; "
                    f"expected {shape} and {entry.dtype}, rank {index} of {tp}'s part of "
                    f"{entry.shard.full_shape}"
                )
        return file


def _open_checked(path: Path, _: Options) -> ShardFiles:
    files = ShardFiles(path)
    files.check()
    return files


FORMAT = Format("ezpz_tp shards", lambda path: (path / index_file.NAME).is_file(), _open_checked)
