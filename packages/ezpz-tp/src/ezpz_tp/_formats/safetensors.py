"""The safetensors file format, read and written a piece of a tensor at a time.

Eight bytes of length, little-endian; as many of JSON, which gives each tensor's dtype, shape and
place; then the tensors (https://github.com/huggingface/safetensors, README, "Format"). The
library of that name writes whole files at once, and reads them through a memory map.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ezpz_tp._errors import ParallelError
from ezpz_tp._shard import Piece

from .stretches import Region, naming, read_box, strides_of, write_bytes, write_stretch

_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {
    # Some are newer than the oldest torch that is supported.
    name: getattr(torch, dtype)
    for name, dtype in _NAMES.items()
    if hasattr(torch, dtype)
}
"""The format's names of dtypes."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_LONGEST = 100_000_000  # bytes of JSON; the library reads no more


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its dtype and shape, and the bytes of the file from where to where."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """What the header of a safetensors file says."""

    path: Path
    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]

    @classmethod
    def open(cls, path: Path) -> TensorFile:
        """Read a header, and check that the file holds what it says."""
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, _LONGEST):
                    raise ParallelError(
                        f"{path}: has {size} bytes; expected 8 and a header of {length}: it is "
                        "truncated, or no safetensors file"
                    )
                text = file.read(length)
        except FileNotFoundError as error:
            raise ParallelError(f"{path}: there is no such file") from error
        try:
            header = json.loads(text)
            metadata = dict(header.pop("__metadata__", {}))
            tensors = {name: _stored(said, 8 + length) for name, said in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ParallelError(
                f"{path}: its header is not that of safetensors: {error}"
            ) from error
        expected = 8 + length
        for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
            needed = math.prod(stored.shape) * stored.dtype.itemsize
            if stored.stop - stored.start != needed:
                raise ParallelError(
                    f"{path}: tensor {name!r} of {stored.dtype} and shape {stored.shape} is said "
                    f"to have {stored.stop - stored.start} bytes; expected {needed}"
                )
            if stored.start != expected:
                raise ParallelError(
                    f"{path}: tensor {name!r} is said to begin at byte {stored.start}; expected "
                    f"{expected}, where the one before it ends: the header is damaged"
                )
            expected = stored.stop
        if size != expected:
            cut = [f"{n!r} {s.shape}" for n, s in tensors.items() if s.stop > size]
            raise ParallelError(
                f"{path}: has {size} bytes; expected {expected}, as its header says"
                + (f". It is truncated, within or before tensor {cut[0]}" if cut else "")
            )
        return cls(path, tensors, metadata)

    def read(self, name: str, box: Piece, out: Tensor) -> None:
        stored = self.tensors[name]
        with self.path.open("rb", buffering=0) as file:
            region = Region(file, stored.start, stored.shape)
            read_box(region, strides_of(stored.shape), box, out)


def _stored(said: Any, begin: int) -> Stored:
    start, stop = integers(said["data_offsets"])
    if said["dtype"] not in DTYPES:
        raise ValueError(f"dtype {said['dtype']!r} is none of {', '.join(DTYPES)}")
    return Stored(DTYPES[said["dtype"]], integers(said["shape"]), begin + start, begin + stop)


def integers(values: Iterable[Any], *, least: int = 0) -> tuple[int, ...]:
    """Return whole numbers of a file, having made sure that they are."""
    found = tuple(values)
    if not all(type(value) is int and value >= least for value in found):
        raise ValueError(f"found {values!r}, expected whole numbers, at least {least}")
    return found


def name_of(dtype: torch.dtype, tensor: str) -> str:
    """Return the format's name of a tensor's dtype."""
    if dtype not in _DTYPE_NAMES:
        raise ParallelError(
            f"tensor {tensor!r} has {dtype}, which the safetensors format does not know; expected "
            f"one of {', '.join(map(str, _DTYPE_NAMES))}"
        )
    return _DTYPE_NAMES[dtype]


class TensorWriter:
    """Writes tensors of known dtypes and shapes in any order; the file appears when it is whole."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self._partial = path, path.with_name(f".{path.name}.partial")
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        at = 0
        # The widest first, as the library does: then each is aligned to its width.
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
            stop = at + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": name_of(dtype, name), "shape": list(shape), "data_offsets": [at, stop]
            }  # fmt: skip
            at = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._begin = len(text) + 8
        self._head = len(text).to_bytes(8, "little") + text
        self._tensors = {
            name: (self._begin + said["data_offsets"][0], shape)
            for name, (_, shape) in tensors.items()
            for said in (header[name],)
        }
        self.size = self._begin + at

    def __enter__(self) -> Self:
        self._file = self._partial.open("wb", buffering=0)
        try:
            write_bytes(self._file, 0, memoryview(self._head))
            with naming(self._file):
                self._file.truncate(self.size)
        except BaseException:  # also at Ctrl-C: no half a file stays; raised again
            self._discard()
            raise
        return self

    def write(self, name: str, values: Tensor, dim: int = 0, start: int = 0) -> None:
        """Write a tensor, or its ``[start, start + values.shape[dim])`` along ``dim``."""
        at, shape = self._tensors[name]
        write_stretch(Region(self._file, at, shape), dim, start, values)

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial.replace(self.path)
        except BaseException:  # also at Ctrl-C: no half a file stays; raised again
            self._discard()
            raise

    def _discard(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)
