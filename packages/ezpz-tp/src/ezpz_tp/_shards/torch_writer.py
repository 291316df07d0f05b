"""Writes what `torch.save` writes of a state dict, without ever holding it."""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from .chunks import CHUNK, naming
from .torch_pickle import STORAGES, Storage, StoredTensor

_ALIGNMENT = 64
"""Where storages begin, as torch.save has it, so that a file can be mapped."""

_NAMES = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}

Sizes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def write_torch_file(path: Path, tensors: Sizes, parts: Callable[[str], Iterable[Tensor]]) -> None:
    """Write a state dict that `torch.load` reads, also by ``mmap=True``.

    Args:
        path: The file; there is none yet.
        tensors: Dtype and shape, by name.
        parts: Called with a name, in order: returns the tensor's values as CPU tensors that
            follow each other in memory order, say some rows at a time.
    """
    with path.open("xb") as file, naming(file):
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            _write(archive, tensors, parts)
        file.flush()
        os.fsync(file.fileno())


def _write(
    archive: zipfile.ZipFile, tensors: Sizes, parts: Callable[[str], Iterable[Tensor]]
) -> None:
    for name, contents in (
        ("data.pkl", _pickled(tensors)),
        ("byteorder", b"little"),
        ("version", b"3\n"),
    ):
        with _member(archive, name) as member:
            member.write(contents)
    for number, (name, (dtype, shape)) in enumerate(tensors.items()):
        written = 0
        with _member(archive, f"data/{number}") as member:
            for part in parts(name):
                assert part.dtype == dtype
                written += part.numel()
                for buffer in _bytes(part):
                    member.write(buffer)
                del part  # before the next is made
        assert written == math.prod(shape), name


def _member(archive: zipfile.ZipFile, name: str) -> Any:
    """Open a new member whose contents begin at a multiple of `_ALIGNMENT`."""
    info = zipfile.ZipInfo(f"archive/{name}", date_time=(1980, 1, 1, 0, 0, 0))
    file: Any = archive.fp
    header = 30 + len(info.filename) + 20  # with what zipfile adds for sizes of 64 bits
    padding = -(file.tell() + header + 4) % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)  # as torch.save pads
    return archive.open(info, "w", force_zip64=True)


def _bytes(part: Tensor) -> Iterable[memoryview]:
    """Yield a tensor's bytes, in a buffer that is used again."""
    flat = part.reshape(-1)
    step = max(1, CHUNK // part.dtype.itemsize)
    buffer = bytearray(min(step, len(flat)) * part.dtype.itemsize)
    for start in range(0, len(flat), step):
        piece = flat[start : start + step]
        torch.frombuffer(buffer, dtype=part.dtype, count=len(piece)).copy_(piece)
        yield memoryview(buffer)[: len(piece) * part.dtype.itemsize]


def _pickled(tensors: Sizes) -> bytes:
    contents = OrderedDict(
        (name, StoredTensor(dtype, shape, _strides(shape), 0, str(number)))
        for number, (name, (dtype, shape)) in enumerate(tensors.items())
    )
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(contents)
    return buffer.getvalue()


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


class _Pickler(pickle.Pickler):
    """Writes what `torch.load` makes a tensor of, where there is a `StoredTensor`."""

    def persistent_id(self, obj: object) -> Any:
        """Return how a file names a storage."""
        if not isinstance(obj, Storage):
            return None
        if obj.dtype in _NAMES:
            return ("storage", getattr(torch, _NAMES[obj.dtype]), obj.key, "cpu", obj.numel)
        return ("storage", torch.UntypedStorage, obj.key, "cpu", obj.numel * obj.dtype.itemsize)

    def reducer_override(self, obj: Any) -> Any:
        """Return how a tensor is made: as `torch.Tensor` says it of itself."""
        if not isinstance(obj, StoredTensor):
            return NotImplemented
        hooks: OrderedDict[str, Any] = OrderedDict()
        made = (
            Storage(obj.dtype, obj.storage, obj.numel),
            obj.offset,
            obj.shape,
            obj.stride,
            False,
            hooks,
        )
        if obj.dtype in _NAMES:
            return _rebuild_tensor_v2, made
        return _rebuild_tensor_v3, (*made, obj.dtype)
