"""Copies between tensors and stretches of files, a bounded number of bytes at a time.

No memory map: its pages would count as this process's memory. Everything passes through one
buffer of at most `CHUNK` bytes, whatever the tensor's size and strides.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from ezpz_tp._errors import ParallelError
from ezpz_tp._shard import Piece

CHUNK = 16 << 20
"""Bytes that are copied at a time."""

_SHORT, _NEAR = 4096, 1 << 16
"""Stretches shorter than the one that begin less than the other apart, in bytes: reading over
what lies between costs less than a read for each."""


@dataclass(frozen=True, slots=True)
class Region:
    """A contiguous tensor in a file that is open without a buffer, from a byte on."""

    file: FileIO
    at: int
    shape: tuple[int, ...]


def read_stretch(region: Region, dim: int, start: int, out: Tensor) -> None:
    """Fill a CPU tensor of any strides with what begins at ``start`` along a dim."""
    if out.numel() == 0:
        return
    matrix = _matrix(out, dim)
    if matrix is None:  # strides that no matrix has
        copy = torch.empty_like(out, memory_format=torch.contiguous_format)
        read_stretch(region, dim, start, copy)
        out.copy_(copy)
        return
    (rows, columns), width = matrix.shape, out.element_size()
    first, step = _place(region.shape, dim, start)
    over = rows > 1 and columns < step and columns * width < _SHORT and step * width < _NEAR
    read = step if over else columns  # of each row
    wanted = slice(first, first + columns) if over else slice(None)
    buffer = bytearray(min(CHUNK, rows * read * width))
    for row, column, height, length in _tiles(rows, read, width):
        for offset, at, count in _runs(row, column, height, length, 0 if over else first, step):
            into = memoryview(buffer)[offset * width : (offset + count) * width]
            _fill(region.file, region.at + at * width, into)
        values = _tensor(buffer, out.dtype, height, length)
        target = matrix[row : row + height]
        (target if over else target[:, column : column + length]).copy_(values[:, wanted])


def read_box(region: Region, stride: tuple[int, ...], box: Piece, out: Tensor) -> None:
    """Fill a CPU tensor of any strides with a box of a tensor of which the file has a view."""
    if not out.numel():
        return
    shape = region.shape
    parts = [dim for dim, size in enumerate(box.sizes) if size != shape[dim]]
    if len(parts) <= 1 and _is_contiguous(shape, stride):
        dim = parts[0] if parts else 0
        read_stretch(region, dim, box.offsets[dim] if shape else 0, out)
    else:
        first = sum(at * step for at, step in zip(box.offsets, stride, strict=True))
        _read_view(region.file, region.at + first * out.element_size(), stride, out)


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    wanted = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != wanted:
            return False
        wanted *= size
    return True


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _read_view(file: FileIO, begin: int, stride: tuple[int, ...], out: Tensor) -> None:
    """Read all that a view spans, in halves along the outermost dim until that is little."""
    span = 1 + sum((size - 1) * step for size, step in zip(out.shape, stride, strict=True))
    dim = max(range(out.dim()), key=lambda dim: stride[dim] * (out.shape[dim] > 1))
    if span * out.element_size() > CHUNK and out.shape[dim] > 1:
        half = out.shape[dim] // 2
        first, second = out.split([half, out.shape[dim] - half], dim)
        _read_view(file, begin, stride, first)
        _read_view(file, begin + half * stride[dim] * out.element_size(), stride, second)
    else:
        values = torch.empty(span, dtype=out.dtype)
        read_stretch(Region(file, begin, (span,)), 0, 0, values)
        out.copy_(values.as_strided(out.shape, stride))


def write_stretch(region: Region, dim: int, start: int, values: Tensor) -> None:
    """Write a tensor of any device as what begins at ``start`` along a dim."""
    values = values.detach()
    if values.numel() == 0:
        return
    matrix = _matrix(values, dim)
    if matrix is None:
        matrix = values.reshape(-1, math.prod(values.shape[dim:]))
    (rows, columns), width = matrix.shape, values.element_size()
    first, step = _place(region.shape, dim, start)
    buffer = bytearray(min(CHUNK, values.numel() * width))
    for row, column, height, length in _tiles(rows, columns, width):
        part = matrix[row : row + height, column : column + length]
        _tensor(buffer, values.dtype, height, length).copy_(part)
        for offset, at, count in _runs(row, column, height, length, first, step):
            written = memoryview(buffer)[offset * width : (offset + count) * width]
            write_bytes(region.file, region.at + at * width, written)


@contextmanager
def naming(file: IO[bytes]) -> Iterator[None]:
    """Have the error of a file that is written, say of a full disk, name it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from error


def write_bytes(file: FileIO, at: int, values: memoryview) -> None:
    file.seek(at)
    with naming(file):
        while values:
            values = values[file.write(values) :]


def _matrix(tensor: Tensor, dim: int) -> Tensor | None:
    """Return a view with the dims before ``dim`` as rows; None where strides do not allow it."""
    try:
        return tensor.view(math.prod(tensor.shape[:dim]), math.prod(tensor.shape[dim:]))
    except RuntimeError:
        return None


def _place(shape: tuple[int, ...], dim: int, start: int) -> tuple[int, int]:
    """Return the first element wanted of each such row in a file, and how long its rows are."""
    return start * math.prod(shape[dim + 1 :]), math.prod(shape[dim:])


def _tiles(rows: int, columns: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield row, column, height and length of parts of a matrix that fit the buffer."""
    length = min(columns, CHUNK // width)
    each = CHUNK // (length * width) if length == columns else 1
    for row in range(0, rows, each):
        for column in range(0, columns, length):
            yield row, column, min(each, rows - row), min(length, columns - column)


def _runs(
    row: int, column: int, height: int, length: int, first: int, step: int
) -> Iterator[tuple[int, int, int]]:
    """Yield what lies together: where in the buffer, where in the file, how many elements."""
    at = row * step + first + column
    if length == step:
        yield 0, at, height * length
        return
    for number in range(height):
        yield number * length, at + number * step, length


def _tensor(buffer: bytearray, dtype: torch.dtype, height: int, length: int) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype, count=height * length).view(height, length)


def _fill(file: FileIO, at: int, into: memoryview) -> None:
    file.seek(at)
    while into:
        count = file.readinto(into)
        if not count:
            raise ParallelError(
                f"{file.name}: ends at byte {file.tell()}, {len(into)} bytes before a tensor "
                "does; it was truncated, or changed while it was read"
            )
        into = into[count:]


# A folder that is there whole or not at all.


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a folder that becomes ``path`` when the ``with`` block ends, and goes if that fails."""
    path = Path(path).resolve()  # also of a link: what it leads to
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ParallelError(
            f"{path}: exists, and is not an empty folder; expected none: nothing is overwritten. "
            "Give another, or remove it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        yield partial
        sync(partial)
        partial.rename(path)  # also onto an empty folder
        sync(path.parent)
    except BaseException:  # also at Ctrl-C: no half a folder stays; raised again
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
