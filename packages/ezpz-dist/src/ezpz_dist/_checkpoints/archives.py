"""Tensors in a file, each as an archive of `torch.save`'s, made and read many at a time.

`torch.distributed.checkpoint` finds a tensor by the place of its archive. Archives of one dtype and
size differ in the elements only: one is made, or read, by torch, and the others are made and read
like it, without a Python object for each part of each.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

_SMALL = 1 << 16
"""Bytes of archives that are made and read together; of longer ones torch's own time is nothing."""

_BATCH = 1 << 20
"""Bytes of archives that are made or read at once."""

_BLOCK = 1 << 20
"""Bytes of a long one that are read at once."""

_FEW = 3
"""Tensors alike that are not worth an archive to copy from."""


class Place(NamedTuple):
    """Where an archive lies in a file."""

    at: int
    length: int


@dataclass(frozen=True, slots=True)
class _Frame:
    """What an archive has around the elements."""

    head: Tensor
    tail: Tensor

    def around(self, tensors: Sequence[Tensor]) -> bytearray:
        """Return the archives of tensors like the one that it was made for."""
        elements = torch.stack(list(tensors)).cpu().contiguous()  # it may be channels_last
        within = elements.view(len(tensors), -1).view(torch.uint8)
        room = bytearray(len(tensors) * (len(self.head) + within.shape[1] + len(self.tail)))
        rows, stop = _view(room).view(len(tensors), -1), len(self.head) + within.shape[1]
        rows[:, : len(self.head)] = self.head
        rows[:, len(self.head) : stop] = within
        rows[:, stop:] = self.tail
        return room

    def fits(self, rows: Tensor) -> list[bool]:
        """Return which archives differ in the elements only."""
        start, stop = len(self.head), rows.shape[1] - len(self.tail)
        same = (rows[:, :start] == self.head).all(1) & (rows[:, stop:] == self.tail).all(1)
        answer: list[bool] = same.tolist()
        return answer


def _view(room: bytearray | memoryview) -> Tensor:
    return torch.frombuffer(room, dtype=torch.uint8)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether its values are its bytes: of a view of conjugates, say, they are not."""
    lazy = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return tensor.is_contiguous() and not lazy


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def write(stream: Any, tensors: Sequence[Tensor]) -> list[Place]:
    """Write tensors, those of one dtype and size behind each other; return each one's place."""
    places = [Place(0, 0)] * len(tensors)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, tensor in enumerate(tensors):
        alike.setdefault((tensor.dtype, tensor.shape, tensor.device), []).append(number)
    with torch.no_grad(), _checksummed_once():
        for numbers in alike.values():
            frame = _made_frame(tensors[numbers[0]]) if len(numbers) > _FEW else None
            if frame is None:
                for number in numbers:
                    at = stream.tell()
                    torch.save(_owned(tensors[number]), stream)
                    places[number] = Place(at, stream.tell() - at)
                continue
            length = len(frame.head) + tensors[numbers[0]].nbytes + len(frame.tail)
            for some in _batches(numbers, length):
                at = stream.tell()
                stream.write(frame.around([tensors[number] for number in some]))
                for number in some:
                    places[number] = Place(at, length)
                    at += length
    return places


@contextmanager
def _checksummed_once() -> Iterator[None]:
    """Keep torch from summing tensors too, as for a ZIP archive: its sums are never read.

    In this thread, as of torch 2.13; in earlier ones perhaps in all.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _batches(values: Sequence[Any], length: int) -> Iterator[Sequence[Any]]:
    step = max(1, _BATCH // length)
    for start in range(0, len(values), step):
        yield values[start : start + step]


def _owned(tensor: Tensor) -> Tensor:
    """Return a tensor on the host that is all of its memory, which torch saves whole."""
    here = tensor.cpu().contiguous()
    return here if here.untyped_storage().nbytes() == here.nbytes else here.clone()


def _made_frame(tensor: Tensor) -> _Frame | None:
    """Return the frame of what is like a tensor; None where torch's archives differ in more."""
    if tensor.is_quantized or not 0 < tensor.nbytes <= _SMALL:
        return None
    one, other = (_archive(tensor, fill) for fill in (0, 255))
    if len(one) != len(other):
        return None
    differ = (one != other).nonzero().flatten()
    start, stop = int(differ[0]), int(differ[-1]) + 1
    if not len(differ) == stop - start == tensor.nbytes:
        return None
    return _Frame(one[:start], one[stop:])


def _archive(like: Tensor, fill: int) -> Tensor:
    elements = torch.full((like.nbytes,), fill, dtype=torch.uint8)
    stream = io.BytesIO()
    torch.save(elements.view(like.dtype).view(like.shape), stream)
    return _view(stream.getbuffer())


class Wanted(NamedTuple):
    """A tensor to fill from an archive.

    Attributes:
        key: What it is a piece of, for a message.
        place: Of the archive.
        dtype: Of the archive's tensor.
        size: Of that.
        part: What of that; None: all of it.
        target: What is filled: of the part's size.
    """

    key: str
    place: Place
    dtype: torch.dtype
    size: tuple[int, ...]
    part: tuple[slice, ...] | None
    target: Tensor

    def fill(self, tensor: Tensor) -> None:
        """Fill it."""
        self.target.copy_(tensor if self.part is None else tensor[self.part])


class _Part(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], place: Place) -> None:
        super().__init__()
        self._file, (self._start, self._length), self._at = file, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = max(
            0, offset + {os.SEEK_CUR: self._at, os.SEEK_END: self._length}.get(whence, 0)
        )
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, room: Any, /) -> int:
        left = max(0, min(len(room), self._length - self._at))
        self._file.seek(self._start + self._at)
        count: int = self._file.readinto(memoryview(room)[:left])  # type: ignore[attr-defined]
        self._at += count
        return count


def read(stream: IO[bytes], wanted: Sequence[Wanted]) -> None:
    """Fill tensors from a file's archives. Unpickles nothing but tensors.

    Raises:
        ValueError: An archive is none, or of another tensor.
    """
    alike: dict[tuple[Any, ...], list[Wanted]] = {}
    for one in wanted:
        alike.setdefault((one.dtype, one.size, one.place.length), []).append(one)
    with torch.no_grad():
        for first, *others in alike.values():
            tensor = _load(stream, first)
            first.fill(tensor)
            frame = _found_frame(stream, first, tensor) if others else None
            if frame is None:
                rest: Sequence[Wanted] = others
            elif first.place.length <= _SMALL:
                rest = _fill_together(stream, frame, others)
            else:
                rest = [one for one in others if not _fill_in_place(stream, frame, one)]
            for one in rest:
                one.fill(_load(stream, one))


def _load(stream: IO[bytes], one: Wanted) -> Tensor:
    view: Any = _Part(stream, one.place)
    found = torch.load(view, map_location="cpu", weights_only=True)
    if not isinstance(found, Tensor) or tuple(found.size()) != one.size:
        what = tuple(found.size()) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"{one.key} is {what} in its file; expected a tensor of {one.size}")
    return found


def _found_frame(stream: IO[bytes], one: Wanted, tensor: Tensor) -> _Frame | None:
    """Return the frame of an archive that torch has read; None where its elements are not found."""
    if tensor.dtype != one.dtype or not _is_plain(tensor) or not tensor.nbytes:
        return None
    at, length = one.place
    try:
        with zipfile.ZipFile(_Part(stream, one.place)) as archive:
            (entry,) = (each for each in archive.infolist() if "/data/" in each.filename)
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return None
    # ZIP says the length of an entry's name and of what follows it, up to the elements.
    lengths = _read(stream, at + entry.header_offset + 26, 4)
    start = entry.header_offset + 30 + int.from_bytes(lengths[:2], "little")
    start += int.from_bytes(lengths[2:], "little")
    stop, elements = start + tensor.nbytes, _bytes_of(tensor)
    if stop > length or not all(
        torch.equal(elements[done : done + len(block)], block)
        for done, block in _blocks(stream, at + start, tensor.nbytes)
    ):
        return None
    head, tail = _read(stream, at, start), _read(stream, at + stop, length - stop)
    if sys.byteorder.encode() not in bytes(head) + bytes(tail):
        return None  # torch has turned the bytes; zeros look the same
    return _Frame(_view(head), _view(tail))


def _read(stream: IO[bytes], at: int, count: int, into: Any = None) -> Any:
    """Return so many bytes of a file, in a room for them if there is one."""
    room = memoryview(bytearray(count) if into is None else into)
    stream.seek(at)
    if (found := stream.readinto(room)) != count:  # type: ignore[attr-defined]
        raise ValueError(f"a file ends {count - found} bytes early")
    return room


def _blocks(stream: IO[bytes], at: int, count: int) -> Iterator[tuple[int, Tensor]]:
    """Yield bytes of a file, and how many were before."""
    room = memoryview(bytearray(min(count, _BLOCK)))
    for done in range(0, count, _BLOCK):
        length = min(_BLOCK, count - done)
        yield done, _view(_read(stream, at + done, length, room[:length]))


def _fill_together(stream: IO[bytes], frame: _Frame, wanted: Sequence[Wanted]) -> list[Wanted]:
    """Fill small tensors that are alike in the file; return those whose archives are not."""
    _, (_, length), dtype, size, *_ = wanted[0]
    others = []
    for some in _batches(wanted, length):
        room = memoryview(bytearray(len(some) * length))
        for number, one in enumerate(some):
            _read(stream, one.place.at, length, room[number * length : (number + 1) * length])
        rows = _view(room).view(len(some), length)
        elements = rows[:, len(frame.head) : length - len(frame.tail)]
        elements = elements.clone(memory_format=torch.contiguous_format).view(dtype)
        tensors = elements.view(len(some), *size).unbind(0)
        for one, tensor, fits in zip(some, tensors, frame.fits(rows), strict=True):
            if fits:
                one.fill(tensor)
            else:
                others.append(one)
    return others


def _fill_in_place(stream: IO[bytes], frame: _Frame, one: Wanted) -> bool:
    """Fill a large tensor without another of its size; return whether that can be done."""
    (at, length), start, ends = one.place, len(frame.head), len(frame.tail)
    if one.part or one.target.dtype != one.dtype or not _is_plain(one.target):
        return False
    head, tail = _read(stream, at, start), _read(stream, at + length - ends, ends)
    if not (torch.equal(_view(head), frame.head) and torch.equal(_view(tail), frame.tail)):
        return False
    elements = _bytes_of(one.target)
    if elements.is_cpu:  # a copy by torch's threads took longer than the reading
        room = (ctypes.c_char * len(elements)).from_address(elements.data_ptr())
        _read(stream, at + start, len(elements), room)
        return True
    for done, block in _blocks(stream, at + start, len(elements)):
        elements[done : done + len(block)] = block
    return True
