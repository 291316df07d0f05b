"""Who writes what: the ranks compare what they hold, and each piece gets one that writes it."""

from __future__ import annotations

import hashlib
import heapq
import math
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ezpz_dist._errors import CheckpointError

from .pieces import Pieces
from .ranks import Ranks
from .state import rank_key


class Item(NamedTuple):
    """A piece that is to be written: its place in the whole, and what the whole is."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def piece(self) -> tuple[str, tuple[int, ...]]:
        """What it goes by."""
        return self.key, self.offsets


def items_of(held: Mapping[str, Pieces]) -> list[Item]:
    """Return the pieces that a rank holds."""
    return [
        Item(key, offsets, tuple(tensor.shape), pieces.dtype, pieces.shape)
        for key, pieces in held.items()
        for offsets, tensor in pieces.held
    ]


def agree(
    ranks: Ranks, what: str, held: Mapping[str, Pieces], stage: int
) -> tuple[list[Tensor], list[list[Item]]]:
    """Plan together; return what this rank writes and, on rank 0, what each does.

    Of those that hold the same pieces, one rank sends their list: what rank 0 has to do grows
    with the pieces of the model, not with its replicas. Collective: every rank calls this.

    Raises:
        CheckpointError: Ranks differ in what they hold under one name: on all ranks.
    """
    packed = b""
    items: list[Item] = []

    def listed() -> tuple[bytes, list[Item]]:
        nonlocal packed
        own = rank_key(ranks.rank)
        items[:] = items_of({key: pieces for key, pieces in held.items() if key != own})
        packed = pickle.dumps((items, stage))
        return hashlib.sha256(packed).digest(), items_of({own: held[own]})

    told = ranks.everywhere(what, listed)
    like: dict[bytes, list[int]] = {}
    for rank, (digest, _) in enumerate(told):
        like.setdefault(digest, []).append(rank)
    first = {members[0] for members in like.values()}
    is_first = ranks.first_for_each(what, lambda: [rank in first for rank in range(ranks.size)])
    sent = ranks.gather(packed if is_first else None)
    dealt: list[list[Item]] = []

    def plan() -> list[tuple[list[tuple[str, tuple[int, ...]]], list[tuple[str, tuple[int, ...]]]]]:
        nonlocal dealt
        lists: list[tuple[list[Item], int, list[int]]] = []
        for members in like.values():
            # From ranks of this very job; rank 0 has its own.
            theirs = pickle.loads(sent[members[0]]) if members[0] else (items, stage)  # noqa: S301
            lists.append((*theirs, members))
        tied = _check(lists)
        dealt = _deal(lists, [own for _, own in told])
        _check_whole(dealt)
        return [([item.piece for item in each], tied) for each in dealt]

    mine, tied = ranks.first_for_each(what, plan)
    if tied:
        _check_ties(ranks, what, held, tied)
    return [held[key].at(offsets) for key, offsets in mine], dealt


Lists = Sequence[tuple[Sequence[Item], int, Sequence[int]]]
"""Pieces, the pipeline stage, and the ranks that hold them."""


def _deal(lists: Lists, own: Sequence[Sequence[Item]]) -> list[list[Item]]:
    """Have each piece written by the one of its holders that has the least to write."""
    holders: dict[Any, list[int]] = {}
    for number, (items, _, _) in enumerate(lists):
        for item in items:
            holders.setdefault(item.piece, []).append(number)
    dealt = [list(each) for each in own]
    loads = [0] * len(own)
    queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for items, _, _ in lists:
        for item in items:
            if numbers := tuple(holders.pop(item.piece, ())):
                if numbers not in queues:
                    queues[numbers] = sorted((0, rank) for n in numbers for rank in lists[n][2])
                queue = queues[numbers]
                while queue[0][0] != loads[queue[0][1]]:  # of another queue it got more since
                    heapq.heapreplace(queue, (loads[queue[0][1]], queue[0][1]))
                rank = queue[0][1]
                loads[rank] += math.prod(item.sizes) * item.dtype.itemsize or 1
                dealt[rank].append(item)
    return dealt


def _check(lists: Lists) -> list[tuple[str, tuple[int, ...]]]:
    """Compare what ranks hold under one name; return what several pipeline stages have.

    One rank's would be taken for all, in silence.
    """
    known: dict[str, tuple[Item, int]] = {}
    stage_of: dict[Any, int] = {}
    tied: dict[tuple[str, tuple[int, ...]], None] = {}
    for items, stage, (rank, *_) in lists:
        for item in items:
            said, first = known.setdefault(item.key, (item, rank))
            if (said.shape, said.dtype) != (item.shape, item.dtype):
                raise CheckpointError(
                    f"{item.key} is {_shape(item)} on rank {rank} and {_shape(said)} on rank "
                    f"{first}; expected one tensor under one name, or equal copies of it; pipeline "
                    "stages use the names of the whole model"
                )
            if stage_of.setdefault(item.piece, stage) != stage:
                tied[item.piece] = None
    return list(tied)


def _shape(item: Item) -> str:
    return f"{item.dtype} {list(item.shape)}".removeprefix("torch.")


def _check_whole(dealt: Sequence[Sequence[Item]]) -> None:
    """Make sure that the pieces of each tensor are all of it, and nothing is there twice."""
    by_key: dict[str, list[Item]] = {}
    for items in dealt:
        for item in items:
            by_key.setdefault(item.key, []).append(item)
    for key, items in by_key.items():
        alone = len(items) == 1 and items[0].sizes == items[0].shape
        if not alone and not _is_whole(items):
            pieces = ", ".join(f"{item.sizes} at {item.offsets}" for item in items[:4])
            raise CheckpointError(
                f"the ranks hold {len(items)} pieces of {key} ({pieces}), which are not "
                f"{_shape(items[0])} without gap and overlap; expected shards of one tensor"
            )


def _is_whole(items: Sequence[Item]) -> bool:
    shape = items[0].shape
    boxes = [tuple(zip(item.offsets, item.sizes, strict=True)) for item in items]
    boxes = [box for box in boxes if all(length for _, length in box)]
    if sum(math.prod(length for _, length in box) for box in boxes) != math.prod(shape):
        return False
    # Along the dim of which there are most, only neighbours have to be compared.
    dim = max(range(len(shape)), key=lambda each: len({box[each] for box in boxes}))
    near: list[tuple[tuple[int, int], ...]] = []
    for box in sorted(boxes, key=lambda each: each[dim]):
        near = [each for each in near if sum(each[dim]) > box[dim][0]]
        if any(sum(part) > whole for part, whole in zip(box, shape, strict=True)) or any(
            all(one[0] < sum(two) and two[0] < sum(one) for one, two in zip(each, box, strict=True))
            for each in near
        ):
            return False
        near.append(box)
    return True


def _check_ties(
    ranks: Ranks, what: str, held: Mapping[str, Pieces], tied: Sequence[tuple[str, tuple[int, ...]]]
) -> None:
    """Make sure that what several pipeline stages hold under one name is equal."""

    def sums() -> list[int | None]:
        return [_sum(held.get(key), offsets) for key, offsets in tied]

    told = ranks.everywhere(what, sums)

    def compare() -> None:
        for number, (key, _) in enumerate(tied):
            found = {one[number] for one in told} - {None}
            if len(found) > 1:
                raise CheckpointError(
                    f"pipeline stages hold different values under {key}; expected a tied "
                    "parameter, equal on both, or the names of the whole model: number the layers "
                    "of a stage as they are in the model"
                )

    ranks.first(what, compare)


def _sum(pieces: Pieces | None, offsets: tuple[int, ...]) -> int | None:
    if pieces is None or all(start != offsets for start, _ in pieces.held):
        return None
    tensor = pieces.at(offsets).cpu().contiguous()
    if not tensor.numel():
        return 0
    room = bytearray(tensor.nbytes)
    torch.frombuffer(room, dtype=torch.uint8).copy_(tensor.view(-1).view(torch.uint8))
    return zlib.crc32(room)
