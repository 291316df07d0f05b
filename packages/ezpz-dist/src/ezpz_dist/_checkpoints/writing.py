"""A check-point on its way: planned together, copied, written by each rank, completed by rank 0."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ezpz_dist._errors import CheckpointError

from . import index
from .files import Files
from .folder import INDEX, LATEST, MANIFEST, Name, names_in, next_name, to_remove
from .manifest import Manifest, Written, encode
from .order import Order
from .pieces import Pieces
from .ranks import Ranks
from .store import Store

logger = logging.getLogger(__name__)

_SEEN_WITHIN = 10.0
"""Seconds in which rank 0 must see what others wrote; network file systems remember misses."""


class _Writer(FileSystemWriter):
    """torch's, writing through `Files`; the path of this machine stays out of the metadata."""

    def __init__(self, files: Files) -> None:
        # Files syncs; torch would call os.sync() for what is no file of this machine.
        super().__init__("", single_file_per_rank=True, sync_files=False)
        self.fs = files  # type: ignore[assignment]  # torch says its own subclass
        self.path = ""

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(save_id=self.save_id)


class _Held(DefaultSavePlanner):
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


@dataclass(slots=True)
class Draft:
    """A check-point that all ranks know what to write of."""

    ranks: Ranks
    store: Store
    order: Order
    name: Name
    working: str
    plan: SavePlan
    planner: _Held
    metadata: Metadata | None
    started: float = field(default_factory=time.monotonic)

    def copy(self) -> None:
        """Take what is to be written out of the training's hands."""
        self.planner.copy(self.plan.items)


def draft(
    ranks: Ranks, store: Store, order: Order, held: Mapping[str, Pieces], stage: int
) -> Draft:
    """Plan who writes what, and make the folder. Collective: every rank calls this.

    Raises:
        CheckpointError: Ranks differ in what they hold under one name, or the folder cannot be
            made: on all ranks.
    """
    what = f"step {order.step} cannot be saved to {store.root}"
    planner = _Held(held)
    plans = ranks.everywhere(what, lambda: (planner.create_local_plan(), stage))
    made: Metadata | None = None

    def plan() -> list[tuple[SavePlan, list[MetadataIndex]]]:
        nonlocal made
        tied = _check([items for items, _ in plans], [at for _, at in plans])
        dealt, made = _Held({}).create_global_plan([items for items, _ in plans])
        dealt = _Writer(Files(store, "")).prepare_global_plan(dealt)
        return [(each, tied) for each in dealt]

    mine, tied = ranks.first_for_each(what, plan)
    if tied:
        _check_ties(ranks, what, planner, tied)
    begun: tuple[Name, str] = ranks.first(what, lambda: _begin(store, order.step))
    return Draft(ranks, store, order, *begun, mine, planner, made)


def _begin(store: Store, step: int) -> tuple[Name, str]:
    name = next_name(step, store.entries())
    working = store.begin(name)
    if left := store.remove_leftovers(working):
        logger.info("removed what unfinished saves left in %s: %s", store.root, ", ".join(left))
    return name, working


def _check(plans: Sequence[SavePlan], stages: Sequence[int]) -> list[MetadataIndex]:
    """Compare what ranks hold under one name; return what several pipeline stages have.

    torch would take one rank's for all, and say nothing.
    """
    known: dict[str, tuple[int, Any, Any]] = {}
    stage_of: dict[MetadataIndex, int] = {}
    tied: dict[MetadataIndex, None] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
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
            if stage_of.setdefault(item.index, stages[rank]) != stages[rank]:
                tied[item.index] = None
    return list(tied)


def _shape(about: Sequence[Any]) -> str:
    return f"{about[1]} {list(about[0])}".removeprefix("torch.")


def _check_ties(ranks: Ranks, what: str, planner: _Held, tied: Sequence[MetadataIndex]) -> None:
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


def _sum(planner: _Held, index: MetadataIndex) -> int | None:
    if index.fqn not in planner.state_dict:
        return None
    tensor = planner.lookup_object(index).cpu().contiguous()
    if not tensor.numel():
        return 0
    room = bytearray(tensor.nbytes)
    torch.frombuffer(room, dtype=torch.uint8).copy_(tensor.view(-1).view(torch.uint8))
    return zlib.crc32(room)


def write(draft: Draft) -> Manifest:
    """Write the check-point and make it exist. Collective: every rank calls this.

    Raises:
        CheckpointError: Some rank could not write: on all ranks, and nothing is left of it.
    """
    ranks, store = draft.ranks, draft.store
    what = f"step {draft.order.step} cannot be saved to {store.root}"
    files = Files(store, draft.working)

    def write_mine() -> tuple[Any, dict[str, Written]]:
        results = _Writer(files).write_data(draft.plan, draft.planner)
        return results.wait(), files.written

    try:
        told = ranks.everywhere(what, write_mine)
        return ranks.first(what, lambda: _complete(draft, files, told))
    except CheckpointError:
        if ranks.rank == 0:
            store.discard(draft.working)
        raise


def _complete(
    draft: Draft, files: Files, told: Sequence[tuple[Any, dict[str, Written]]]
) -> Manifest:
    store, order = draft.store, draft.order
    metadata = draft.metadata
    assert metadata is not None
    _Writer(files).finish(metadata, [results for results, _ in told])
    files.write(INDEX, index.encode(metadata))
    written = {name: one for _, each in told for name, one in each.items()} | files.written
    _see(store, draft.working, written, draft.ranks, [each for _, each in told])
    manifest = Manifest(
        order.step, draft.ranks.size, order.contents, time.time(), torch.__version__, written
    )
    files.write(MANIFEST, encode(manifest))
    store.publish(draft.working, draft.name)
    try:
        store.put(LATEST, f"{draft.name}\n".encode())
        for name in to_remove(names_in(store.entries()), draft.name, order.keep):
            store.remove(name)
    except OSError as error:
        # It is saved; what comes after must not tell the script that it is not.
        logger.warning("step %d is saved, but older ones are not removed: %s", order.step, error)
    return manifest


def _see(
    store: Store, folder: str, written: Mapping[str, Written], ranks: Ranks,
    by_rank: Sequence[Mapping[str, Written]],
) -> None:  # fmt: skip
    """Make sure that rank 0 sees every rank's files: folders of one host are a common mistake."""
    until = time.monotonic() + _SEEN_WITHIN
    for rank, files in enumerate(by_rank):
        for name in files:
            while (size := store.size(f"{folder}/{name}")) != written[name].size:
                if time.monotonic() > until:
                    raise CheckpointError(
                        f"rank 0 on {ranks.hosts[0]} sees {size} bytes of {name}, rank {rank} on "
                        f"{ranks.hosts[rank]} wrote {written[name].size}; expected a folder that "
                        "all hosts share"
                    )
                time.sleep(0.05)
