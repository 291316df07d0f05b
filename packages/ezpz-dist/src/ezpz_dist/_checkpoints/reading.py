"""Fill this rank's tensors from a check-point's files, once these are known to be whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .archives import Wanted, read
from .index import Chunk, Saved
from .manifest import Manifest, damage_of
from .pieces import Pieces
from .store import Store


class Reading:
    """What this rank reads of a check-point.

    Args:
        store: Where.
        folder: Of the check-point.
        saved: What is in which file.
        held: What to fill, by key; all of it is there, with these sizes.
    """

    def __init__(
        self, store: Store, folder: str, saved: Mapping[str, Saved], held: Mapping[str, Pieces]
    ) -> None:
        self._store, self._folder = store, folder
        self._wanted: dict[str, list[Wanted]] = {}
        for key, pieces in held.items():
            dtype = saved[key].dtype
            for chunk, part, target in _overlaps(pieces, saved[key].chunks):
                one = Wanted(key, chunk.place, dtype, chunk.sizes, part, target)
                self._wanted.setdefault(chunk.file, []).append(one)

    @property
    def files(self) -> set[str]:
        """Names of the files that are read."""
        return set(self._wanted)

    def fill(self) -> None:
        """Read.

        Raises:
            ValueError: What a file holds is no tensor, or another.
            OSError: A file cannot be read.
        """
        for name, wanted in self._wanted.items():
            with self._store.open(f"{self._folder}/{name}", "rb") as file:
                read(file, wanted)


def _overlaps(
    pieces: Pieces, chunks: Sequence[Chunk]
) -> Iterator[tuple[Chunk, tuple[slice, ...] | None, Tensor]]:
    """Yield what pieces have in common with what is saved: of which chunk what, and where to."""
    same = {(chunk.offsets, chunk.sizes): chunk for chunk in chunks}
    for offsets, tensor in pieces.held:
        if (chunk := same.get((offsets, tuple(tensor.shape)))) is not None:
            yield chunk, None, tensor
            continue
        for chunk in chunks:
            part, to = [], []
            for start, length, begin, count in zip(
                offsets, tensor.shape, chunk.offsets, chunk.sizes, strict=True
            ):
                first, last = max(start, begin), min(start + length, begin + count)
                if first >= last:
                    break
                part.append(slice(first - begin, last - begin))
                to.append(slice(first - start, last - start))
            else:
                yield chunk, tuple(part), tensor[tuple(to)]


def shares(files: Sequence[str], manifest: Manifest, readers: int) -> list[list[str]]:
    """Divide files among the ranks of a node, so that each is verified once there."""
    loads = [0] * readers
    dealt: list[list[str]] = [[] for _ in range(readers)]
    for name in sorted(files, key=lambda each: (-manifest.files[each].size, each)):
        least = loads.index(min(loads))
        dealt[least].append(name)
        loads[least] += manifest.files[name].size
    return dealt


def damages(store: Store, folder: str, manifest: Manifest, names: Sequence[str]) -> list[str]:
    """Read files through; return what is wrong with them."""
    found = [damage_of(store, folder, name, manifest.files[name]) for name in names]
    return [each for each in found if each]


def bytes_of(held: Mapping[str, Any], key: str) -> bytes:
    """Return the bytes that were read under a key."""
    pieces: Pieces = held[key]
    ((_, tensor),) = pieces.held
    room = bytearray(tensor.numel())
    torch.frombuffer(room, dtype=torch.uint8).copy_(tensor)
    return bytes(room)
