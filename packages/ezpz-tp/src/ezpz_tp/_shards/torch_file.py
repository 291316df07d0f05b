"""Files of `torch.save`, read a stretch at a time.

A file is a zip archive whose members are stored, not compressed: ``data.pkl``, a pickle in which
tensors refer to storages by number, and ``data/0``, ``data/1``, ... with their bytes
(torch/serialization.py, the format since torch 1.6).
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ezpz_tp._errors import ParallelError

from .chunks import Region, read_stretch
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
        except (zipfile.BadZipFile, struct.error) as error:
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
            if isinstance(value, Foreign):
                raise ParallelError(
                    f"{self.path}: {name} is a {value.qualname}, which is not read; expected a "
                    "plain tensor: load it, and save it as one"
                )
            if isinstance(value, StoredTensor):
                self.check(name, value)
                found[name] = value
        return found

    def check(self, name: str, tensor: StoredTensor) -> None:
        """Raise `ParallelError` unless the file holds all of a tensor."""
        _, held = self._members.get(f"data/{tensor.storage}", (0, 0))
        needed = tensor.end * tensor.dtype.itemsize
        if min(tensor.shape, default=0) < 0 or needed > held or tensor.offset < 0:
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
        begin, _ = self._members[f"data/{tensor.storage}"]
        begin += tensor.offset * tensor.dtype.itemsize
        with open(self.path, "rb", buffering=0) as file:
            if tensor.is_contiguous:
                read_stretch(Region(file, begin, tensor.shape), dim, start, out)
                return
            # A view of a larger tensor, or a transposed one: rare, so all that it spans is read.
            span = torch.empty(tensor.end - tensor.offset, dtype=tensor.dtype)
            read_stretch(Region(file, begin, tuple(span.shape)), 0, 0, span)
        whole = span.as_strided(tensor.shape, tensor.stride)
        out.copy_(whole.narrow(dim, start, out.shape[dim]) if tensor.shape else whole)

    def _index(self, archive: zipfile.ZipFile, file: BinaryIO) -> bytes:
        """Note where the members are, and return the pickle."""
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if not pickles:
            raise ParallelError(
                f"{self.path}: a zip archive without data.pkl; expected a file of torch.save"
            )
        top = pickles[0].removesuffix("data.pkl")
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
            self._members[info.filename.removeprefix(top)] = begin, info.file_size
        order = f"{top}byteorder"
        if order in archive.namelist() and archive.read(order) != b"little":
            raise ParallelError(
                f"{self.path}: its byte order is {archive.read(order).decode()!r}; expected "
                "'little': load and save it again on such a machine"
            )
        return archive.read(pickles[0])


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise ParallelError(f"{path}: there is no such file") from None
