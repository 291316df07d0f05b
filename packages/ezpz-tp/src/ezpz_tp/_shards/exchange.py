"""What ranks tell each other about their shards: words, and the parts of one tensor."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ezpz_tp._errors import ParallelError
from ezpz_tp._groups.default import current_state
from ezpz_tp._groups.ranks import AXES
from ezpz_tp._groups.state import ParallelState
from ezpz_tp._groups.world import live_world
from ezpz_tp._layers.initialize import sending_device
from ezpz_tp._regions.collectives import all_gather, broadcast_

from .chunks import flat_bytes
from .source import Entry
from .spec import Shard


def state_or_alone(state: ParallelState | None) -> ParallelState:
    """Return the state given, the default one, or that of a rank alone.

    Raises:
        ParallelError: There is no state, but a world of several ranks.
    """
    found = state or current_state()
    if found is not None:
        return found
    world = live_world()
    if world is not None and world.size() > 1:
        raise ParallelError(
            f"there are no parallel groups, but a world of {world.size()} ranks; call "
            "initialize_tensor_parallel first, or give those of the layers, as in "
            "state=ParallelState.from_groups(tensor=group)"
        )
    return ParallelState.from_groups(rank=0)


def tell_all(value: Any, state: ParallelState, axes: Iterable[str] = AXES) -> list[Any]:
    """Return the values of all ranks along some axes. Collective over one axis after another.

    The first is that of the rank which is first along all of them. No rank returns before all
    of them have called it, so that it is a barrier as well.
    """
    values = [value]
    for axis in axes:
        if state.size(axis) > 1:
            together = _all_gather_object(values, state.group(axis))
            values = [value for part in together for value in part]
    return values


@contextmanager
def all_or_none(state: ParallelState) -> Iterator[None]:
    """Raise on every rank, at the end of a block, what it raised on any.

    Collective over all axes; nothing in the block may be.

    Raises:
        ParallelError: The block failed on some rank: the first one's error, of its class if that
            is one of this package's.
    """
    error: ParallelError | None = None
    cause: Exception | None = None
    try:
        yield
    except ParallelError as caught:
        error = cause = caught
    except OSError as caught:
        error, cause = ParallelError(str(caught)), caught
    except Exception as caught:  # noqa: BLE001 - whatever it is, the other ranks wait for word
        error, cause = ParallelError(f"{type(caught).__name__}: {caught}"), caught
    for rank, told in tell_all((state.rank, error), state):
        if told is not None:
            raise type(told)(f"rank {rank}: {told}") from cause


def gather_full(
    local: Tensor,
    shard: Shard,
    group: ProcessGroup,
    device: torch.device | None,
    *,
    keep: bool = True,
) -> Tensor | None:
    """Return a full tensor, joined from the parts of a tensor group; None if it is not kept.

    Collective over the group, unless every rank holds the whole.

    Args:
        local: This rank's part, of any dtype.
        shard: What it is a part of.
        group: The tensor group.
        device: Where to put it; None for where the parts are gathered.
        keep: Whether this rank wants it.
    """
    local, degree = local.detach(), group.size()
    if shard.dim is None or degree == 1:
        if not keep:
            return None
        whole = local.to(device) if device is not None else local
        return whole.clone() if whole.data_ptr() == local.data_ptr() else whole
    if not local.numel():  # nor has the whole any
        return torch.empty(shard.full_shape, dtype=local.dtype, device=device) if keep else None
    # As bytes, because not every backend knows every dtype.
    at = sending_device(group, local.device)
    parts = all_gather(flat_bytes(local.to(at)), 0, group)
    if not keep:
        return None
    full = torch.empty(shard.full_shape, dtype=local.dtype, device=device or parts.device)
    for index, bytes_ in enumerate(parts.chunk(degree)):
        part = bytes_.view(local.dtype).view(local.shape)
        for start, into, length in shard.pieces(index, degree):
            full.narrow(shard.dim, into, length).copy_(part.narrow(shard.dim, start, length))
    return full


def send_full(
    full: Tensor | None,
    entry: Entry,
    source: int,
    group: ProcessGroup,
    device: torch.device | None,
) -> Tensor:
    """Return, on every rank of a group, the tensor of its rank ``source``. Collective."""
    at = sending_device(group, device)  # not where it is: the other ranks do not know
    shape = entry.shard.full_shape
    sent = torch.empty(shape, dtype=entry.dtype, device=at) if full is None else full.to(at)
    if sent.numel():
        sent = broadcast_(flat_bytes(sent), source, group).view(entry.dtype).view(shape)
    return sent if device is None else sent.to(device)


def _all_gather_object(value: Any, group: ProcessGroup) -> list[Any]:
    at = sending_device(group, None)  # words are on the CPU; few backends need them elsewhere
    message = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = all_gather(torch.tensor([len(message)], device=at), 0, group).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=at)
    padded[: len(message)] = message.to(at)
    received = bytearray(len(padded) * len(sizes))
    torch.frombuffer(received, dtype=torch.uint8).copy_(all_gather(padded, 0, group))
    return [
        pickle.loads(received[start : start + size])  # noqa: S301 - from ranks of this program
        for start, size in zip(range(0, len(received), len(padded)), sizes, strict=True)
    ]
