"""Files of torch.save and safetensors: one rank reads, the others get it from there."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ezpz_dist._collectives.broadcast import broadcast
from ezpz_dist._collectives.members import find_members
from ezpz_dist._collectives.pickled import as_bytes, is_plain
from ezpz_dist._errors import CheckpointError
from ezpz_topo import get_rank

from .plain_reading import explain, read


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor stands in a file's tree, while it is not there yet."""

    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_parameter: bool


class PlainFile:
    """A file that one rank has read: its tree on every rank, its tensors on the reader.

    Attributes:
        places: One for each tensor; one that stands in the tree twice has one place.
    """

    def __init__(self, path: str | os.PathLike[str], root: int, group: Any, operation: str) -> None:
        """Read on ``root``; raise on every rank what that raises. Collective."""
        self._members = find_members(operation, group)
        self._root, self._what = root, f"{operation} of {os.fspath(path)}"
        self._tensors: list[torch.Tensor] = []
        if self._members is not None and root not in self._members.ranks:
            raise ValueError(
                f"root {root}; expected one of the group's ranks, {list(self._members.ranks)}"
            )
        self._reads = self._members is None or get_rank() == root
        taken: tuple[bytes, list[Place]] | CheckpointError | None = None
        cause: Exception | None = None
        if self._reads:
            try:
                taken = self._take(read(os.fspath(path)))
            except Exception as error:  # noqa: BLE001  # whatever it is, every rank raises it
                taken, cause = explain(os.fspath(path), error), error
        if self._members is not None:
            taken = broadcast(taken, root, group)
        if isinstance(taken, CheckpointError):
            raise taken from cause
        assert taken is not None
        self._tree, self.places = taken

    def tree(self, leaves: list[Any]) -> Any:
        """Return the tree, with these in the tensors' places."""
        unpickler = _Unpickler(io.BytesIO(self._tree))
        unpickler.leaves = leaves
        return unpickler.load()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return the tensors, one after the other. Collective: every rank takes all of them.

        On every rank it is a tensor of its own on the host: on the reader, too, it does not
        lie in the file any more, which may change.
        """
        for place in self.places:
            if self._reads:
                tensor = torch.empty(place.shape, dtype=place.dtype)
                tensor.copy_(self._tensors[place.index])
            else:
                tensor = torch.empty(place.shape, dtype=place.dtype)
            if self._members is not None and tensor.numel():
                self._members.send(as_bytes(tensor), self._root, self._what)
            yield tensor

    def _take(self, tree: object) -> tuple[bytes, list[Place]]:
        """Return the tree without its tensors, and where they were."""
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(tree)
        self._tensors = pickler.tensors
        return buffer.getvalue(), pickler.places


class _Pickler(pickle.Pickler):
    """Pickles all but the tensors. What a file shares (tied weights) stays shared."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.places: list[Place] = []
        self._seen: dict[tuple[object, ...], int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not is_plain(obj):
            return None
        tensor: torch.Tensor = obj.detach()
        # Empty ones have no address to be told apart by.
        where = tensor.data_ptr() if tensor.numel() else -1 - len(self.places)
        key = (where, tensor.dtype, tensor.shape, tensor.stride(), type(obj))
        index = self._seen.setdefault(key, len(self.places))
        if index == len(self.places):
            shape, is_parameter = tuple(tensor.shape), isinstance(obj, torch.nn.Parameter)
            self.places.append(Place(index, tensor.dtype, shape, is_parameter))
            self.tensors.append(tensor)
        return index


class _Unpickler(pickle.Unpickler):
    leaves: list[Any]

    def persistent_load(self, pid: Any) -> Any:
        return self.leaves[pid]


def load_on_one_rank(
    path: str | os.PathLike[str],
    *,
    map_location: str | torch.device = "cpu",
    root: int = 0,
    group: torch.distributed.ProcessGroup | None = None,
) -> Any:
    """Return what a file of ``torch.save`` or safetensors holds; one rank reads it.

    Collective: every rank calls this. The reader sends the tensors one by one, without
    pickling them, in pieces of at most 256 MiB. Nothing that the file brings is run:
    it holds tensors and plain values, or it is refused.

    Args:
        path: A file, or a URL that fsspec knows (``"s3://..."``). A file of safetensors ends
            in ``.safetensors``.
        map_location: Where the tensors are to be in the end, on each rank.
        root: The rank that reads: its rank in the world.
        group: The ranks that take part; None: all. With `ezpz_dist.node_group` and the
            first rank of each node there is one reader a node.

    Returns:
        The same on every rank. Tensors are contiguous and do not require gradients,
        parameters are parameters; what was one tensor under two names still is.

    Raises:
        CheckpointError: On every rank, when the reader cannot read the file, or it holds more
            than tensors and plain values.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        ValueError: ``root`` is no rank of the group.
    """
    file = PlainFile(path, root, group, "load_on_one_rank()")
    leaves: list[Any] = []
    for place, tensor in zip(file.places, file.tensors(), strict=True):
        there = tensor.to(map_location)
        leaves.append(torch.nn.Parameter(there, False) if place.is_parameter else there)
    return file.tree(leaves)
