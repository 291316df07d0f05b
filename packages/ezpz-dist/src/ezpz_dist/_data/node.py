"""One rank of a node reads, and the others of the node have it from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from ezpz_dist._collectives.broadcast import broadcast
from ezpz_dist._collectives.members import Members, find_members
from ezpz_dist._collectives.pickled import as_bytes, dump, is_plain, load, place_for
from ezpz_dist._errors import DataError
from ezpz_dist._hangs.waiting import waiting
from ezpz_dist._world import World, current_world

T = TypeVar("T")

_PIECE = 1 << 28
"""Bytes that are sent at once."""

_node: tuple[World, dist.ProcessGroup] | None = None


def node_group() -> dist.ProcessGroup | None:
    """Return the group of the ranks on this rank's host; made once, over gloo.

    Collective on each node: every rank of it calls this. None in a process that was never set
    up. Its ranks and collectives are on the host, whatever the world's backend is.

    Raises:
        NotSetUpError: There are several ranks and `setup_torch` was not called.
    """
    global _node
    world = current_world("node_group()")
    if world is None:
        return None
    if _node is None or _node[0] is not world:
        host = world.hosts[world.info.rank]
        ranks = [rank for rank, name in enumerate(world.hosts) if name == host]
        with waiting("node_group()", world):
            group = dist.new_group(
                ranks,
                backend="gloo",
                timeout=timedelta(seconds=world.timeout),
                use_local_synchronization=True,  # the node's ranks alone make it
            )
        _node = world, cast("dist.ProcessGroup", group)
    return _node[1]


def scatter_from_one_reader(
    read: Callable[[], Sequence[T]], *, group: dist.ProcessGroup | None = None
) -> T:
    """Let the first rank of a group read for all of it; return this rank's part.

    Collective: every rank of the group calls this.

    Args:
        read: Called on the first rank only; returns one part for each rank, by place in the
            group: tensors (sent without pickling), or anything that can be pickled.
        group: Who shares a reader; default: this node's ranks (`node_group`).

    Returns:
        This rank's part; a tensor lies on the host, or where this rank computes if it lay on
        the reader's device.

    Raises:
        DataError: On every rank of the group: ``read`` failed, or returned another number of
            parts. The reader's own exception is its cause there.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
    """
    members = find_members("scatter_from_one_reader()", node_group() if group is None else group)
    parts, trouble, cause = try_to_read(read, members)
    count = 1 if members is None else len(members.ranks)
    if reads(members) and not trouble and (not isinstance(parts, Sequence) or len(parts) != count):
        said = f"{len(parts)} parts" if isinstance(parts, Sequence) else f"a {type(parts).__name__}"
        trouble = f"it returned {said}; expected a list, one part for each of {count} ranks"
    agree(trouble, cause, members, "scatter_from_one_reader()")
    if members is None:
        assert parts is not None
        return parts[0]
    what = "scatter_from_one_reader()"
    with waiting(what, members.world):
        if parts is None:
            return cast("T", _receive(members))
        for place, part in enumerate(parts):
            if place != members.place:
                _send(part, place, members)
        return parts[members.place]


def reads(members: Members | None) -> bool:
    """Return whether this rank is the one that reads."""
    return members is None or members.place == 0


def try_to_read(
    read: Callable[[], T], members: Members | None
) -> tuple[T | None, str, Exception | None]:
    """Return what the reader read, or what went wrong; nothing on other ranks."""
    if not reads(members):
        return None, "", None
    try:
        return read(), "", None
    except Exception as error:  # noqa: BLE001  # whatever it is, every rank raises it
        return None, f"{type(error).__name__}: {error}", error


def agree(trouble: str, cause: Exception | None, members: Members | None, what: str) -> None:
    """Raise on every rank what the reader could not do."""
    reader, host = 0, ""
    if members is not None:
        trouble = broadcast(trouble, members.ranks[0], members.group)
        reader = members.ranks[0]
        host = f" on {members.world.hosts[reader]}"
    if trouble:
        raise DataError(f"{what}: the reader, rank {reader}{host}, failed: {trouble}") from cause


def _send(part: object, place: int, members: Members) -> None:
    if isinstance(part, torch.Tensor) and is_plain(part):
        about = (str(part.dtype)[6:], tuple(part.shape), part.device.type != "cpu")
        data = as_bytes(part)
    else:
        about, data = None, _bytes(dump(part))
    header = _bytes(dump(about))
    sizes = torch.tensor([header.numel(), data.numel()])
    for tensor in (sizes, header, *data.split(_PIECE)):
        if tensor.numel():
            dist.send(tensor.to(members.where), members.ranks[place], group=members.group)


def _receive(members: Members) -> object:
    reader = members.ranks[0]

    def get(tensor: torch.Tensor) -> torch.Tensor:
        for piece in tensor.split(_PIECE):
            if piece.numel():
                staged = piece.to(members.where)
                dist.recv(staged, reader, group=members.group)
                if staged is not piece:
                    piece.copy_(staged)
        return tensor

    header, length = get(torch.zeros(2, dtype=torch.int64)).tolist()
    about = load(bytes(get(torch.empty(header, dtype=torch.uint8)).tolist()), reader)
    if about is None:
        raw = bytearray(length)
        get(torch.frombuffer(raw, dtype=torch.uint8))
        return load(raw, reader)
    dtype, shape, on_device = about
    part = torch.empty(shape, dtype=getattr(torch, dtype), device=place_for(on_device))
    get(as_bytes(part))
    return part


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
