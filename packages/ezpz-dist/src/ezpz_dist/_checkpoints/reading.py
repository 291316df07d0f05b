"""Fill this rank's tensors from a check-point's files, once these are known to be whole."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from .files import Files
from .manifest import Manifest, damage_of
from .pieces import Pieces
from .store import Store


class _Filled(DefaultLoadPlanner):
    """torch's planner over pieces to be filled. Unpickles nothing."""

    def __init__(self, held: Mapping[str, Pieces], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state_dict = dict(held)
        self.original_state_dict = self.state_dict
        self.metadata = metadata
        self.is_coordinator = False

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        pieces: Pieces = self.state_dict[index.fqn]
        return pieces.at(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # torch's would unpickle whatever is there; we write tensors only.
        del value
        raise TypeError(f"{read_item.storage_index.fqn} is no tensor; expected tensors only")


class Reading:
    """What this rank reads of a check-point.

    Args:
        store: Where.
        folder: Of the check-point.
        metadata: What is in which file.
        held: What to fill, by key; all of it is there, with these sizes.
    """

    def __init__(
        self, store: Store, folder: str, metadata: Metadata, held: Mapping[str, Pieces]
    ) -> None:
        self._store, self._folder = store, folder
        self._planner = _Filled(held, metadata)
        self._metadata = metadata
        self._plan: LoadPlan = self._planner.create_local_plan()

    @property
    def files(self) -> set[str]:
        """Names of the files that are read."""
        placed = self._metadata.storage_data
        return {placed[item.storage_index].relative_path for item in self._plan.items}

    def fill(self) -> None:
        """Read.

        Raises:
            ValueError: What a file holds is no tensor, or another.
            OSError: A file cannot be read.
        """
        reader = FileSystemReader("")
        reader.fs = Files(self._store, self._folder)  # type: ignore[assignment]
        reader.path = ""
        reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        with torch.no_grad():
            reader.read_data(self._plan, self._planner).wait()


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
