"""Files of `torch.save`, read a stretch at a time.

A file is a zip archive whose members are stored, not compressed: ``data.pkl``, a pickle in which
tensors refer to storages by number, and ``data/0``, ``data/1``, ... with their bytes
(torch/serialization.py, the format since torch 1.6).
"""

from __future__ import annotations

import itertools
import struct
import zipfile
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ezpz_tp._errors import ParallelError

from .chunks import CHUNK, Region, read_stretch
from .torch_pickle import Foreign, StoredTensor, unpickled


class TorchFile:
    """A file of `torch.save`.

    Args:
        path: The file.

    Attributes:
        contents: What was saved, with a `StoredTensor` in place of each tensor and a `Foreign`
            in place of what is neither a tensor nor a plain container, number or string.

    Raises:
        ParallelError: It is truncated, or not such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = _size_of(path)
        self._members: dict[str, tuple[int, int]] = {}
        try:
            with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
                contents = self._index(archive, file)
        except ParallelError:
            raise
        except Exception as error:  # zipfile has no end of those for an archive that is damaged
            raise ParallelError(
                f"{path}: {self.size} bytes that are no whole zip archive ({error}); expected a "
                "file of torch.save (torch 1.6 or later). It is truncated, or of another format: "
                "copy it again"
            ) from error
        try:
            self.contents: Any = unpickled(contents)
        except ValueError as error:
            raise ParallelError(f"{path}: its data.pkl is damaged: {error}") from error

    def tensors(self, contents: Mapping[str, Any]) -> dict[str, StoredTensor]:
        """Return the tensors of a state dict, but for the ``_extra_state`` of layers.

        Raises:
            ParallelError: A value is of a class that is not known: it may be a weight.
        """
        found: dict[str, StoredTensor] = {}
        for name, value in contents.items():
            if str(name).endswith("_extra_state"):
                continue
            if isinstance(value, StoredTensor) and isinstance(name, str):
                self.check(name, value)
                found[name] = value
            elif value is not None and not isinstance(value, str | int | float):
                kind = value.qualname if isinstance(value, Foreign) else type(value).__name__
                raise ParallelError(
                    f"{self.path}: {name} is a {kind}, which is not read; expected a plain tensor "
                    "by name: load it, and save it as one"
                )
        return found

    def check(self, name: str, tensor: StoredTensor) -> None:
        """Raise `ParallelError` unless the file holds all of a tensor."""
        _, held = self._members.get(f"data/{tensor.storage}", (0, 0))
        needed = tensor.end * tensor.dtype.itemsize
        if needed > held:
            raise ParallelError(
                f"{self.path}: tensor {name} of shape {tensor.shape} and dtype {tensor.dtype} "
                f"needs {needed} bytes of data/{tensor.storage}, which has {held}; the file is "
                "damaged: copy it again"
            )

    def read_into(self, tensor: StoredTensor, dim: int, start: int, out: Tensor) -> None:
        """Fill ``out`` with a tensor's ``[start, start + out.shape[dim])`` along ``dim``.

        Args:
            tensor: One that `check` has seen.
            dim: Any dim of it; 0 also where it has none.
            start: Where the stretch begins.
            out: A CPU tensor of its dtype, of any strides.
        """
        if not out.numel():
            return
        begin, _ = self._members[f"data/{tensor.storage}"]
        begin += tensor.offset * tensor.dtype.itemsize
        with open(self.path, "rb", buffering=0) as file:
            if tensor.is_contiguous:
                read_stretch(Region(file, begin, tensor.shape), dim, start, out)
            else:
                begin += start * tensor.stride[dim] * tensor.dtype.itemsize
                _read_view(file, begin, tensor.stride, out)

    def _index(self, archive: zipfile.ZipFile, file: BinaryIO) -> bytes:
        """Note where the members are, and return the pickle."""
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if not pickles:
            raise ParallelError(
                f"{self.path}: a zip archive without data.pkl; expected a file of torch.save"
            )
        top = pickles[0].removesuffix("data.pkl")
        places = sorted(info.header_offset for info in archive.infolist())
        following = dict(itertools.pairwise([*places, archive.start_dir]))
        for info in archive.infolist():
            if not info.filename.startswith(f"{top}data/"):
                continue
            # The extra field of the local header differs from the directory's: it pads.
            file.seek(info.header_offset)
            name, extra = struct.unpack("<26xHH", file.read(30))
            begin = info.header_offset + 30 + name + extra
            if info.compress_type != zipfile.ZIP_STORED or begin + info.file_size > self.size:
                raise ParallelError(
                    f"{self.path}: {info.filename} is compressed, or ends at byte "
                    f"{begin + info.file_size} of {self.size}; expected what torch.save writes"
                )
            # With a wrong number there, other bytes would be taken for a tensor's.
            end = begin + info.file_size
            named = file.read(name) == info.filename.encode()
            file.seek(end)
            if info.flag_bits & 8:  # a checksum comes after the contents
                ends = file.read(4) == b"PK\x07\x08" and end < following[info.header_offset]
            else:
                ends = end == following[info.header_offset]
            if not named or not ends:
                raise zipfile.BadZipFile(f"{info.filename} is not where its header says")
            self._members[info.filename.removeprefix(top)] = begin, info.file_size
        order = f"{top}byteorder"
        if order in archive.namelist() and archive.read(order) != b"little":
            raise ParallelError(
                f"{self.path}: its byte order is {archive.read(order).decode()!r}; expected "
                "'little': load and save it again on such a machine"
            )
        return archive.read(pickles[0])


def _read_view(file: FileIO, begin: int, stride: tuple[int, ...], out: Tensor) -> None:
    """Fill ``out`` with a view of a larger tensor, or a transposed one.

    All that it spans is read, in halves along the outermost dim until that is little.
    """
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


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise ParallelError(f"{path}: there is no such file") from None
