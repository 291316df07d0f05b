"""Files of `torch.save`, read and written a piece at a time; no code in them is run."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple, Self

import torch
from torch import Tensor, _weights_only_unpickler
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3
from torch.serialization import safe_globals
from torch.storage import TypedStorage, UntypedStorage, _dtype_to_storage_type_map

from ezpz_tp._errors import ParallelError

from . import Stored, ToWrite, strides_of, write, written

# Without those of quantized dtypes, which are no tensors as they are.
_STORAGES: dict[torch.dtype, str] = {
    dtype: name for dtype, name in _dtype_to_storage_type_map().items() if not name.startswith("Q")
}
_unpickler: Any = _weights_only_unpickler


class Foreign:
    """What stands for a global that torch does not trust, as numpy's: it keeps and does nothing."""

    def __new__(cls, *_: object, **__: object) -> Self:
        return super().__new__(cls)

    def __setstate__(self, *_: object) -> None: ...


def _stand_ins(pickled: bytes) -> list[Any]:
    names = _unpickler.get_globals_in_pkl(io.BytesIO(pickled))
    unknown = names - _unpickler._get_allowed_globals().keys()  # noqa: SLF001 - as torch asks
    found = []
    for module, _, name in (each.rpartition(".") for each in unknown):
        # Megatron-LM's arguments are looked into.
        kind = SimpleNamespace if (module, name) == ("argparse", "Namespace") else Foreign
        found.append(type(name, (kind,), {"__module__": module, "__qualname__": name}))
    return found


class FilePart(io.FileIO):
    def __init__(self, path: Path, start: int, size: int) -> None:
        super().__init__(path)
        self._start, self._end = start, start + size
        self.seek(0)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        begin = (self._start, super().tell(), self._end)[whence]
        return super().seek(max(self._start, begin + offset)) - self._start

    def tell(self) -> int:
        return super().tell() - self._start

    def readinto(self, room: Any, /) -> int | None:
        return super().readinto(memoryview(room)[: max(0, self._end - super().tell())])

    def readall(self) -> bytes:
        return self.read(max(0, self._end - super().tell())) or b""


class TorchFile:
    """A file of `torch.save`, or a part of a file; in ``contents`` are meta tensors."""

    def __init__(self, path: Path, start: int = 0, size: int | None = None) -> None:
        self.path, self._start = path, start
        try:
            self.size = path.stat().st_size - start if size is None else size
            opened = io.BufferedReader(FilePart(path, start, self.size))
        except FileNotFoundError:
            raise ParallelError(f"{path}: there is no such file") from None
        with opened as file:
            try:
                reader: Any = torch._C.PyTorchFileReader(file)  # noqa: SLF001 - torch.load's own
                pickled: bytes = reader.get_record("data.pkl")
                order: bytes = b"little"
                if reader.has_record("byteorder"):
                    order = reader.get_record("byteorder")
            except (RuntimeError, ValueError) as error:
                raise ParallelError(
                    f"{path}: {self.size} bytes that are no whole zip archive of torch.save (torch "
                    "1.6 or later). It is truncated, or of another format: copy it again"
                ) from error
            if order != b"little":
                raise ParallelError(
                    f"{path}: its byte order is {order.decode()!r}; expected 'little': load and "
                    "save it again on such a machine"
                )
            try:
                self.contents = self._unpickled(pickled, reader, file)
            except Exception as error:  # a pickle that is damaged raises anything
                raise ParallelError(
                    f"{path}: its data.pkl is damaged, or has what is not read: {error}"
                ) from error

    def _unpickled(self, pickled: bytes, reader: Any, file: IO[bytes]) -> Any:
        """Unpickle as `torch.load(weights_only=True)` does, but for the values of tensors."""
        archive, places = zipfile.ZipFile(file), {}
        infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        ends = [*(info.header_offset for info in infos[1:]), archive.start_dir]
        for info, end in zip(infos, ends, strict=True):
            name = info.filename.partition("/")[2]
            begin = reader.get_record_offset(name)
            # A checksum of 16 or 24 bytes may follow. With a wrong number in its own header other
            # bytes would be taken for a tensor's.
            if info.compress_type or end - begin - info.file_size not in {0, 16, 24}:
                raise ValueError(f"{info.filename} is compressed, or not where its header says")
            places[name] = begin, info.file_size

        def storage(pid: tuple[Any, ...]) -> TypedStorage:
            _, kind, key, _, count = pid
            dtype = torch.uint8 if kind is UntypedStorage else kind.dtype
            made: Any = UntypedStorage(count * dtype.itemsize, device="meta")
            begin, held = places[f"data/{key}"]
            if made.nbytes() > held:
                raise ValueError(f"data/{key} has {held} bytes; expected {made.nbytes()}")
            made.at, made.room = self._start + begin, made.nbytes()
            return TypedStorage(wrap_storage=made, dtype=dtype, _internal=True)

        unpickler = _unpickler.Unpickler(io.BytesIO(pickled), encoding="utf-8")
        unpickler.persistent_load = storage
        with safe_globals(_stand_ins(pickled)):
            return unpickler.load()

    def dict_of(self, expected: str) -> dict[Any, Any]:
        if isinstance(self.contents, dict):
            return self.contents
        raise ParallelError(
            f"{self.path}: holds a {type(self.contents).__name__}; expected {expected}"
        )

    def stored(self, tensor: Tensor) -> Stored:
        storage: Any = tensor.untyped_storage()
        # A meta tensor that does not lie within its storage has made that larger.
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
        if (tensor.storage_offset() + span) * tensor.itemsize > storage.room:
            raise ParallelError(
                f"{self.path}: its data.pkl is damaged: a tensor of shape {tuple(tensor.shape)} is "
                f"larger than the {storage.room} bytes that it is of"
            )
        begin = storage.at + tensor.storage_offset() * tensor.itemsize
        return Stored(self.path, tensor.dtype, tuple(tensor.shape), tensor.stride(), begin)

    def tensors(self, contents: Mapping[str, Any]) -> dict[str, Stored]:
        """Return the tensors of a state dict, but for the ``_extra_state`` of layers."""
        found: dict[str, Stored] = {}
        for name, value in contents.items():
            if str(name).endswith("_extra_state"):
                continue
            if isinstance(value, Tensor) and isinstance(name, str):
                found[name] = self.stored(value)
            elif value is not None and not isinstance(value, str | int | float):
                raise ParallelError(
                    f"{self.path}: {name} is a {type(value).__name__}, which is not read; expected "
                    "a plain tensor by name: load it, and save it as one"
                )
        return found


# Writes what `torch.save` writes of a state dict, without ever holding it.

_ALIGNMENT = 64  # of where storages begin, as torch.save has it, so that a file can be mapped


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Written:
    """What `torch.load` makes a tensor of, as `torch.Tensor` says it of itself."""

    storage: _Storage

    def __reduce__(self) -> tuple[Any, ...]:
        dtype, _, shape = self.storage
        hooks: OrderedDict[str, Any] = OrderedDict()
        made = self.storage, 0, shape, strides_of(shape), False, hooks
        if dtype in _STORAGES:
            return _rebuild_tensor_v2, made
        return _rebuild_tensor_v3, (*made, dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> Any:
        if not isinstance(obj, _Storage):
            return None
        count, name = torch.Size(obj.shape).numel(), _STORAGES.get(obj.dtype)
        if name is None:
            return "storage", torch.UntypedStorage, obj.key, "cpu", count * obj.dtype.itemsize
        return "storage", getattr(torch, name), obj.key, "cpu", count


def write_torch_file(path: Path, tensors: ToWrite) -> None:
    pickled = io.BytesIO()
    contents: OrderedDict[str, _Written] = OrderedDict()
    for number, (name, (dtype, shape, _)) in enumerate(tensors.items()):
        contents[name] = _Written(_Storage(dtype, str(number), shape))
    _Pickler(pickled, protocol=2).dump(contents)
    words = {"data.pkl": pickled.getvalue(), "byteorder": b"little", "version": b"3\n"}
    with written(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, word in words.items():
            with _member(archive, name) as member:
                member.write(word)
        for number, (*_, values) in enumerate(tensors.values()):
            with _member(archive, f"data/{number}") as member:
                for part in values:
                    write(member, part)


def _member(archive: zipfile.ZipFile, name: str) -> Any:
    """Open a new member whose contents begin at a multiple of `_ALIGNMENT`."""
    info = zipfile.ZipInfo(f"archive/{name}", date_time=(1980, 1, 1, 0, 0, 0))
    file: Any = archive.fp
    header = 30 + len(info.filename) + 20  # with what zipfile adds for sizes of 64 bits
    padding = -(file.tell() + header + 4) % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)  # as torch.save pads
    return archive.open(info, "w", force_zip64=True)
