"""Full tensors of which each of several files of `torch.save` holds a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ezpz_tp._errors import ParallelError

from .chunks import CHUNK
from .plan import Splits, unknown
from .source import Entry
from .spec import Shard
from .torch_file import TorchFile
from .torch_pickle import StoredTensor


@dataclass(frozen=True, slots=True)
class FilePart:
    """A tensor in a file."""

    file: TorchFile
    tensor: StoredTensor


class JoinedTensors:
    """A `Source` that puts tensors together from their parts.

    Args:
        form: Whose files they are: ``llama``, or ``megatron``.
        said: What those say of the model: ``params.json``, or the arguments.

    Attributes:
        entries: The full tensors, by name.
        metadata: Nothing: what the files say besides is not of the formats written here.
    """

    def __init__(self, form: str, said: Mapping[str, Any]) -> None:
        self.form, self.said = form, said
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, Any] = {}
        self._lost: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, tuple[Shard, tuple[FilePart, ...]]] = {}

    def add(self, name: str, parts: Sequence[FilePart], stored: Shard, shard: Shard) -> None:
        """Take a tensor, after a look at its parts.

        Args:
            name: Of the full tensor.
            parts: One for each tensor-parallel rank that wrote a file, as its file has checked it.
            stored: How the parts make up the full tensor, with whatever padding they have.
            shard: How it is to be split from now on; its full shape may be without padding.

        Raises:
            ParallelError: A part has another shape or dtype than the first, or is
                not equal to it where every rank should hold the same.
        """
        first = parts[0]
        for index, part in enumerate(parts):
            _check_like(name, part, stored.local_shape(index, len(parts)), first)
            if stored.dim is None and part is not first:
                check_equal(name, first, part)
        self.entries[name] = Entry(name, first.tensor.dtype, shard)
        self._stored[name] = stored, tuple(parts)

    def take(self, name: str, parts: Sequence[FilePart], splits: Splits) -> None:
        """Take a tensor as its name says that it is split; see `check_known`."""
        stored = splits.stored(name, parts[0].tensor.shape, len(parts))
        shard = stored and splits.shard(name, stored.full_shape)
        if stored is None or shard is None:
            self._lost[name] = parts[0].tensor.shape
        else:
            self.add(name, parts, stored, shard)

    def check_known(self, where: object) -> None:
        """Raise `ParallelError` where no rule said how some of the tensors are split."""
        if self._lost:
            raise unknown(where, self._lost)

    def parts(self, name: str) -> tuple[FilePart, ...]:
        """Return the parts of a tensor, by tensor-parallel rank."""
        return self._stored[name][1]

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with a stretch of a full tensor (`Source.read_into`)."""
        stored, parts = self._stored[name]
        dim = self.entries[name].shard.dim or 0
        if stored.dim is None:
            parts[0].file.read_into(parts[0].tensor, dim, start, out)
            return
        across = stored.dim != dim  # to be split along another dim than the files are
        low = 0 if across else start
        high = low + out.shape[stored.dim]
        for index, part in enumerate(parts):
            for begin, into, length in stored.overlap(index, len(parts), low, high):
                wanted = out.narrow(stored.dim, into, length)
                if across:
                    _read_across(part, dim, start, stored.dim, begin, wanted)
                else:
                    part.file.read_into(part.tensor, dim, begin, wanted)


def check_equal(name: str, first: FilePart, second: FilePart) -> None:
    """Raise `ParallelError` unless two files have the same tensor, bit for bit."""
    shape, dtype = first.tensor.shape, first.tensor.dtype
    _check_like(name, second, shape, first)
    rows = shape[0] if shape else 1
    step = max(1, CHUNK * rows // max(1, first.tensor.numel * dtype.itemsize))
    for start in range(0, rows, step):
        held = (min(step, rows - start), *shape[1:]) if shape else ()
        here, there = (torch.empty(held, dtype=dtype) for _ in range(2))
        first.file.read_into(first.tensor, 0, start, here)
        second.file.read_into(second.tensor, 0, start, there)
        if not torch.equal(_bits(here), _bits(there)):
            raise ParallelError(
                f"{second.file.path}: tensor {name} of shape {shape} is not that of "
                f"{first.file.path}; expected the same values, to the last bit, in both files"
            )


def _check_like(name: str, part: FilePart, shape: tuple[int, ...], first: FilePart) -> None:
    found = part.tensor.shape, part.tensor.dtype
    if found != (shape, first.tensor.dtype):
        raise ParallelError(
            f"{part.file.path}: tensor {name} has shape {found[0]} and dtype {found[1]}; expected "
            f"{shape} and {first.tensor.dtype}, as {first.file.path} has it (files of different "
            "models, or of different degrees?)"
        )


def _read_across(part: FilePart, dim: int, start: int, other: int, begin: int, out: Tensor) -> None:
    """Fill ``out`` with what begins at ``start`` along one dim and at ``begin`` along another.

    All of the other dim is read, a bounded stretch of the first at a time.
    """
    shape, dtype = part.tensor.shape, part.tensor.dtype
    step = max(1, CHUNK * shape[dim] // max(1, part.tensor.numel * dtype.itemsize))
    for first in range(0, out.shape[dim], step):
        into = out.narrow(dim, first, min(step, out.shape[dim] - first))
        held = torch.empty((*shape[:dim], into.shape[dim], *shape[dim + 1 :]), dtype=dtype)
        part.file.read_into(part.tensor, dim, start + first, held)
        into.copy_(held.narrow(other, begin, into.shape[other]))


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, in which NaNs are equal too."""
    return tensor.reshape(-1).view(torch.uint8)
