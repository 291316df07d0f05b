"""Files of `torch.save`, read and written a piece at a time; no code in them is run."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import IO, Any, NamedTuple, Self

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3
from torch.storage import _dtype_to_storage_type_map

from ezpz_tp._errors import ParallelError

from . import Stored, ToWrite, strides_of, write, written
from .safetensors import integers

# The pickle in a file of `torch.save`: tensors are described, not loaded, and no code is run.

# Without those of quantized dtypes, which are no tensors as they are.
_STORAGES: dict[torch.dtype, str] = {
    dtype: name for dtype, name in _dtype_to_storage_type_map().items() if not name.startswith("Q")
}


class Foreign:
    """What stands for any other global, as numpy's random state: it keeps nothing, does nothing."""

    qualname = ""

    def __new__(cls, *_: object, **__: object) -> Self:
        return super().__new__(cls)

    def __setstate__(self, *_: object) -> None: ...

    __setitem__ = append = extend = add = __setstate__

    def __repr__(self) -> str:
        return f"<{self.qualname}>"


class _Unpickler(pickle.Unpickler):
    """Unpickles with globals of our own: a file cannot have anything else imported or called."""

    def __init__(self, pickled: bytes, file: TorchFile) -> None:
        super().__init__(io.BytesIO(pickled))
        self._file = file

    def persistent_load(self, pid: Any) -> Stored:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise ValueError(f"a reference to {kind!r} of {dtype!r}; expected a storage")
        begin, _ = self._file.member(key)
        return Stored(self._file.path, dtype, integers((count,)), (1,), begin, str(key))

    def find_class(self, module: str, name: str) -> Any:
        found = _GLOBALS.get(f"{module}.{name}", foreign(module, name))
        # Of a function one of its own: a file can set attributes of it.
        if isinstance(found, FunctionType):
            return lambda *given: found(*given)  # noqa: PLW0108
        return found


def foreign(module: str, name: str) -> type[Foreign]:
    return type(name, (Foreign,), {"qualname": f"{module}.{name}"})


def _tensor(
    storage: Stored, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: object
) -> Stored:
    """Return a tensor in a file; what is not a tensor's is damage."""
    shape, strides, (first,) = integers(size), integers(stride), integers((offset,))
    if len(shape) != len(strides) or first > storage.shape[0]:
        raise ValueError(f"a tensor of size {size} and strides {stride}, from {offset} on")
    dtype = next((one for one in rest if isinstance(one, torch.dtype)), storage.dtype)
    begin = storage.at + first * dtype.itemsize
    return Stored(storage.path, dtype, shape, strides, begin, storage.storage)


def _with_attributes(
    make: Callable[..., Any], kind: type[Foreign], made: tuple[Any, ...], _: object
) -> Any:
    """Return what a tensor with attributes of Python is, or a parameter; not of another class."""
    plain = kind.qualname in {"torch.Tensor", "torch.nn.parameter.Parameter"}
    return make(*made) if plain else kind()


_GLOBALS: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "argparse.Namespace": SimpleNamespace,  # Megatron-LM's arguments
    "torch.Size": tuple,
    **{f"builtins.{kind.__name__}": kind for kind in (set, frozenset, complex, slice)},
    "__builtin__.set": set,
    **{f"torch._utils._rebuild_tensor{version}": _tensor for version in ("", "_v2", "_v3")},
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch.storage.UntypedStorage": torch.uint8,  # of dtypes without a storage, as fp8
    "torch.UntypedStorage": torch.uint8,
    **{f"torch.{name}": dtype for dtype, name in _STORAGES.items()},
    **{str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)},
}
"""What stands for a global, or for what holds the same facts."""


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
    """A file of `torch.save`, or a part of a file; in ``contents`` are `Stored` for tensors."""

    def __init__(self, path: Path, start: int = 0, size: int | None = None) -> None:
        self.path, self._start, self._is_part = path, start, size is not None
        try:
            self.size = path.stat().st_size - start if size is None else size
        except FileNotFoundError:
            raise ParallelError(f"{path}: there is no such file") from None
        self._members: dict[str, tuple[int, int]] = {}
        try:
            with (
                io.BufferedReader(FilePart(path, start, self.size)) as file,
                zipfile.ZipFile(file) as archive,
            ):
                pickled = self._index(archive, file)
        except ParallelError:
            raise
        except Exception as error:  # zipfile has no end of those for an archive that is damaged
            raise ParallelError(
                f"{path}: {self.size} bytes that are no whole zip archive ({error}); expected a "
                "file of torch.save (torch 1.6 or later). It is truncated, or of another format: "
                "copy it again"
            ) from error
        try:
            self.contents: Any = _Unpickler(pickled, self).load()
        except Exception as error:  # a pickle that is damaged raises anything
            raise ParallelError(f"{path}: its data.pkl is damaged: {error}") from error

    def dict_of(self, expected: str) -> dict[Any, Any]:
        if isinstance(self.contents, dict):
            return self.contents
        raise ParallelError(
            f"{self.path}: holds a {type(self.contents).__name__}; expected {expected}"
        )

    def tensors(self, contents: Mapping[str, Any]) -> dict[str, Stored]:
        """Return the tensors of a state dict, but for the ``_extra_state`` of layers."""
        found: dict[str, Stored] = {}
        for name, value in contents.items():
            if str(name).endswith("_extra_state"):
                continue
            if isinstance(value, Stored) and isinstance(name, str):
                self.check(name, value)
                found[name] = value
            elif value is not None and not isinstance(value, str | int | float):
                kind = value.qualname if isinstance(value, Foreign) else type(value).__name__
                raise ParallelError(
                    f"{self.path}: {name} is a {kind}, which is not read; expected a plain tensor "
                    "by name: load it, and save it as one"
                )
        return found

    def member(self, key: object) -> tuple[int, int]:
        return self._members.get(f"data/{key}", (self._start, 0))

    def check(self, name: str, tensor: Stored) -> None:
        begin, held = self.member(tensor.storage)
        needed = tensor.at - begin
        if 0 not in tensor.shape:
            steps = zip(tensor.shape, tensor.stride, strict=True)
            needed += (1 + sum((size - 1) * step for size, step in steps)) * tensor.dtype.itemsize
        if needed > held:
            raise ParallelError(
                f"{self.path}: tensor {name} of shape {tensor.shape} and dtype {tensor.dtype} "
                f"needs {needed} bytes of data/{tensor.storage}, which has {held}; the file is "
                "damaged: copy it again"
            )

    def _index(self, archive: zipfile.ZipFile, file: IO[bytes]) -> bytes:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if not pickles:
            raise ParallelError(
                f"{self.path}: a zip archive without data.pkl; expected a file of torch.save"
            )
        top = pickles[0].removesuffix("data.pkl")
        places = sorted(info.header_offset for info in archive.infolist())
        following = dict(itertools.pairwise([*places, archive.start_dir]))
        for info in archive.infolist():
            # The extra field of the local header differs from the directory's: it pads.
            file.seek(info.header_offset)
            name, extra = struct.unpack("<26xHH", file.read(30))
            begin = info.header_offset + 30 + name + extra
            end = begin + info.file_size
            if info.compress_type != zipfile.ZIP_STORED or end > self.size:
                raise ParallelError(
                    f"{self.path}: {info.filename} is compressed, or ends at byte "
                    f"{end} of {self.size}; expected what torch.save writes"
                )
            # With a wrong number there, other bytes would be taken for a tensor's.
            named = file.read(name) == info.filename.encode()
            file.seek(end)
            if info.flag_bits & 8:  # a checksum comes after the contents
                ends = file.read(4) == b"PK\x07\x08" and end < following[info.header_offset]
            else:
                ends = end == following[info.header_offset]
            if not named or not ends:
                raise zipfile.BadZipFile(f"{info.filename} is not where its header says")
            self._members[info.filename.removeprefix(top)] = self._start + begin, info.file_size

        def contents(name: str) -> bytes:
            if not self._is_part:
                return archive.read(f"{top}{name}")
            # Of a part ezpz_dist sums the whole file, and not the members.
            begin, size = self._members[name]
            file.seek(begin - self._start)
            return file.read(size)

        if "byteorder" in self._members and (order := contents("byteorder")) != b"little":
            raise ParallelError(
                f"{self.path}: its byte order is {order.decode()!r}; expected "
                "'little': load and save it again on such a machine"
            )
        return contents("data.pkl")


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
