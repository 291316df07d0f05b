"""Files of `torch.save`, read and written a stretch at a time; no code in them is run."""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Self

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from ezpz_tp._errors import ParallelError
from ezpz_tp._shard import Entry, Piece

from . import Splits, StoredPiece, StoredPieces, unknown
from .safetensors import integers
from .stretches import CHUNK, Region, naming, read_box, strides_of

# The pickle in a file of `torch.save`: tensors are described, not loaded, and no code is run.

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8,  # of dtypes that are younger than typed storages, as fp8
}
"""The storages that a file names, and what they hold."""

_PLAIN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("argparse", "Namespace"): SimpleNamespace,  # Megatron-LM's arguments
    ("torch", "Size"): tuple,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "slice"): slice,
    ("__builtin__", "set"): set,
}
"""The globals that stand for themselves, or for what holds the same facts."""


class Foreign:
    """What stands for any other global, as numpy's random state: it keeps nothing, does nothing."""

    qualname = ""

    def __new__(cls, *_: object, **__: object) -> Self:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, value: object) -> None: ...

    def extend(self, values: object) -> None: ...

    def add(self, value: object) -> None: ...

    def __repr__(self) -> str:
        return f"<{self.qualname}>"


@dataclass(frozen=True, slots=True)
class Storage:
    """What tensors in a file are views of."""

    dtype: torch.dtype
    key: str
    numel: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: where its elements are, in elements of its dtype."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Return the element after its last, in its storage."""
        if 0 in self.shape:
            return self.offset
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + 1 + sum((size - 1) * step for size, step in steps)


def unpickled(pickled: bytes) -> Any:
    """Return what was pickled, with what stands for tensors and for what is not known."""
    try:
        return _Unpickler(io.BytesIO(pickled)).load()
    except _DAMAGE as error:
        raise ValueError(str(error)) from error


_DAMAGE = (
    pickle.UnpicklingError,
    ValueError,
    TypeError,
    EOFError,
    LookupError,
    AttributeError,
    OverflowError,
)
"""What a pickle that is not whole raises."""


class _Unpickler(pickle.Unpickler):
    """Unpickles with globals of our own: a file cannot have anything else imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if (module, name) in _REBUILD:
            made = _REBUILD[module, name]
            # A function of its own: a file can set attributes of it.
            return lambda *given: made(*given)  # noqa: PLW0108
        if module in {"torch", "torch.storage"} and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return type(name, (Foreign,), {"qualname": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Storage:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(
                f"a reference to {kind!r} of {dtype!r}; expected a storage"
            )
        return Storage(dtype, key, numel)


def _tensor(
    storage: Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> StoredTensor:
    return _stored(storage.dtype, storage, offset, size, stride)


def _stored(
    dtype: torch.dtype, storage: Storage, offset: int, *places: tuple[int, ...]
) -> StoredTensor:
    """Return a tensor in a file; what is not a tensor's is damage."""
    size, stride = places
    if len(integers(size)) != len(integers(stride)) or integers((offset,))[0] > storage.numel:
        raise ValueError(f"a tensor of size {size} and strides {stride}, from {offset} on")
    return StoredTensor(dtype, tuple(size), tuple(stride), offset, str(storage.key))


def _tensor_of_dtype(
    storage: Storage,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: object,
    dtype: torch.dtype,
    *_: object,
) -> StoredTensor:
    del requires_grad, hooks
    return _stored(dtype, storage, offset, size, stride)


def _parameter(tensor: StoredTensor, *_: object) -> StoredTensor:
    return tensor


def _with_attributes(
    make: Callable[..., Any], kind: type[Foreign], made: tuple[Any, ...], state: object
) -> Any:
    """Return what a tensor with attributes of Python is, or a parameter; not of another class."""
    del state
    plain = kind.qualname in {"torch.Tensor", "torch.nn.parameter.Parameter"}
    return make(*made) if plain else kind()


_REBUILD: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _with_attributes,
}


# Files of `torch.save`, read a stretch at a time.


class FilePart(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        super().__init__()
        self._file = path.open("rb", buffering=0)
        self._start, self._size, self._at = start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + {os.SEEK_CUR: self._at, os.SEEK_END: self._size}.get(whence, 0)
        if self._at < 0:
            raise OSError(f"byte {self._at}")
        return self._at

    def readinto(self, room: Any, /) -> int:
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(room)[: max(0, self._size - self._at)])
        self._at += count or 0
        return count or 0

    def close(self) -> None:
        self._file.close()
        super().close()


class TorchFile:
    """A file of `torch.save`, or a part of a file; in ``contents`` something stands for tensors."""

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
        """Return the tensors of a state dict, but for the ``_extra_state`` of layers."""
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

    def read(self, tensor: StoredTensor, box: Piece, out: Tensor) -> None:
        """Fill a CPU tensor with a box of one that `check` has seen."""
        begin, _ = self._members[f"data/{tensor.storage}"]
        begin += self._start + tensor.offset * tensor.dtype.itemsize
        with open(self.path, "rb", buffering=0) as file:
            read_box(Region(file, begin, tensor.shape), tensor.stride, box, out)

    def _index(self, archive: zipfile.ZipFile, file: IO[bytes]) -> bytes:
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

        def contents(name: str) -> bytes:
            if not self._is_part:
                return archive.read(f"{top}{name}")
            # Of a part ezpz_dist sums the whole file, and not the members.
            begin, size = self._members[name]
            file.seek(begin)
            return file.read(size)

        if "byteorder" in self._members and (order := contents("byteorder")) != b"little":
            raise ParallelError(
                f"{self.path}: its byte order is {order.decode()!r}; expected "
                "'little': load and save it again on such a machine"
            )
        return contents("data.pkl")


# Writes what `torch.save` writes of a state dict, without ever holding it.

_ALIGNMENT = 64
"""Where storages begin, as torch.save has it, so that a file can be mapped."""

_NAMES = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}

Sizes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def write_torch_file(path: Path, tensors: Sizes, parts: Callable[[str], Iterable[Tensor]]) -> None:
    """Write a state dict that `torch.load` can map; ``parts`` gives a tensor's values in order."""
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
        (name, StoredTensor(dtype, shape, strides_of(shape), 0, str(number)))
        for number, (name, (dtype, shape)) in enumerate(tensors.items())
    )
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(contents)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Writes what `torch.load` makes a tensor of, where there is a `StoredTensor`."""

    def persistent_id(self, obj: object) -> Any:
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


# Full tensors of which each of several files holds a part.


@dataclass(frozen=True, slots=True)
class TensorInFile:
    file: TorchFile
    tensor: StoredTensor

    def read(self, box: Piece, out: Tensor) -> None:
        self.file.read(self.tensor, box, out)


class JoinedTensors(StoredPieces):
    """Tensors put together from the files of tensor-parallel ranks; ``said`` is what these say."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        super().__init__()
        self.said = said
        self._lost: dict[str, tuple[int, ...]] = {}
        self.parts: dict[str, Sequence[TensorInFile]] = {}

    def take(self, name: str, parts: Sequence[TensorInFile], splits: Splits) -> None:
        """Take a tensor, one part a rank, as its name says that it is split; see `check_known`."""
        first, degree = parts[0], len(parts)
        stored = splits.stored(name, first.tensor.shape, degree)
        shard = stored and splits.shard(name, stored.full_shape)
        if stored is None or shard is None:
            self._lost[name] = first.tensor.shape
            return
        pieces = []
        for index, part in enumerate(parts):
            _check_like(name, part, stored.local_shape(index, degree), first)
            if stored.dim is None and part is not first:
                check_equal(name, first, part)
            elif stored.dim is not None or part is first:
                for local, full in stored.boxes(index, degree):
                    pieces.append(StoredPiece(full, local.offsets, part.read))
        self.add(Entry(name, first.tensor.dtype, shard), pieces)
        self.parts[name] = parts

    def check_known(self, where: object) -> None:
        """Raise `ParallelError` where no rule said how some of the tensors are split."""
        if self._lost:
            raise unknown(where, self._lost)


def check_equal(name: str, first: TensorInFile, second: TensorInFile) -> None:
    """Raise `ParallelError` unless two files have the same tensor, bit for bit."""
    shape, dtype = first.tensor.shape, first.tensor.dtype
    _check_like(name, second, shape, first)
    rows = shape[0] if shape else 1
    step = max(1, CHUNK * rows // max(1, first.tensor.numel * dtype.itemsize))
    for start in range(0, rows, step):
        sizes = (min(step, rows - start), *shape[1:]) if shape else ()
        box = Piece((start, *(0 for _ in shape[1:])) if shape else (), sizes)
        here, there = (torch.empty(sizes, dtype=dtype) for _ in range(2))
        first.read(box, here)
        second.read(box, there)
        # As bytes, in which NaNs are equal too.
        if not torch.equal(here.reshape(-1).view(torch.uint8), there.reshape(-1).view(torch.uint8)):
            raise ParallelError(
                f"{second.file.path}: tensor {name} of shape {shape} is not that of "
                f"{first.file.path}; expected the same values, to the last bit, in both files"
            )


def _check_like(name: str, part: TensorInFile, shape: tuple[int, ...], first: TensorInFile) -> None:
    found = part.tensor.shape, part.tensor.dtype
    if found != (shape, first.tensor.dtype):
        raise ParallelError(
            f"{part.file.path}: tensor {name} has shape {found[0]} and dtype {found[1]}; expected "
            f"{shape} and {first.tensor.dtype}, as {first.file.path} has it (files of different "
            "models, or of different degrees?)"
        )
