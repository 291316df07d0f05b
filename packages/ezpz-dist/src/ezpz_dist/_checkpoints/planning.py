"""Who writes what: the ranks compare what they hold, and each piece gets one that writes it."""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ezpz_dist._errors import CheckpointError

from .pieces import Pieces
from .ranks import Ranks
from .state import rank_key


class Planner(DefaultSavePlanner):
    """torch's planner over what this rank holds in pieces."""

    def __init__(self, held: Mapping[str, Pieces]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state_dict = dict(held)
        self.is_coordinator = False
        self._copies: dict[MetadataIndex, Tensor] = {}

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        if index in self._copies:
            return self._copies[index]
        pieces: Pieces = self.state_dict[index.fqn]
        return pieces.at(index)

    def copy(self, items: Sequence[WriteItem]) -> None:
        """Copy what will be written to the host, and let go of the rest."""
        self._copies = {
            item.index: self.lookup_object(item.index).to("cpu", copy=True) for item in items
        }
        self.state_dict = {}


def agree(
    ranks: Ranks, what: str, planner: Planner, stage: int
) -> tuple[SavePlan, Metadata | None]:
    """Plan together; return what this rank writes and, on rank 0, where all of it lies.

    Of those that hold the same pieces, one rank sends their list: what rank 0 has to do grows
    with the pieces of the model, not with its replicas. Collective: every rank calls this.

    Raises:
        CheckpointError: Ranks differ in what they hold under one name: on all ranks.
    """
    packed = b""

    def held() -> tuple[bytes, list[WriteItem]]:
        nonlocal packed
        items = planner.create_local_plan().items
        own = [item for item in items if item.index.fqn == rank_key(ranks.rank)]
        rest = [item for item in items if item.index.fqn != rank_key(ranks.rank)]
        packed = pickle.dumps((rest, stage))
        return hashlib.sha256(packed).digest(), own

    told = ranks.everywhere(what, held)
    like: dict[bytes, list[int]] = {}
    for rank, (digest, _) in enumerate(told):
        like.setdefault(digest, []).append(rank)
    first = {members[0] for members in like.values()}
    is_first = ranks.first_for_each(what, lambda: [rank in first for rank in range(ranks.size)])
    sent = ranks.gather(packed if is_first else None)
    made: Metadata | None = None

    def plan() -> list[tuple[SavePlan, list[MetadataIndex]]]:
        nonlocal made
        # From ranks of this very job.
        lists = [(*pickle.loads(sent[members[0]]), members) for members in like.values()]  # noqa: S301
        tied = _check(lists)
        plans, made = Planner({}).create_global_plan(_deal(lists, [own for _, own in told]))
        return [
            (replace(each, storage_data=_StoragePrefix(f"__{rank}_")), tied)
            for rank, each in enumerate(plans)
        ]

    mine, tied = ranks.first_for_each(what, plan)
    if tied:
        _check_ties(ranks, what, planner, tied)
    return mine, made


Lists = Sequence[tuple[Sequence[WriteItem], int, Sequence[int]]]
"""Pieces, the pipeline stage, and the ranks that hold them."""


def _deal(lists: Lists, own: Sequence[Sequence[WriteItem]]) -> list[SavePlan]:
    """Have each piece written by the one of its holders that has the least to write."""
    holders: dict[MetadataIndex, list[Sequence[int]]] = {}
    for items, _, members in lists:
        for item in items:
            holders.setdefault(item.index, []).append(members)
    dealt = [list(each) for each in own]
    loads = [0] * len(own)
    for items, _, _ in lists:
        for item in items:
            if item.index in holders:
                groups = holders.pop(item.index)
                rank = min((one for each in groups for one in each), key=loads.__getitem__)
                loads[rank] += item.tensor_storage_size() or 1
                dealt[rank].append(item)
    return [SavePlan(each) for each in dealt]


def _check(lists: Lists) -> list[MetadataIndex]:
    """Compare what ranks hold under one name; return what several pipeline stages have.

    torch would take one rank's for all, and say nothing.
    """
    known: dict[str, tuple[int, Any, Any]] = {}
    stage_of: dict[MetadataIndex, int] = {}
    tied: dict[MetadataIndex, None] = {}
    for items, stage, (rank, *_) in lists:
        for item in items:
            assert item.tensor_data is not None
            key = item.index.fqn
            about = tuple(item.tensor_data.size), item.tensor_data.properties.dtype
            first, *said = known.setdefault(key, (rank, *about))
            if tuple(said) != about:
                raise CheckpointError(
                    f"{key} is {_shape(about)} on rank {rank} and {_shape(said)} on rank {first}; "
                    "expected one tensor under one name, or equal copies of it; pipeline stages "
                    "use the names of the whole model"
                )
            if stage_of.setdefault(item.index, stage) != stage:
                tied[item.index] = None
    return list(tied)


def _shape(about: Sequence[Any]) -> str:
    return f"{about[1]} {list(about[0])}".removeprefix("torch.")


def _check_ties(ranks: Ranks, what: str, planner: Planner, tied: Sequence[MetadataIndex]) -> None:
    """Make sure that what several pipeline stages hold under one name is equal."""

    def sums() -> list[int | None]:
        return [_sum(planner, each) for each in tied]

    told = ranks.everywhere(what, sums)

    def compare() -> None:
        for number, each in enumerate(tied):
            found = {one[number] for one in told} - {None}
            if len(found) > 1:
                raise CheckpointError(
                    f"pipeline stages hold different values under {each.fqn}; expected a tied "
                    "parameter, equal on both, or the names of the whole model: number the layers "
                    "of a stage as they are in the model"
                )

    ranks.first(what, compare)


def _sum(planner: Planner, index: MetadataIndex) -> int | None:
    pieces = planner.state_dict.get(index.fqn)
    if pieces is None or all(offsets != tuple(index.offset or ()) for offsets, _ in pieces.held):
        return None
    tensor = planner.lookup_object(index).cpu().contiguous()
    if not tensor.numel():
        return 0
    room = bytearray(tensor.nbytes)
    torch.frombuffer(room, dtype=torch.uint8).copy_(tensor.view(-1).view(torch.uint8))
    return zlib.crc32(room)
