"""Where each piece of each tensor lies in a check-point's files, as JSON.

`torch.distributed.checkpoint` keeps this in ``.metadata``, a pickle, which runs the code that a
file wants run. That one is written too, for torch's own tools; it is never read here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole tensor in a check-point."""

    size: torch.Size
    dtype: torch.dtype


def encode(metadata: Metadata) -> bytes:
    """Return the index of what was written."""
    files: dict[str, int] = {}
    tensors: dict[str, Any] = {}
    for key, about in metadata.state_dict_metadata.items():
        assert isinstance(about, TensorStorageMetadata)
        chunks = []
        for chunk in about.chunks:
            at = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            file = files.setdefault(at.relative_path, len(files))
            chunks.append([list(chunk.offsets), list(chunk.sizes), file, at.offset, at.length])
        dtype = str(about.properties.dtype).removeprefix("torch.")
        tensors[key] = [dtype, list(about.size), chunks]
    return json.dumps({"files": list(files), "tensors": tensors}, separators=(",", ":")).encode()


def decode(data: bytes) -> Metadata:
    """Return what an index says, as `torch.distributed.checkpoint` wants it.

    Raises:
        ValueError: It is damaged.
    """
    try:
        whole = json.loads(data)
        files = [_text(name) for name in whole["files"]]
        metadata = Metadata({}, storage_data={})
        for key, (dtype, size, chunks) in whole["tensors"].items():
            properties = TensorProperties(dtype=_dtype(dtype))
            placed = []
            for offsets, sizes, file, offset, length in chunks:
                chunk = ChunkStorageMetadata(torch.Size(_ints(offsets)), torch.Size(_ints(sizes)))
                start, count = _ints([offset, length])
                at = _StorageInfo(files[file], start, count)
                metadata.storage_data[MetadataIndex(key, chunk.offsets)] = at
                placed.append(chunk)
            shape = torch.Size(_ints(size))
            metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, shape, placed)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"index.json is damaged ({error!r})") from error
    return metadata


def _text(name: Any) -> str:
    if not isinstance(name, str) or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} is no file's name")
    return name


def _ints(values: Any) -> Iterator[int]:
    for value in values:
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{value!r} is no size")
        yield value


def _dtype(name: Any) -> torch.dtype:
    found = vars(torch).get(name)  # getattr would import whatever torch finds by that name
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is no dtype of this torch")
    return found


def saved_in(metadata: Metadata) -> dict[str, Saved]:
    """Return the whole tensors of a check-point by key."""
    return {
        key: Saved(about.size, about.properties.dtype)
        for key, about in metadata.state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }
