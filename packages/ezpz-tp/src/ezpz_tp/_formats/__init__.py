"""Full tensors in files of any format: one module a format, which reads and writes pieces.

A module here with a ``FORMAT`` is a format that can be read; adding one means adding a file.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import operator
import os
import pkgutil
import secrets
import shutil
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from io import FileIO
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._shard import Entry, Piece, Shard, whole

ToWrite: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...], Iterable[Tensor]]]
"""The tensors of a file that is written: dtype, shape, and values in parts, in memory's order."""

# Tensors in files, of which any box is read. There is no memory map: its pages would count as
# this process's memory.

CHUNK = 16 << 20
"""Bytes that are in memory at a time, beside what is filled."""
_NEAR = 1 << 16
"""Bytes of a file that are read at a time where most of them are not wanted."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: the byte where it begins, and its strides in elements."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    at: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, box: Piece) -> Stored:
        moved = sum(map(operator.mul, box.offsets, self.stride)) * self.dtype.itemsize
        return replace(self, shape=tuple(box.sizes), at=self.at + moved)

    def read(self, box: Piece, out: Tensor) -> None:
        with naming(self.path), open(self.path, "rb", buffering=0) as file:
            _read(file, self.part(box).at, self.stride, out)


Pieces: TypeAlias = Sequence[tuple[Piece, Stored]]


def _read(file: FileIO, at: int, stride: tuple[int, ...], out: Tensor) -> None:
    """Read what a view spans, in parts along its outermost dim where that is much."""
    if not out.numel():
        return
    dims, width = [dim for dim, size in enumerate(out.shape) if size > 1], out.element_size()
    span = 1 + sum((out.shape[dim] - 1) * stride[dim] for dim in dims)
    limit = CHUNK if span <= 2 * out.numel() else _NEAR
    if span == out.numel() and all(out.stride(dim) == stride[dim] for dim in dims):
        _fill(file, at, out, span)
    elif span > 1 and span * width > limit:
        dim = max(dims, key=lambda dim: stride[dim])
        step = max(1, min(limit // (stride[dim] * width), out.shape[dim] // 2))
        for number, part in enumerate(out.split(step, dim)):
            _read(file, at + number * step * stride[dim] * width, stride, part)
    else:
        values = torch.empty(span, dtype=out.dtype)
        _fill(file, at, values, span)
        out.copy_(values.as_strided(out.shape, stride))


def _fill(file: FileIO, at: int, out: Tensor, count: int) -> None:
    into = memory(out, count)
    file.seek(at)
    while into:
        if not (read := file.readinto(into)):
            raise ParallelError(
                f"{file.name}: ends at byte {file.tell()}, {len(into)} bytes before a tensor "
                "does; it was truncated, or changed while it was read"
            )
        into = into[read:]


def memory(tensor: Tensor, count: int) -> memoryview:
    room = ctypes.c_char * (count * tensor.element_size())
    return memoryview(room.from_address(tensor.data_ptr())).cast("B")


def write(file: IO[bytes], values: Tensor) -> None:
    values = values.detach().cpu().contiguous()
    if values.numel():
        file.write(memory(values, values.numel()))


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have the error of a file, say of a full disk, name it."""
    try:
        yield
    except OSError as error:
        if error.filename or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    with naming(path), path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a folder that becomes ``path`` when the ``with`` block ends, and goes if that fails."""
    path = Path(path).resolve()  # also of a link: what it leads to
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ParallelError(
            f"{path}: exists, and is not an empty folder; expected none: nothing is overwritten. "
            "Give another, or remove it"
        )
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir(parents=True)
    try:
        yield partial
        _sync(partial)
        partial.rename(path)  # also onto an empty folder
        _sync(path.parent)
    except BaseException:  # also at Ctrl-C: no half a folder stays; raised again
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_json(file: Path) -> dict[str, Any]:
    try:
        said = json.loads(file.read_bytes())
    except ValueError as error:
        raise ParallelError(f"{file}: not JSON: {error}") from error
    if not isinstance(said, dict):
        raise ParallelError(f"{file}: holds a {type(said).__name__}; expected a JSON object")
    return said


# Full tensors, of which any box is read.


class Source:
    """Full tensors by name, in the model's order; an optimizer's as `optimizer_name` has them."""

    def __init__(self, metadata: Mapping[str, Any] | None = None) -> None:
        self.entries: dict[str, Entry] = {}
        self.metadata: Mapping[str, Any] = metadata or {}
        self._pieces: dict[str, Pieces] = {}
        self._from: dict[str, str] = {}
        self._unknown: list[str] = []

    def add(self, name: str, dtype: torch.dtype, shard: Shard | None, pieces: Pieces) -> None:
        if shard is None:
            self._unknown.append(f"{name} {list(pieces[0][0].sizes)}")
        else:
            self.entries[name], self._pieces[name] = Entry(name, dtype, shard), pieces

    def take(self, source: Source, old: str, name: str, rows: Sequence[range] = ()) -> None:
        """Take another's tensor, whole and as it is split; or these rows of it, in order."""
        if name in self.entries:
            raise ParallelError(f"{old} and {self._from[name]} would both be {name}")
        entry, pieces = source.entries[old], source._pieces[old]
        self._from[name] = old
        if not rows:
            self.add(name, entry.dtype, entry.shard, pieces)
            return
        taken: list[tuple[Piece, Stored]] = []
        begin = 0
        for each in rows:
            for ((first, *offsets), (count, *sizes)), stored in pieces:
                start, stop = bisect_left(each, first), bisect_left(each, first + count)
                if own := each[start:stop]:
                    (row, *rest), held = stored.stride, (len(own), *sizes)
                    part = stored.part(Piece((own[0] - first, *[0] * len(rest)), held))
                    part = replace(part, stride=(row * each.step, *rest))
                    taken.append((Piece((begin + start, *offsets), held), part))
            begin += len(each)
        self.add(name, entry.dtype, Shard((begin, *entry.shard.full_shape[1:])), taken)

    def checked(self, where: object) -> Self:
        if shown := self._unknown:
            more = f", ... ({len(shown)} in all)" if len(shown) > 8 else ""
            raise ParallelError(
                f"{where}: no rule says how these tensors are split: {', '.join(shown[:8])}{more}. "
                'Give plan={"pattern": dim}, with None as the dim of what every rank holds whole'
            )
        return self

    def read(self, name: str, box: Piece, out: Tensor) -> None:
        for piece, stored in self._pieces[name]:
            if common := piece.overlap(box):
                stored.read(common.within(piece), out[common.within(box).slices])


def parts_of(box: Piece, width: int) -> Iterator[Piece]:
    if not box.sizes:
        yield box
        return
    (first, *offsets), (rows, *sizes) = box
    step = max(1, CHUNK // max(1, math.prod(sizes) * width))
    for start in range(0, rows, step):
        yield Piece((first + start, *offsets), (min(step, rows - start), *sizes))


def values_of(source: Source, name: str, *boxes: Piece) -> Iterator[Tensor]:
    """Yield the values of boxes of a tensor in parts, in the order of memory."""
    dtype = source.entries[name].dtype
    for box in boxes:
        for part in parts_of(box, dtype.itemsize):
            out = torch.empty(part.sizes, dtype=dtype)
            source.read(name, part, out)
            yield out


# How to recognize and open files.


class Format(NamedTuple):
    name: str
    recognizes: Callable[[Path], bool]
    open: Callable[[Path, Options], Source]
    splits: Mapping[str, Split] | None = None
    as_huggingface: Callable[[Source], Source] | None = None


def formats() -> list[Format]:
    names = (f"{__name__}.{each.name}" for each in pkgutil.iter_modules(__path__))
    return [one.FORMAT for one in map(importlib.import_module, names) if hasattr(one, "FORMAT")]


def all_splits() -> dict[str, Split]:
    return {name: split for each in formats() for name, split in (each.splits or {}).items()}


def format_of(path: Path) -> Format:
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


def open_source(path: str | Path, options: Options | None = None) -> Source:
    return format_of(Path(path)).open(Path(path), options or Options())


# How a tensor is split, known by its name.


@dataclass(frozen=True, slots=True)
class Split:
    """How a tensor is split: ``matrices`` of one size, or of sizes, are stacked along the dim."""

    dim: int | None
    matrices: int | Sequence[int] = 1
    padded: bool = False


Table: TypeAlias = Mapping[str, Split]
_WAYS = {"whole": Split(None), "columns": Split(0), "rows": Split(1), "gated": Split(0, matrices=2),
         "vocabulary": Split(0, padded=True)}  # fmt: skip


def splits(**patterns: str) -> dict[str, Split]:
    return {name: _WAYS[way] for way, names in patterns.items() for name in names.split()}


Way: TypeAlias = int | tuple[int, int | Sequence[int]] | None
"""The dim that is split, or None; and with it the number, or the sizes, of matrices stacked."""


class Options(NamedTuple):
    """What files do not say: how the tensors of a pattern are split; the vocabulary unpadded."""

    plan: Mapping[str, Any] | None = None
    vocab_size: int | None = None

    def shard(self, table: Table, name: str, full_shape: tuple[int, ...]) -> Shard | None:
        known = _find(table, name)
        vocabulary = known is not None and known.padded
        if vocabulary and self.vocab_size is not None:
            if not 0 < self.vocab_size <= full_shape[0]:
                raise ParallelError(
                    f"vocab_size={self.vocab_size}; expected 1 to {full_shape[0]}: tensor {name} "
                    f"has shape {full_shape}"
                )
            full_shape = (self.vocab_size, *full_shape[1:])
        if planned := self._planned(name):
            known = replace(planned, padded=vocabulary and planned.dim == 0)
        return _shard(name, full_shape, known)

    def stored(
        self, table: Table, name: str, local_shape: tuple[int, ...], degree: int
    ) -> Shard | None:
        """Return what a file's tensor is one of ``degree`` equal parts of; None: unknown."""
        # The table comes first: it says what the files are.
        split, full = _find(table, name) or self._planned(name), list(local_shape)
        if split and split.dim is not None and -len(full) <= split.dim < len(full):
            full[split.dim] *= degree
        return _shard(name, tuple(full), split)

    def _planned(self, name: str) -> Split | None:
        for pattern, way in (self.plan or {}).items():
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


def _find(table: Table, name: str) -> Split | None:
    return next((split for pattern, split in table.items() if fnmatchcase(name, pattern)), None)


def _shard(name: str, full_shape: tuple[int, ...], split: Split | None) -> Shard | None:
    if split is None or split.dim is None:
        return None if split is None and full_shape else Shard(full_shape)
    dim, blocks = split.dim, split.matrices
    if isinstance(blocks, int):
        size = full_shape[dim] if -len(full_shape) <= dim < len(full_shape) else 0
        if blocks < 1 or size % blocks:
            raise DegreeError(
                f"{name}: dim {dim} of a tensor of shape {full_shape} is not {blocks} matrices of "
                "one size"
            )
        blocks = (size // blocks,) * blocks if blocks > 1 else ()
    try:
        return Shard(full_shape, dim, tuple(blocks), split.padded)
    except DegreeError as error:
        raise DegreeError(f"{name}: {error}") from error


# Full tensors of which each of several files, one a tensor-parallel rank, holds a part.


def join(
    source: Source, name: str, parts: Sequence[Stored], table: Table, options: Options
) -> None:
    first, degree = parts[0], len(parts)
    if (stored := options.stored(table, name, first.shape, degree)) is None:
        source.add(name, first.dtype, None, [(whole(first.shape), first)])
        return
    for index, part in enumerate(parts):
        _check_like(name, part, first, stored.local_shape(index, degree))
    if stored.dim is None:
        check_equal(name, parts)
        parts = parts[:1]
    full = options.shard(table, name, stored.full_shape)
    pieces = [
        (box, part.part(own))
        for index, part in enumerate(parts)
        for own, box in stored.boxes(index, degree)
    ]
    source.add(name, first.dtype, full, pieces)


def same_names(
    paths: Sequence[Path], tensors: Sequence[Mapping[str, Stored]], where: str = ""
) -> None:
    """Raise `ParallelError` unless each file has the tensors that the first one has."""
    first, wanted = paths[0], tensors[0]
    for path, found in zip(paths, tensors, strict=True):
        for name in [*wanted, *found]:
            if name not in found:
                what = f"no tensor {name}; expected one of shape {wanted[name].shape}, as {first} "
                what += "has it"
            elif name not in wanted:
                what = f"a tensor {name} of shape {found[name].shape}; expected none, as {first} "
                what += "has none"
            else:
                continue
            raise ParallelError(f"{path}{where}: has {what} (files of different models?)")


def check_equal(name: str, parts: Sequence[Stored]) -> None:
    """Raise `ParallelError` unless files have the same tensor, bit for bit."""
    first, *others = parts
    for other in others:
        _check_like(name, other, first, first.shape)
        for box in parts_of(whole(first.shape), first.dtype.itemsize):
            here, there = (torch.empty(box.sizes, dtype=first.dtype) for _ in range(2))
            first.read(box, here)
            other.read(box, there)
            # As bytes, in which NaNs are equal too.
            if memory(here, here.numel()) != memory(there, there.numel()):
                raise ParallelError(
                    f"{other.path}: tensor {name} of shape {first.shape} is not that of "
                    f"{first.path}; expected the same values, to the last bit, in both files"
                )


def _check_like(name: str, part: Stored, first: Stored, shape: tuple[int, ...]) -> None:
    if (part.shape, part.dtype) != (shape, first.dtype):
        raise ParallelError(
            f"{part.path}: tensor {name} has shape {part.shape} and dtype {part.dtype}; expected "
            f"{shape} and {first.dtype}, as {first.path} has it (files of different models, or of "
            "different degrees?)"
        )
