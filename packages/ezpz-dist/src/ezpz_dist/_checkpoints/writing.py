"""A check-point on its way: planned together, copied, written by each rank, completed by rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.serialization import get_crc32_options, set_crc32_options

from ezpz_dist._errors import CheckpointError

from . import index
from .files import Files
from .folder import INDEX, LATEST, MANIFEST, OWNER, Name
from .given import Order
from .listing import begin, superseded
from .manifest import Manifest, Written, encode
from .owner import claim, refuse_other, release_at_end
from .pieces import Pieces
from .planning import Planner, agree
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


@dataclass(slots=True)
class Draft:
    """A check-point that all ranks know what to write of."""

    ranks: Ranks
    store: Store
    order: Order
    name: Name
    working: str
    sequence: int
    plan: SavePlan
    planner: Planner
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
    planner = Planner(held)
    mine, made = agree(ranks, what, planner, stage)
    begun: tuple[Name, str, int] = ranks.first(what, lambda: begin(store, order, _size(made)))
    if ranks.rank == 0:
        release_at_end(store)
    return Draft(ranks, store, order, *begun, mine, planner, made)


def _size(metadata: Metadata | None) -> int:
    """Return about how many bytes will be written, rather too many."""
    assert metadata is not None
    tensors = [
        about
        for about in metadata.state_dict_metadata.values()
        if isinstance(about, TensorStorageMetadata)
    ]
    pieces = sum(len(about.chunks) for about in tensors)
    return sum(one.size.numel() * one.properties.dtype.itemsize for one in tensors) + pieces * 4096


def write(draft: Draft) -> Manifest:
    """Write the check-point and make it exist. Collective: every rank calls this.

    Raises:
        CheckpointError: Some rank could not write: on all ranks, and nothing is left of it.
    """
    ranks, store = draft.ranks, draft.store
    what = f"step {draft.order.step} cannot be saved to {store.root}"
    files = Files(store, draft.working)

    def write_mine() -> tuple[Any, dict[str, Written]]:
        with _checksummed_once():
            results = _Writer(files).write_data(draft.plan, draft.planner)
            return results.wait(), files.written

    try:
        told = ranks.everywhere(what, write_mine)
        return ranks.first(what, lambda: _complete(draft, files, told))
    except CheckpointError:
        if ranks.rank == 0:
            store.discard(draft.working)
        raise


@contextmanager
def _checksummed_once() -> Iterator[None]:
    """Keep torch from summing tensors too, as for a ZIP archive: nobody looks at its sums.

    In this thread, as of torch 2.13; in earlier ones perhaps in all.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


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
        order.step, draft.ranks.size, order.contents, time.time(), torch.__version__, written,
        draft.sequence,
    )  # fmt: skip
    refuse_other(store)  # one that began as this did
    files.write(MANIFEST, encode(manifest))
    store.publish(draft.working, draft.name)
    # It is saved; what comes after must not tell the script that it is not.
    with _warning(order.step, f"{LATEST} is not written"):
        store.put(LATEST, f"{draft.name}\n".encode())
    with _warning(order.step, f"{OWNER} is not written"):
        claim(store, order.step, draft.sequence)
    with _warning(order.step, "older ones are not removed"):
        for name in superseded(store, draft.name, order.keep):
            with _warning(order.step, f"{name} is not removed"):
                store.remove(name)
    return manifest


@contextmanager
def _warning(step: int, otherwise: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("step %d is saved, but %s: %s", step, otherwise, error)


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
