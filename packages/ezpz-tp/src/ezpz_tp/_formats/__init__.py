"""Full tensors in files of any format: one module a format, each read a piece at a time.

A module here with a ``FORMAT`` is a format that can be read; adding one means adding a file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._shard import Entry, Piece, Shard

if TYPE_CHECKING:
    from .torch_file import StoredTensor

# Full tensors, of which any stretch can be read.

_AT_A_TIME = 64 << 20
"""Bytes of a tensor."""


class Source(Protocol):
    """Full tensors by name, in the model's order; an optimizer's as `optimizer_name` has them."""

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill a CPU tensor with what begins there along the dim that is split (or dim 0)."""
        ...


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A piece of a full tensor, where it begins in a file's tensor, and its reader."""

    piece: Piece
    offsets: tuple[int, ...]
    read: Callable[[Piece, Tensor], None]


class StoredPieces:
    """A `Source` of tensors whose pieces are in files."""

    def __init__(self, metadata: Mapping[str, Any] | None = None) -> None:
        self.entries: dict[str, Entry] = {}
        self.metadata: Mapping[str, Any] = metadata or {}
        self._pieces: dict[str, Sequence[StoredPiece]] = {}

    def add(self, entry: Entry, pieces: Sequence[StoredPiece]) -> None:
        self.entries[entry.name], self._pieces[entry.name] = entry, pieces

    def add_whole(self, entry: Entry, read: Callable[[Piece, Tensor], None]) -> None:
        shape = entry.shard.full_shape
        origin = (0,) * len(shape)
        self.add(entry, [StoredPiece(Piece(origin, shape), origin, read)])

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        wanted = stretch(self.entries[name], start, out)
        for stored in self._pieces[name]:
            if common := stored.piece.overlap(wanted):
                moved = common.within(stored.piece)
                offsets = zip(stored.offsets, moved.offsets, strict=True)
                box = Piece(tuple(one + other for one, other in offsets), common.sizes)
                stored.read(box, out[common.within(wanted).slices])


def stretch(entry: Entry, start: int, out: Tensor) -> Piece:
    """Return the piece of a full tensor that `Source.read_into` is to fill ``out`` with."""
    offsets = [0] * out.dim()
    if offsets:
        offsets[entry.shard.dim or 0] = start
    return Piece(tuple(offsets), tuple(out.shape))


def stretches_of(
    source: Source, entry: Entry, start: int, length: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield where a part of a stretch begins, and its values."""
    shape, dim = entry.shard.full_shape, entry.shard.dim or 0
    step = max(1, _AT_A_TIME * entry.shard.size // max(1, entry.nbytes) if shape else 1)
    for first in range(start, start + length, step):
        count = min(step, start + length - first)
        held = (*shape[:dim], count, *shape[dim + 1 :]) if shape else ()
        out = torch.empty(held, dtype=entry.dtype)
        source.read_into(entry.name, first, out)
        yield first, out


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
        self.metadata = source.metadata
        self._source = source
        self._from: dict[str, tuple[str, tuple[Rows, ...]]] = {}

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
    made = Rearranged(source)
    for name in source.entries:
        made.add(rename(name), name)
    return made


# How to recognize and open files.


@dataclass(frozen=True, slots=True)
class Options:
    """What files do not say: how the tensors of a pattern are split; the vocabulary unpadded."""

    plan: Mapping[str, Any] | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A format of files: whether a path is of it, how to open it, and how its tensors are split."""

    name: str
    recognizes: Callable[[Path], bool]
    open: Callable[[Path, Options], Source]
    splits: Mapping[str, Split] | None = None
    as_huggingface: Callable[[Any], Source] | None = None


def formats() -> list[Format]:
    """Return the formats that modules here have."""
    names = [f"{__name__}.{each.name}" for each in pkgutil.iter_modules(__path__)]
    modules = map(importlib.import_module, names)
    return [module.FORMAT for module in modules if hasattr(module, "FORMAT")]


def all_splits() -> dict[str, Split]:
    return {name: split for each in formats() for name, split in (each.splits or {}).items()}


def format_of(path: Path) -> Format:
    """Return the format of a file or folder."""
    known = formats()
    if found := next((each for each in known if each.recognizes(path)), None):
        return found
    there = "there is no such file or folder"
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        more = " ..." if len(names) > 5 else ""
        there = f"found {', '.join(names[:5])}{more}" if names else "the folder is empty"
    raise ParallelError(
        f"{path}: not a checkpoint of a known format ({', '.join(each.name for each in known)}); "
        f"{there}. A save that was interrupted has no index, and is not whole"
    )


# How a tensor is split, known by its name.


@dataclass(frozen=True, slots=True)
class Split:
    """How a tensor is split: ``matrices`` of one size, or of sizes, are stacked along the dim."""

    dim: int | None
    matrices: int | Sequence[int] = 1
    padded: bool = False


WHOLE = Split(None)
COLUMN = Split(0)
ROW = Split(1)
VOCABULARY = Split(0, padded=True)
GATED = Split(0, matrices=2)

Way: TypeAlias = int | tuple[int, int | Sequence[int]] | None
"""The dim that is split, or None; and with it the number, or the sizes, of matrices stacked."""


class Splits:
    """Which way tensors are split: as the caller's plan says, or else a table by pattern."""

    def __init__(self, table: Mapping[str, Split], options: Options) -> None:
        self._table, self._plan = table, dict(options.plan or {})
        self._vocab_size = options.vocab_size

    def known(self, name: str) -> Split | None:
        found = (split for pattern, split in self._table.items() if fnmatchcase(name, pattern))
        return next(found, None)

    def shard(self, name: str, full_shape: tuple[int, ...]) -> Shard | None:
        """Return how a full tensor is to be split, without padding; None: its name is unknown."""
        split = self.known(name)
        vocabulary = split is not None and split.padded
        if vocabulary and self._vocab_size is not None:
            if not 0 < self._vocab_size <= full_shape[0]:
                raise ParallelError(
                    f"vocab_size={self._vocab_size}; expected 1 to {full_shape[0]}: tensor {name} "
                    f"has shape {full_shape}"
                )
            full_shape = (self._vocab_size, *full_shape[1:])
        planned = self._planned(name)
        if planned is not None:
            return _shard(name, full_shape, planned, padded=vocabulary and planned.dim == 0)
        if split is not None:
            return _shard(name, full_shape, split, padded=vocabulary)
        return None if full_shape else Shard(full_shape)

    def stored(self, name: str, local_shape: tuple[int, ...], degree: int) -> Shard | None:
        """Return what a file's tensor is one of ``degree`` equal parts of; None: unknown."""
        # The table comes first: it says what the files are.
        split = self.known(name) or self._planned(name)
        if split is None:
            return None if local_shape else Shard(local_shape)
        return _shard(name, _full(local_shape, split.dim, degree), split, padded=split.padded)

    def _planned(self, name: str) -> Split | None:
        for pattern, way in self._plan.items():
            if fnmatchcase(name, pattern):
                dim, matrices = way if isinstance(way, tuple) and len(way) == 2 else (way, 1)
                sizes = (matrices,) if isinstance(matrices, int) else tuple(matrices)
                if not all(isinstance(each, int) for each in (dim or 0, *sizes)):
                    raise ParallelError(
                        f"plan[{pattern!r}]={way!r}; expected a dim, None for what every rank "
                        "holds whole, or (dim, matrices) with their number or sizes"
                    )
                return Split(dim, matrices)
        return None


def unknown(where: object, tensors: Mapping[str, tuple[int, ...]]) -> ParallelError:
    """Return what to raise of tensors whose names no rule knows."""
    shown = [f"{name} {list(shape)}" for name, shape in tensors.items()]
    more = f", ... ({len(shown)} in all)" if len(shown) > 8 else ""
    return ParallelError(
        f"{where}: no rule says how these tensors are split: {', '.join(shown[:8])}{more}. Give "
        'plan={"pattern": dim}, with None as the dim of what every rank holds whole'
    )


def same_names(
    where: object,
    found: Mapping[str, StoredTensor],
    first: object,
    wanted: Mapping[str, StoredTensor],
) -> None:
    """Raise `ParallelError` unless a file has the tensors that the first one has."""
    for name, tensor in wanted.items():
        if name not in found:
            raise ParallelError(
                f"{where}: has no tensor {name}; expected one of shape {tensor.shape}, as {first} "
                "has it (files of different models?)"
            )
    for name, tensor in found.items():
        if name not in wanted:
            raise ParallelError(
                f"{where}: has a tensor {name} of shape {tensor.shape}; expected none, as {first} "
                "has none (files of different models?)"
            )


def _shard(name: str, full_shape: tuple[int, ...], split: Split, *, padded: bool) -> Shard:
    dim, blocks = split.dim, split.matrices
    if dim is None:
        return Shard(full_shape)
    if isinstance(blocks, int):
        size = full_shape[dim] if -len(full_shape) <= dim < len(full_shape) else 0
        if blocks < 1 or size % blocks:
            raise DegreeError(
                f"{name}: dim {dim} of a tensor of shape {full_shape} is not {blocks} matrices of "
                "one size"
            )
        blocks = (size // blocks,) * blocks if blocks > 1 else ()
    try:
        return Shard(full_shape, dim, tuple(blocks), padded)
    except DegreeError as error:
        raise DegreeError(f"{name}: {error}") from error


def _full(local_shape: tuple[int, ...], dim: int | None, degree: int) -> tuple[int, ...]:
    if dim is None or not -len(local_shape) <= dim < len(local_shape):
        return local_shape
    dim %= len(local_shape)
    return (*local_shape[:dim], local_shape[dim] * degree, *local_shape[dim + 1 :])
