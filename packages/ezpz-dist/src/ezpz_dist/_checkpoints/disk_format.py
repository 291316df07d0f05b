"""The format on disk: a manifest, an index, and files of raw bytes.

A checkpoint is a folder with

``00000.bin``, ...
    What each rank wrote: tensors' bytes, in row-major order, each at a multiple of 16 bytes.
``index.json``
    Where the pieces of each tensor are in these files.
``manifest.json``
    The step, the kinds of contents, and size and CRC-32 of each file. It is written last.
"""

from __future__ import annotations

import io
import json
import os
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ezpz_dist._objects import as_bytes, is_plain
from ezpz_dist._version import __version__
from ezpz_tp import Piece

from .files import find_size, parse_name
from .values import MALFORMED, align, check_sizes, find_dtype, name_of_dtype

FORMAT = 3
MANIFEST = "manifest.json"
INDEX = "index.json"
_MAX_MANIFEST = 1 << 30  # bytes: a larger one is none of ours
_BUFFER = 1 << 22  # bytes that are read, or written, at once


class Written(NamedTuple):
    """A file as it was written."""

    size: int
    crc32: int


# Files of raw bytes.


class DataWriter:
    """Writes tensors' bytes to a file, and computes its checksum."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=0)
        self._buffer = bytearray(_BUFFER)
        self._room = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._used = 0
        self._flushed = 0
        self._crc32 = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, tensor: Tensor) -> int:
        """Write a tensor and return its offset in the file."""
        padding = align(self._used) - self._used
        self._buffer[self._used : self._used + padding] = bytes(padding)
        self._used += padding
        at = self._flushed + self._used
        data = as_bytes(tensor)
        done = 0
        while done < data.numel():
            if self._used == _BUFFER:
                self._flush()
            count = min(_BUFFER - self._used, data.numel() - done)
            self._room[self._used : self._used + count].copy_(data[done : done + count])
            self._used += count
            done += count
        return at

    def finish(self) -> Written:
        """Flush the file to disk."""
        self._flush()
        os.fsync(self._file.fileno())
        return Written(self._flushed, self._crc32)

    def _flush(self) -> None:
        view = memoryview(self._buffer)[: self._used]
        try:
            done = 0
            while done < len(view):
                done += self._file.write(view[done:])
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._crc32 = zlib.crc32(view, self._crc32)
        self._flushed += self._used
        self._used = 0


class Source(NamedTuple):
    """Part of a saved piece, and the tensor to fill with it."""

    at: int  # in the file
    dtype: torch.dtype
    sizes: tuple[int, ...]  # of the saved piece
    part: Piece | None  # of the saved piece; None: all of it
    target: Tensor


def read_tensors(path: Path, sources: Iterable[Source]) -> None:
    """Fill tensors from a file of raw bytes."""
    buffer = bytearray(_BUFFER)
    room = torch.frombuffer(buffer, dtype=torch.uint8)
    with io.BufferedReader(io.FileIO(path), _BUFFER) as file, torch.no_grad():
        for source in sorted(sources, key=lambda source: source.at):
            target = source.target
            if not has_equal_bytes(source):
                target = torch.empty(source.sizes, dtype=source.dtype)
            data = as_bytes(target)
            file.seek(source.at)
            done = 0
            while done < data.numel():
                view = memoryview(buffer)[: data.numel() - done]
                count = file.readinto(view)
                if count == 0:
                    raise ValueError(f"{path.name} ends {data.numel() - done} bytes early")
                data[done : done + count].copy_(room[:count])
                done += count
            if target is not source.target:
                if source.part is not None:
                    target = target[source.part.slices]
                source.target.copy_(target)


def has_equal_bytes(source: Source) -> bool:
    """True if the bytes in the file are those of the target in memory."""
    target = source.target
    is_lazy = target.is_conj() or target.is_neg()
    is_same = source.part is None and target.dtype == source.dtype
    return is_same and is_plain(target) and target.is_contiguous() and not is_lazy


def find_damage(folder: Path, name: str, expected: Written) -> str | None:
    """Read a file through and describe its damage; None if it is whole."""
    path = folder / name
    buffer = memoryview(bytearray(_BUFFER))
    crc32 = 0
    try:
        size = find_size(path)
        if size is None:
            return f"{name} is missing"
        if size != expected.size or not path.is_file():
            return f"{name} has {size} bytes; expected {expected.size}, in a regular file"
        with path.open("rb", buffering=0) as file:
            count = file.readinto(buffer)
            while count:
                crc32 = zlib.crc32(buffer[:count], crc32)
                count = file.readinto(buffer)
    except OSError as error:
        return f"{name} cannot be read ({error})"
    if crc32 != expected.crc32:
        return f"{name} has crc32 {crc32:08x}; expected {expected.crc32:08x}"
    return None


def write_checksummed(path: Path, data: bytes) -> Written:
    """Write a file, which is not flushed to disk yet."""
    path.write_bytes(data)
    return Written(len(data), zlib.crc32(data))


# The index.

Key = tuple[str, ...]
"""What a tensor is: ``("model", "0.weight")``, ``("optimizer", "0.weight", "exp_avg")``."""


class Chunk(NamedTuple):
    """Where a piece of a tensor is."""

    piece: Piece
    file: str
    at: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)


Index = dict[Key, Saved]


def encode_index(index: Mapping[Key, Saved]) -> bytes:
    files: dict[str, int] = {}
    rows = []
    for key, saved in index.items():
        chunks = []
        for piece, file, at in saved.chunks:
            number = files.setdefault(file, len(files))
            chunks.append((piece.offsets, piece.sizes, number, at))
        rows.append((key, name_of_dtype(saved.dtype), saved.shape, chunks))
    return json.dumps({"files": list(files), "tensors": rows}, separators=(",", ":")).encode()


def decode_index(data: bytes) -> Index:
    try:
        whole = json.loads(data)
        files = [check_file_name(name) for name in whole["files"]]
        index: Index = {}
        for key, dtype, shape, chunks in whole["tensors"]:
            if not key:
                raise ValueError("a tensor has no name")
            saved = Saved(find_dtype(dtype), check_sizes(shape))
            for offsets, sizes, file, at in chunks:
                piece = Piece(check_sizes(offsets), check_sizes(sizes))
                if not len(piece.offsets) == len(piece.sizes) == len(saved.shape):
                    raise ValueError(f"{key} has a piece of other dimensions")
                saved.chunks.append(Chunk(piece, files[file], check_sizes([at])[0]))
            index[tuple(str(part) for part in key)] = saved
    except MALFORMED as error:
        raise ValueError(f"{INDEX} is damaged ({error!r})") from error
    return index


def check_file_name(name: Any) -> str:
    if not isinstance(name, str) or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} is no file's name")
    return name


def describe_key(key: Key) -> str:
    return ".".join(key)


# The manifest.


@dataclass(frozen=True, slots=True)
class Manifest:
    """What makes a folder a checkpoint."""

    step: int
    sequence: int  # how many saves there were in the folder: the last saved is the newest
    world_size: int
    contents: Sequence[str]
    time: float
    torch: str
    files: Mapping[str, Written]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


def encode_manifest(manifest: Manifest) -> bytes:
    fields = asdict(manifest) | {
        "format": FORMAT,
        "ezpz_dist": __version__,
        "python": sys.version.split()[0],
        "files": {name: [file.size, f"{file.crc32:08x}"] for name, file in manifest.files.items()},
    }
    whole = {"checkpoint": fields, "crc32": f"{compute_checksum(fields):08x}"}
    return json.dumps(whole, indent=1).encode()


def compute_checksum(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def decode_manifest(data: bytes) -> Manifest:
    try:
        whole = json.loads(data)
        fields = whole["checkpoint"]
        expected = int(whole["crc32"], 16)
        found = compute_checksum(fields)
        version = fields.get("format")
    except MALFORMED as error:
        raise ValueError(f"{MANIFEST} is damaged ({error})") from error
    if found != expected:
        raise ValueError(f"{MANIFEST} is damaged: crc32 {found:08x}; expected {expected:08x}")
    if version != FORMAT:
        raise ValueError(f"{MANIFEST} has format {version!r}; this ezpz_dist reads {FORMAT}")
    try:
        files = {}
        for name, (size, crc32) in fields["files"].items():
            files[check_file_name(name)] = Written(int(size), int(crc32, 16))
        return Manifest(
            step=int(fields["step"]),
            sequence=int(fields["sequence"]),
            world_size=int(fields["world_size"]),
            contents=tuple(str(each) for each in fields["contents"]),
            time=float(fields["time"]),
            torch=str(fields["torch"]),
            files=files,
        )
    except MALFORMED as error:
        raise ValueError(f"{MANIFEST} is damaged ({error!r})") from error


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        ValueError: There is none, it is damaged, or it is of another folder.
    """
    path = folder / MANIFEST
    try:
        size = find_size(path)
        if size is None:
            raise ValueError(f"there is no {MANIFEST}: it was never completed")
        if size > _MAX_MANIFEST:
            raise ValueError(f"{MANIFEST} has {size} bytes; expected at most {_MAX_MANIFEST}")
        manifest = decode_manifest(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from error
    name = parse_name(folder.name)
    if name is not None and name.step != manifest.step:
        raise ValueError(f"{MANIFEST} is of step {manifest.step}")
    return manifest


def read_index_file(folder: Path, manifest: Manifest) -> bytes:
    """Return the index of a checkpoint, having compared its checksum.

    Raises:
        ValueError: There is none, or it is damaged.
    """
    if INDEX not in manifest.files:
        raise ValueError(f"the manifest has no {INDEX}")
    damage = find_damage(folder, INDEX, manifest.files[INDEX])
    if damage is not None:
        raise ValueError(damage)
    try:
        return (folder / INDEX).read_bytes()
    except OSError as error:
        raise ValueError(f"{INDEX} cannot be read ({error})") from error
