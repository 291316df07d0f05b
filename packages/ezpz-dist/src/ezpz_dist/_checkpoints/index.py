"""The format on disk: manifest, index, archives of tensors; and which checkpoints are whole."""

from __future__ import annotations

import ctypes
import io
import json
import logging
import os
import pickle
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.utils import _create_file_view
from torch.serialization import get_crc32_options, set_crc32_options

from ezpz_dist._errors import grouped
from ezpz_dist._objects import raw_of
from ezpz_dist._version import __version__
from ezpz_tp import Piece

from . import store as _store
from .store import MANIFEST, Name, SaveArgs, Store

# What makes a checkpoint one: its files with size and checksum, and what is in it.

FORMAT = 1
_LONGEST = 1 << 30
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What comes of taking JSON for something that it is not: ``int(Infinity)``, ``[].get``."""


class Written(NamedTuple):
    size: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    step: int
    world_size: int
    contents: tuple[str, ...]
    time: float
    torch: str
    files: Mapping[str, Written]
    sequence: int = 0

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


def encode_manifest(manifest: Manifest) -> bytes:
    files = {name: [one.size, f"{one.crc32:08x}"] for name, one in manifest.files.items()}
    about = {"format": FORMAT, **asdict(manifest), "files": files}
    about |= {"ezpz_dist": __version__, "python": sys.version.split()[0]}
    return json.dumps({"checkpoint": about, "crc32": f"{_checksum(about):08x}"}, indent=1).encode()


def _checksum(about: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def decode_manifest(data: bytes) -> Manifest:
    try:
        whole = json.loads(data)
        about, said = whole["checkpoint"], int(whole["crc32"], 16)
        found, version = _checksum(about), about.get("format")
    except _MALFORMED as error:
        raise ValueError(f"{MANIFEST} is damaged ({error})") from error
    if found != said:
        raise ValueError(f"{MANIFEST} is damaged: crc32 {found:08x}; expected {said:08x}")
    if version != FORMAT:
        raise ValueError(f"{MANIFEST} has format {version!r}; this ezpz_dist reads {FORMAT}")
    try:
        files = {name: Written(int(n), int(c, 16)) for name, (n, c) in about["files"].items()}
        return Manifest(
            int(about["step"]), int(about["world_size"]), tuple(map(str, about["contents"])),
            float(about["time"]), str(about["torch"]), files, int(about.get("sequence", 0)),
        )  # fmt: skip
    except _MALFORMED as error:
        raise ValueError(f"{MANIFEST} is damaged ({error!r})") from error


def read_manifest(store: Store, folder: str) -> Manifest:
    path = f"{folder}/{MANIFEST}"
    try:
        if (size := store.size(path)) is None:
            raise ValueError(f"there is no {MANIFEST}: it was never completed")
        if size > _LONGEST:
            raise ValueError(f"{MANIFEST} has {size} bytes; expected at most {_LONGEST}")
        with store.open(path, "rb") as file:
            manifest = decode_manifest(file.read())
    except OSError as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from error
    if (name := _store.parse(folder)) is not None and name.step != manifest.step:
        raise ValueError(f"{MANIFEST} is of step {manifest.step}")
    return manifest


def damage_of(store: Store, folder: str, name: str, said: Written) -> str | None:
    """Read a file through and return what is wrong with it; None: it is as it was written."""
    path = f"{folder}/{name}"
    crc = size = 0
    view = memoryview(bytearray(1 << 22))
    try:
        if (found := store.size(path)) is None:
            return f"{name} is missing"
        if found != said.size:
            return f"{name} has {found} bytes; expected {said.size}"
        with store.open(path, "rb") as file:
            # A device has size 0 and no end.
            while size <= said.size and (count := file.readinto(view)):  # type: ignore[attr-defined]
                crc = zlib.crc32(view[:count], crc)
                size += count
    except OSError as error:
        return f"{name} cannot be read ({error})"
    if size != said.size:
        return f"{name} has {size} bytes; expected {said.size}"
    if crc != said.crc32:
        return f"{name} has crc32 {crc:08x}; expected {said.crc32:08x}"
    return None


# The files of one checkpoint, counted and checksummed as they are written.


class _Summing:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.crc32 = self.count = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.failure = error  # torch's writer, in between, raises something else
            raise
        self.crc32 = zlib.crc32(data, self.crc32)
        self.count += written
        return written

    def tell(self) -> int:
        return self.count

    def flush(self) -> None:
        """Nothing: torch flushes after every tensor; `sync` does at the end."""

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


class Files:
    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder
        self.written: dict[str, Written] = {}

    def write(self, name: str, data: bytes) -> None:
        with self.open(name) as stream:
            stream.write(data)

    @contextmanager
    def open(self, name: str) -> Iterator[_Summing]:
        """Open a file to be written; it is synced and known afterwards."""
        where = f"{self._folder}/{name}"
        summing: _Summing | None = None
        try:
            with self._store.open(where, "wb") as file:
                summing = _Summing(file)
                yield summing
                summing.sync()
        except (OSError, RuntimeError) as error:
            origin = (summing and summing.failure) or error
            if not isinstance(origin, OSError):
                raise
            extent = f"{self._store.root}/{where}"
            raise OSError(origin.errno, origin.strerror or str(origin), extent) from error
        self.written[name] = Written(summing.count, summing.crc32)


# Tensors in a file, each as an archive of `torch.save`'s, made and read many at a time.

_SMALL = 1 << 16
"""Bytes of archives that are made together; of longer ones torch's own time is nothing."""
_BATCH = 1 << 20  # bytes of archives that are made at once
_FEW = 3  # tensors alike that are not worth an archive to copy from


class Extent(NamedTuple):
    at: int
    length: int


class _Frame(NamedTuple):
    """What an archive has around the elements."""

    head: bytes
    tail: bytes

    def around(self, tensors: Sequence[Tensor]) -> bytes:
        """Return the archives of tensors like the one that it was made for."""
        raw = raw_of(torch.stack(list(tensors)).cpu())
        each = len(raw) // len(tensors)
        rows = (raw[at : at + each] for at in range(0, len(raw), each))
        return b"".join([part for row in rows for part in (self.head, row, self.tail)])


def _is_plain(tensor: Tensor) -> bool:
    """Return whether its values are its bytes: of a view of conjugates, say, they are not."""
    lazy = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return tensor.is_contiguous() and not lazy


def write(stream: Any, tensors: Sequence[Tensor]) -> list[Extent]:
    """Write tensors, those of one dtype and size behind each other; return each one's extent."""
    extents = [Extent(0, 0)] * len(tensors)
    alike = grouped(((one.dtype, one.shape, one.device), at) for at, one in enumerate(tensors))
    with torch.no_grad(), ExitStack() as ends:
        # Of tensors too torch makes sums, as for a ZIP archive, which are never read. This is of
        # this thread, as of torch 2.13; in earlier ones perhaps of all.
        ends.callback(set_crc32_options, get_crc32_options())
        set_crc32_options(False)
        for numbers in alike.values():
            frame = _made_frame(tensors[numbers[0]]) if len(numbers) > _FEW else None
            if frame is None:
                for number in numbers:
                    at, here = stream.tell(), tensors[number].cpu().contiguous()
                    is_all = here.untyped_storage().nbytes() == here.nbytes  # torch saves all of it
                    torch.save(here if is_all else here.clone(), stream)
                    extents[number] = Extent(at, stream.tell() - at)
                continue
            length = len(frame.head) + tensors[numbers[0]].nbytes + len(frame.tail)
            step = max(1, _BATCH // length)
            for start in range(0, len(numbers), step):
                at, some = stream.tell(), numbers[start : start + step]
                for place, number in enumerate(some):
                    extents[number] = Extent(at + place * length, length)
                stream.write(frame.around([tensors[number] for number in some]))
    return extents


def _made_frame(tensor: Tensor) -> _Frame | None:
    """Return the frame of what is like a tensor; None where it is too large, or not found."""
    if tensor.is_quantized or tensor.nbytes > _SMALL:
        return None
    stream, like = io.BytesIO(), torch.empty(tensor.shape, dtype=tensor.dtype)
    torch.save(like, stream)
    return _frame_in(stream, Extent(0, stream.tell()), like)


class Wanted(NamedTuple):
    key: str
    extent: Extent
    dtype: torch.dtype
    size: tuple[int, ...]
    part: Piece | None
    target: Tensor

    def fill(self, tensor: Tensor) -> None:
        self.target.copy_(tensor if self.part is None else tensor[self.part.slices])


def read(stream: IO[bytes], wanted: Sequence[Wanted]) -> None:
    """Fill tensors from a file's archives. Unpickles nothing but tensors."""
    alike = grouped(((one.dtype, one.size, one.extent.length), one) for one in wanted)
    with torch.no_grad():
        for first, *others in alike.values():
            tensor = _load(stream, first)
            first.fill(tensor)
            is_like = others and tensor.dtype == first.dtype
            frame = _frame_in(stream, first.extent, tensor) if is_like else None
            for one in others:
                if frame is None or not _fill(stream, frame, one):
                    one.fill(_load(stream, one))


def _load(stream: Any, one: Wanted) -> Tensor:
    view: Any = _create_file_view(stream, *one.extent)
    found = torch.load(view, map_location="cpu", weights_only=True)
    if not isinstance(found, Tensor) or tuple(found.size()) != one.size:
        what = tuple(found.size()) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"{one.key} is {what} in its file; expected a tensor of {one.size}")
    return found


def _frame_in(stream: Any, extent: Extent, tensor: Tensor) -> _Frame | None:
    """Return the frame of a tensor's archive; None where its elements are not found in it."""
    if not _is_plain(tensor) or not 0 < tensor.nbytes == tensor.untyped_storage().nbytes():
        return None
    at, length = extent
    archive: Any = _create_file_view(stream, *extent)
    try:
        reader: Any = torch._C.PyTorchFileReader(archive)  # noqa: SLF001 - as torch.load does
        start = reader.get_record_offset("data/0")
    except RuntimeError:
        return None
    stop = start + tensor.nbytes
    head, tail = (bytes(_read(stream, *part)) for part in ((at, start), (at + stop, length - stop)))
    if sys.byteorder.encode() not in head + tail:
        return None  # torch has turned the bytes
    return _Frame(head, tail)


def _read(stream: IO[bytes], at: int, count: int, into: Any = None) -> Any:
    room = memoryview(bytearray(count) if into is None else into)
    stream.seek(at)
    if (found := stream.readinto(room)) != count:  # type: ignore[attr-defined]
        raise ValueError(f"a file ends {count - found} bytes early")
    return room


def _fill(stream: IO[bytes], frame: _Frame, one: Wanted) -> bool:
    """Fill a tensor whose archive differs in the elements only; return whether that can be done."""
    (at, length), start, ends = one.extent, len(frame.head), len(frame.tail)
    target, count = one.target, length - start - ends
    # Without another tensor of its size; a copy by torch's threads took longer than the reading.
    here = not one.part and target.dtype == one.dtype and target.is_cpu and _is_plain(target)
    head, tail = _read(stream, at, start), _read(stream, at + length - ends, ends)
    if bytes(head) != frame.head or bytes(tail) != frame.tail:
        return False
    if here:
        room = (ctypes.c_char * count).from_address(target.data_ptr())
        _read(stream, at + start, count, room)
    else:
        elements = torch.frombuffer(_read(stream, at + start, count), dtype=one.dtype)
        one.fill(elements.view(one.size))
    return True


# Where each piece of each tensor lies in a checkpoint's files, as JSON.


class Chunk(NamedTuple):
    piece: Piece
    file: str
    extent: Extent


@dataclass(frozen=True, slots=True)
class Saved:
    size: torch.Size
    dtype: torch.dtype
    chunks: list[Chunk] = field(default_factory=list)


def encode_index(saved: Mapping[str, Saved]) -> bytes:
    files: dict[str, int] = {}
    tensors: dict[str, Any] = {}
    for key, about in saved.items():
        chunks = [
            (*piece, files.setdefault(file, len(files)), *extent)
            for piece, file, extent in about.chunks
        ]
        tensors[key] = (str(about.dtype).removeprefix("torch."), about.size, chunks)
    return json.dumps({"files": list(files), "tensors": tensors}, separators=(",", ":")).encode()


def metadata_of(saved: Mapping[str, Saved]) -> bytes:
    """Return the same as torch's own tools want it."""
    # What is equal is one object: it is made and pickled once, however many tensors there are.
    sizes: dict[tuple[int, ...], torch.Size] = {}
    alike: dict[Any, dcp.TensorStorageMetadata] = {}
    metadata = dcp.Metadata({}, storage_data={})
    for key, about in saved.items():
        pieces = [chunk.piece for chunk in about.chunks]
        layout = (about.dtype, about.size, *pieces)
        if layout not in alike:
            sizes |= {each: torch.Size(each) for piece in pieces for each in piece}
            chunks = [dcp.ChunkStorageMetadata(sizes[one], sizes[other]) for one, other in pieces]
            properties = dcp.TensorProperties(dtype=about.dtype)
            alike[layout] = dcp.TensorStorageMetadata(properties, about.size, chunks)
        metadata.state_dict_metadata[key] = alike[layout]
        for piece, file, extent in about.chunks:
            index = dcp.MetadataIndex(key)
            object.__setattr__(index, "offset", sizes[piece.offsets])  # it would make another
            metadata.storage_data[index] = _StorageInfo(file, *extent)
    return pickle.dumps(metadata)


def decode_index(data: bytes) -> dict[str, Saved]:
    try:
        whole = json.loads(data)
        files = [_text(name) for name in whole["files"]]
        saved: dict[str, Saved] = {}
        for key, (dtype, size, chunks) in whole["tensors"].items():
            placed = [
                Chunk(Piece(_ints(begin), _ints(sizes)), files[file], Extent(*_ints([at, length])))
                for begin, sizes, file, at, length in chunks
            ]
            saved[key] = Saved(torch.Size(_ints(size)), _dtype(dtype), placed)
            if any(not len(size) == len(one) == len(two) for (one, two), _, _ in placed):
                raise ValueError(f"{key} has pieces of other dimensions")
    except _MALFORMED as error:
        raise ValueError(f"index.json is damaged ({error!r})") from error
    return saved


def _text(name: Any) -> str:
    if not isinstance(name, str) or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} is no file's name")
    return name


def _ints(values: Any) -> tuple[int, ...]:
    for value in values:
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{value!r} is no size")
    return tuple(values)


def _dtype(name: Any) -> torch.dtype:
    found = vars(torch).get(name)  # getattr would import whatever torch finds by that name
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is no dtype of this torch")
    return found


# Which checkpoints there are, and whether one is whole.

logger = logging.getLogger(__name__)


def read_manifests(
    store: Store, step: int | None = None
) -> tuple[dict[Name, Manifest], list[Name]]:
    """Return the manifests that can be read, the last saved first, and whose cannot be."""
    found: dict[Name, Manifest] = {}
    wrong: list[Name] = []
    for name in _store.names_in(store.entries()):
        if step in (None, name.step):
            try:
                found[name] = read_manifest(store, str(name))
            except ValueError:
                wrong.append(name)
    # A run that goes back abandons what it had saved from that step on: that comes after all
    # that the newest stands on.
    trunk: list[Name] = []
    abandoned: list[Name] = []
    for name in sorted(found, key=lambda each: (found[each].sequence, each), reverse=True):
        (trunk if not trunk or name.step < trunk[-1].step else abandoned).append(name)
    return {name: found[name] for name in trunk + abandoned}, wrong


def begin(store: Store, args: SaveArgs, size: int) -> tuple[Name, str, int]:
    """Make the folder for a checkpoint; return its name, the folder's, and its sequence."""
    owner = _store.refuse_other(store)
    last, newest = (owner.sequence, owner.step) if owner else (0, -1)
    if owner is None or not owner.is_me:  # who saved last knows how often; else the manifests do
        known, _ = read_manifests(store)
        last = max(last, *(manifest.sequence for manifest in known.values()), 0)
        newest = next((name.step for name in known), -1)
    if newest > args.step:
        logger.warning(
            "step %d is saved below step %d, the last saved in %s: from now on it is the newest, "
            "which is loaded, and those above it count as abandoned, which keep= removes first",
            args.step, newest, store.root,
        )  # fmt: skip
    taken = (each for each in _store.names_in(store.entries()) if each.step == args.step)
    name = Name(args.step, max((each.generation for each in taken), default=-1) + 1)
    working = store.begin(name)
    if left := store.remove_leftovers(working):
        logger.info("removed what unfinished saves left in %s: %s", store.root, ", ".join(left))
    if args.keep is not None and store.free() < size:
        _make_room(store, args.step, args.keep, size)
    return name, working, last + 1


def _make_room(store: Store, step: int, keep: int, size: int) -> None:
    """Remove the oldest beyond ``keep - 1``, but never the last whole one, if that is enough."""
    found, _ = read_manifests(store)

    def is_whole(name: Name) -> bool:
        # By the files' sizes: to read them all would take longer than the other ranks wait.
        sizes = {file: said.size for file, said in found[name].files.items()}
        return all(store.size(f"{name}/{file}") == size for file, size in sizes.items())

    whole = next(filter(is_whole, found), None)
    spare = [name for name in list(found)[keep - 1 :] if name != whole]
    if whole is None or store.free() + sum(found[name].size for name in spare) < size:
        return  # it will fail, and leave what is there
    for name in reversed(spare):
        if (free := store.free()) >= size:
            return
        logger.warning(
            "step %d does not fit beside the others (%.1f MB, and %.1f MB free in %s): %s is "
            "removed before it is saved (keep=%d)",
            step, size / 1e6, free / 1e6, store.root, name, keep,
        )  # fmt: skip
        store.remove(name)


def superseded(store: Store, saved: Name, keep: int | None) -> list[Name]:
    """Return what is to be removed once a checkpoint is complete, the oldest first."""
    # Not counted, and not touched: what bears the name and is no checkpoint.
    found, _ = read_manifests(store, saved.step if keep is None else None)
    kept = list(dict.fromkeys(name.step for name in found))[:keep]
    spare = [name for name in found if name.step not in kept or name.step == saved.step]
    return [name for name in reversed(spare) if name != saved]
