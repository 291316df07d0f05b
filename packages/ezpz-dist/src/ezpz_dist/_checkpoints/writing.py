"""A check-point on its way: planned together, copied, written by each rank, completed by rank 0."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ezpz_dist._errors import CheckpointError

from . import archives, index
from .archives import Place
from .files import Files
from .folder import INDEX, LATEST, MANIFEST, OWNER, Name
from .given import Order
from .listing import begin, superseded
from .manifest import Manifest, Written, encode
from .owner import claim, refuse_other, release_at_end
from .pieces import Pieces
from .planning import Item, agree
from .ranks import Ranks
from .store import Store

logger = logging.getLogger(__name__)

_SEEN_WITHIN = 10.0
"""Seconds in which rank 0 must see what others wrote; network file systems remember misses."""


def _name(rank: int) -> str:
    return f"__{rank}_0.distcp"  # as torch's own tools name it


@dataclass(slots=True)
class Draft:
    """A check-point that all ranks know what to write of."""

    ranks: Ranks
    store: Store
    order: Order
    name: Name
    working: str
    sequence: int
    tensors: list[Tensor]
    dealt: list[list[Item]]
    started: float = field(default_factory=time.monotonic)

    def copy(self) -> None:
        """Take what is to be written out of the training's hands."""
        self.tensors = [tensor.to("cpu", copy=True) for tensor in self.tensors]


def draft(
    ranks: Ranks, store: Store, order: Order, held: Mapping[str, Pieces], stage: int
) -> Draft:
    """Plan who writes what, and make the folder. Collective: every rank calls this.

    Raises:
        CheckpointError: Ranks differ in what they hold under one name, or the folder cannot be
            made: on all ranks.
    """
    what = f"step {order.step} cannot be saved to {store.root}"
    mine, dealt = agree(ranks, what, held, stage)
    begun: tuple[Name, str, int] = ranks.first(what, lambda: begin(store, order, _size(dealt)))
    if ranks.rank == 0:
        release_at_end(store)
    return Draft(ranks, store, order, *begun, mine, dealt)


def _size(dealt: Sequence[Sequence[Item]]) -> int:
    """Return about how many bytes will be written, rather too many."""
    return sum(
        math.prod(item.sizes) * item.dtype.itemsize + 4096 for items in dealt for item in items
    )


def write(draft: Draft) -> Manifest:
    """Write the check-point and make it exist. Collective: every rank calls this.

    Raises:
        CheckpointError: Some rank could not write: on all ranks, and nothing is left of it.
    """
    ranks, store = draft.ranks, draft.store
    what = f"step {draft.order.step} cannot be saved to {store.root}"
    files = Files(store, draft.working)

    def write_mine() -> tuple[list[Place], dict[str, Written]]:
        with files.open(_name(ranks.rank)) as stream:
            places = archives.write(stream, draft.tensors)
        return places, files.written

    try:
        told = ranks.everywhere(what, write_mine)
        return ranks.first(what, lambda: _complete(draft, files, told))
    except CheckpointError:
        if ranks.rank == 0:
            store.discard(draft.working)
        raise


def _complete(
    draft: Draft, files: Files, told: Sequence[tuple[list[Place], dict[str, Written]]]
) -> Manifest:
    store, order = draft.store, draft.order
    saved: dict[str, index.Saved] = {}
    for rank, (items, (places, _)) in enumerate(zip(draft.dealt, told, strict=True)):
        for item, place in zip(items, places, strict=True):
            if item.key not in saved:
                saved[item.key] = index.Saved(torch.Size(item.shape), item.dtype)
            chunk = index.Chunk(item.offsets, item.sizes, _name(rank), place)
            saved[item.key].chunks.append(chunk)
    files.write(".metadata", index.metadata_of(saved))
    files.write(INDEX, index.encode(saved))
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
