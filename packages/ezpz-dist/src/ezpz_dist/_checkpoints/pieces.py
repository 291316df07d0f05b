"""A tensor as this rank holds it: which pieces of the whole, at which offsets.

DDP's replica, FSDP's shard and a tensor-parallel part become one thing here, so that what is
written has the whole tensors' names and sizes, and any of them can be filled from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from ezpz_tp import Shard

Piece = tuple[tuple[int, ...], Tensor]
"""Where it begins in the whole, and the elements: a view of the tensor that is in use."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What a rank holds of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    held: tuple[Piece, ...]

    def at(self, offsets: tuple[int, ...]) -> Tensor:
        """Return the piece that begins there."""
        return next(piece for start, piece in self.held if start == offsets)


def pieces_of(
    tensor: Tensor, shard: Shard | None = None, index: int = 0, degree: int = 1
) -> Pieces:
    """Return what this rank holds, as views.

    Args:
        tensor: A plain tensor, FSDP2's DTensor or FSDP1's ShardedTensor.
        shard: What the tensor, as a whole on its data-parallel ranks, is a part of, where layers
            of `ezpz_tp` split it; None: of nothing.
        index: This rank's place among those that share the whole.
        degree: The number of those.

    Raises:
        ValueError: Its shape is not that of its part of ``shard``, or it is on the meta device.
    """
    if isinstance(tensor, ShardedTensor):
        about = tensor.metadata()  # size() and dtype warn that FSDP1 is deprecated
        return Pieces(tuple(about.size), about.tensor_properties.dtype, tuple(_local(tensor)))
    if tensor.is_meta:
        raise ValueError("it is on the meta device, without values; expected to_empty() first")
    local = tuple(_local(tensor))
    shape = tuple(tensor.size())
    if shard is None or shard.dim is None:
        return Pieces(shape, tensor.dtype, local)
    expected = shard.local_shape(index, degree)
    if shape != expected:
        raise ValueError(
            f"it has shape {shape}; expected {expected}, part {index} of {degree} of "
            f"{shard.full_shape}: make the groups (setup_torch) before the layers"
        )
    stretches = shard.pieces(index, degree)
    split = [cut for piece in local for cut in _cut(*piece, shard.dim, stretches)]
    return Pieces(shard.full_shape, tensor.dtype, tuple(split))


def _local(tensor: Tensor) -> Iterator[Piece]:
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        chunks: Sequence[ChunkStorageMetadata] = tensor.__create_chunk_list__()
        # Ranks outside of its mesh hold nothing, and so do the last of an uneven split.
        if tensor.device_mesh.get_coordinate() is not None:
            yield from (
                (tuple(chunk.offsets), local.detach()) for chunk in chunks if _any(chunk.sizes)
            )
    elif isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            if _any(shard.metadata.shard_sizes):
                yield tuple(shard.metadata.shard_offsets), shard.tensor.detach()
    else:
        yield (0,) * tensor.dim(), tensor.detach()


def _any(sizes: Sequence[int]) -> bool:
    return math.prod(sizes) > 0


def _cut(
    offsets: tuple[int, ...], piece: Tensor, dim: int, stretches: Sequence[tuple[int, int, int]]
) -> Iterator[Piece]:
    """Yield what a piece of this rank's part has of each stretch, and its place in the whole."""
    start, stop = offsets[dim], offsets[dim] + piece.size(dim)
    for local, full, length in stretches:
        first, last = max(start, local), min(stop, local + length)
        if first < last:
            where = (*offsets[:dim], full + first - local, *offsets[dim + 1 :])
            yield where, piece.narrow(dim, first - start, last - first)


def blob_of(value: Any) -> Pieces:
    """Return bytes as a tensor that one rank holds."""
    data = torch.frombuffer(bytearray(value), dtype=torch.uint8)
    return Pieces((data.numel(),), torch.uint8, (((0,), data),))
