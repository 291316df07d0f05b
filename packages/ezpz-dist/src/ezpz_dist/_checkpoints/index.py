"""Where each piece of each tensor lies in a check-point's files, as JSON.

`torch.distributed.checkpoint` keeps this in ``.metadata``, a pickle, which runs the code that a
file wants run. That one is written too, for torch's own tools; it is never read here.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .archives import Place


class Chunk(NamedTuple):
    """A piece of a tensor in a checkpoint: of the whole, and of a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    place: Place


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole tensor in a check-point."""

    size: torch.Size
    dtype: torch.dtype
    chunks: list[Chunk] = field(default_factory=list)


def encode(saved: Mapping[str, Saved]) -> bytes:
    """Return the index of what was written."""
    files: dict[str, int] = {}
    tensors: dict[str, Any] = {}
    for key, about in saved.items():
        chunks = [
            (offsets, sizes, files.setdefault(file, len(files)), *place)
            for offsets, sizes, file, place in about.chunks
        ]
        tensors[key] = (str(about.dtype).removeprefix("torch."), about.size, chunks)
    return json.dumps({"files": list(files), "tensors": tensors}, separators=(",", ":")).encode()


def metadata_of(saved: Mapping[str, Saved]) -> bytes:
    """Return the same as torch's own tools want it."""
    # What is equal is one object: it is made and pickled once, however many tensors there are.
    sizes: dict[tuple[int, ...], torch.Size] = {}
    alike: dict[Any, TensorStorageMetadata] = {}
    metadata = Metadata({}, storage_data={})
    for key, about in saved.items():
        places = [(offsets, shape) for offsets, shape, _, _ in about.chunks]
        layout = (about.dtype, about.size, *places)
        if layout not in alike:
            sizes |= {each: torch.Size(each) for pair in places for each in pair}
            chunks = [ChunkStorageMetadata(sizes[one], sizes[other]) for one, other in places]
            properties = TensorProperties(dtype=about.dtype)
            alike[layout] = TensorStorageMetadata(properties, about.size, chunks)
        metadata.state_dict_metadata[key] = alike[layout]
        for offsets, _, file, (at, length) in about.chunks:
            index = MetadataIndex(key)
            object.__setattr__(index, "offset", sizes[offsets])  # it would make another
            metadata.storage_data[index] = _StorageInfo(file, at, length)
    return pickle.dumps(metadata)


def decode(data: bytes) -> dict[str, Saved]:
    """Return what an index says.

    Raises:
        ValueError: It is damaged.
    """
    try:
        whole = json.loads(data)
        files = [_text(name) for name in whole["files"]]
        dtypes: dict[str, torch.dtype] = {}
        saved: dict[str, Saved] = {}
        for key, (dtype, size, chunks) in whole["tensors"].items():
            if dtype not in dtypes:
                dtypes[dtype] = _dtype(dtype)
            placed = [
                Chunk(_ints(offsets), _ints(sizes), files[file], Place(*_ints([at, length])))
                for offsets, sizes, file, at, length in chunks
            ]
            saved[key] = Saved(torch.Size(_ints(size)), dtypes[dtype], placed)
            if any(not len(size) == len(each.offsets) == len(each.sizes) for each in placed):
                raise ValueError(f"{key} has pieces of other dimensions")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
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
