"""Which rank writes which piece: planned on rank 0 from what all ranks hold."""

from __future__ import annotations

import hashlib
import heapq
import math
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ezpz_dist._errors import CheckpointError, grouped
from ezpz_dist._objects import raw_of
from ezpz_tp import Piece

from .disk_format import Key, describe_key
from .pieces import Pieces
from .values import name_of_dtype

PieceId = tuple[Key, tuple[int, ...]]
"""The key of a tensor, and where a piece begins in the whole."""

Held = dict[Key, Pieces]
"""What a rank holds."""


class Item(NamedTuple):
    """A piece that a rank holds, as it is sent to rank 0."""

    key: Key
    piece: Piece
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole

    @property
    def id(self) -> PieceId:
        return self.key, self.piece.offsets

    @property
    def nbytes(self) -> int:
        return math.prod(self.piece.sizes) * self.dtype.itemsize


def list_items(held: Mapping[Key, Pieces]) -> list[Item]:
    items = []
    for key, pieces in held.items():
        for piece, _ in pieces.held:
            items.append(Item(key, piece, pieces.dtype, pieces.shape))
    return items


@dataclass(frozen=True, slots=True)
class Holding:
    """What the ranks of a group hold, all of them the same."""

    packed: bytes
    items: Sequence[Item]
    ranks: Sequence[int]
    places: frozenset[tuple[int, int]]  # of these ranks: pipeline stage, tensor-parallel index


def pack_items(items: Sequence[Item]) -> bytes:
    """Return items in bytes, which are equal on ranks that hold the same."""
    return zlib.compress(pickle.dumps(list(items)), level=1)


def unpack_items(packed: bytes) -> list[Item]:
    # From a rank of this very job.
    items: list[Item] = pickle.loads(zlib.decompress(packed))  # noqa: S301
    return items


@dataclass(slots=True)
class Plan:
    """What rank 0 decided, as it is sent to all ranks."""

    writers: dict[bytes, list[int]] = field(default_factory=dict)
    """The rank that writes each item, by the digest of the packed items."""
    shared: list[PieceId] = field(default_factory=list)
    """Pieces on several model-parallel ranks, which should be equal there."""

    def find_own(self, rank: int, packed: bytes, items: Sequence[Item]) -> list[Item]:
        """Return the items that a rank writes, of those that it holds."""
        writers = self.writers[hashlib.sha256(packed).digest()]
        pairs = zip(items, writers, strict=True)
        return [item for item, writer in pairs if writer == rank]


def plan_writers(holdings: Sequence[Holding]) -> Plan:
    """Have each piece written by the rank that has the least to write of those that hold it."""
    check_equal_kinds(holdings)
    plan = Plan()
    holders = grouped(
        (item.id, number) for number, holding in enumerate(holdings) for item in holding.items
    )
    queues = list(map(make_queue, holdings))
    is_model_parallel = count_places(holdings, range(len(holdings))) > 1
    chosen: dict[PieceId, int] = {}
    planned = []
    for holding in holdings:
        writers = []
        for item in holding.items:
            if item.id not in chosen:
                queue = min((queues[each] for each in holders[item.id]), key=lambda each: each[0])
                load, rank = queue[0]
                heapq.heapreplace(queue, (load + (item.nbytes or 1), rank))
                chosen[item.id] = rank
                planned.append(item)
                if is_model_parallel and count_places(holdings, holders[item.id]) > 1:
                    plan.shared.append(item.id)
            writers.append(chosen[item.id])
        plan.writers[hashlib.sha256(holding.packed).digest()] = writers
    check_whole(planned)
    return plan


def make_queue(holding: Holding) -> list[tuple[int, int]]:
    """Return a heap of how much each rank has to write, and the rank."""
    return [(0, rank) for rank in sorted(holding.ranks)]


def count_places(holdings: Sequence[Holding], numbers: Iterable[int]) -> int:
    """Return at how many places of stages and tensor-parallel groups some holdings are."""
    places: set[tuple[int, int]] = set()
    for number in numbers:
        places |= holdings[number].places
    return len(places)


def check_equal_kinds(holdings: Sequence[Holding]) -> None:
    """Make sure that tensors with one name have one shape and dtype."""
    known: dict[Key, tuple[Item, int]] = {}
    for holding in holdings:
        rank = holding.ranks[0]
        for item in holding.items:
            first, first_rank = known.setdefault(item.key, (item, rank))
            if (first.shape, first.dtype) != (item.shape, item.dtype):
                raise CheckpointError(
                    f"{describe_key(item.key)} is {describe_kind(item)} on rank {rank} and "
                    f"{describe_kind(first)} on rank {first_rank}; expected one tensor under one "
                    "name, or equal copies of it; pipeline stages use the names of the whole model"
                )


def describe_kind(item: Item) -> str:
    return f"{name_of_dtype(item.dtype)} {list(item.shape)}"


def check_whole(items: Sequence[Item]) -> None:
    """Make sure that the pieces of each tensor have all of its elements."""
    for key, group in grouped((item.key, item) for item in items).items():
        count = 0
        for item in group:
            count += math.prod(item.piece.sizes)
        if count != math.prod(group[0].shape):
            pieces = ", ".join(f"{item.piece.sizes} at {item.piece.offsets}" for item in group[:4])
            raise CheckpointError(
                f"the ranks hold {len(group)} pieces of {describe_key(key)} ({pieces}), of {count} "
                f"elements, which are not {describe_kind(group[0])}; expected shards of one tensor"
            )


# Copies on model-parallel ranks.


def compute_checksums(held: Mapping[Key, Pieces], shared: Sequence[PieceId]) -> list[int | None]:
    """Return the checksums of pieces; None for those that this rank does not hold."""
    found: list[int | None] = []
    for key, offsets in shared:
        checksum = None
        if key in held:
            for piece, tensor in held[key].held:
                if piece.offsets == offsets:
                    checksum = zlib.crc32(raw_of(tensor))
        found.append(checksum)
    return found


def compare_copies(
    shared: Sequence[PieceId], checksums: Sequence[Sequence[int | None]], stages: Sequence[int]
) -> dict[Key, list[int]]:
    """Return the tensors of which tensor-parallel ranks hold different copies, and the ranks.

    Args:
        shared: The pieces that were compared.
        checksums: Of each rank, for each piece.
        stages: Of the pipeline, of each rank.

    Raises:
        CheckpointError: Copies differ on pipeline stages: they are different tensors.
    """
    different: dict[Key, list[int]] = {}
    for number, (key, _) in enumerate(shared):
        holders = []
        values = set()
        holder_stages = set()
        for rank, found in enumerate(checksums):
            if found[number] is not None:
                holders.append(rank)
                values.add(found[number])
                holder_stages.add(stages[rank])
        if len(values) <= 1:
            continue
        if len(holder_stages) > 1:
            raise CheckpointError(
                f"pipeline stages hold different values under {describe_key(key)}; expected a tied "
                "parameter, equal on both, or the names of the whole model: number the layers "
                "of a stage as they are in the model"
            )
        different.setdefault(key, holders)
    return different
