"""One rank's object on every rank."""

from __future__ import annotations

import operator
import pickle
import struct
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ezpz_dist._errors import CollectiveError
from ezpz_dist._world import find_world

from .call import Call
from .exchange import ROOM, exchange, payload_of
from .members import Members, find_members
from .pickled import as_bytes, dump, is_plain, load, place_for
from .tensors import tell_of_gradient

T = TypeVar("T")

_HEADER = struct.Struct("=cQ")
_INSIDE, _AFTER, _TENSOR = b"i", b"a", b"t"
"""A pickle in the exchange itself; one that follows; a tensor whose elements follow."""


def broadcast(obj: T, root: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return ``root``'s object on every rank. Collective: every rank calls this.

    A dense tensor goes as its elements, anything else pickled; what is smaller than 200
    bytes needs a single collective. Ranks that call something else, or name another root,
    are named on every rank, and the group can be used further.

    Args:
        obj: Any picklable object; only the one on ``root`` matters.
        root: The rank to send from: its rank in the world, also where a group is given.
        group: torch's group of which this rank is a member; None: all ranks.

    Returns:
        On ``root`` the object itself, elsewhere one that is equal. Tensors, also those inside
        of objects, come contiguous, without gradients, and on this rank's device where
        ``root``'s is on a device, else on the host. On ``root`` a tensor shares the memory
        of the argument.

    Raises:
        CollectiveError: The object cannot be pickled (on every rank), or not be unpickled, or
            not be held (where that is so).
        HangError: Not every rank came in time.
        MismatchError: The ranks called different things.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        TypeError: ``root`` is no int, or ``group`` no group.
        ValueError: ``root`` is no rank of the group, or this rank is not in it.
    """
    members = find_members("broadcast()", group)
    call = Call(f"broadcast(root={root!r})")
    try:
        root = _checked(root, members)
        call = Call(f"broadcast(root={root})")  # one of numpy's ints has another repr
        payload, data = _packed(obj) if members and _is_root(root, members) else (b"", None)
    except Exception as error:
        # Whatever it is: the others must not wait for it.
        if members is not None:
            exchange(call, members, refusal=error)
        raise
    if members is None:
        return kept(obj)
    payload = bytes(payload_of(members.ranks.index(root), exchange(call, members, payload)))
    if _is_root(root, members):
        if data is not None:
            members.send(data, root, call.name)
        return kept(obj)
    result: T = _received(payload, root, members, call.name)
    return result


def kept(obj: T) -> T:
    """Return what a rank gets of its own object: the object, a tensor without its graph."""
    if not isinstance(obj, torch.Tensor):
        return obj
    if obj.grad_fn is not None:  # a parameter is broadcast for its value
        tell_of_gradient("broadcast()")
    return obj.detach()  # type: ignore[return-value]  # a tensor for a tensor


def _checked(root: object, members: Members | None) -> int:
    try:
        number = operator.index(root)  # type: ignore[arg-type]  # that is what it finds out
    except TypeError:
        raise TypeError(f"root {root!r}; expected a rank, an int") from None
    world = find_world()
    ranks = members.ranks if members else [0 if world is None else world.info.rank]
    if number not in ranks:
        if len(ranks) == ranks[-1] + 1:
            raise ValueError(f"root {number}; expected a rank from 0 to {len(ranks) - 1}")
        raise ValueError(f"root {number}; expected one of the group's ranks, {list(ranks)}")
    return number


def _is_root(root: int, members: Members) -> bool:
    return members.ranks[members.place] == root


def _packed(obj: object) -> tuple[bytes, torch.Tensor | None]:
    """Return what goes into the exchange, and what follows it: uint8 [bytes]."""
    obj = kept(obj)
    if isinstance(obj, torch.Tensor) and is_plain(obj):
        data = as_bytes(obj)
        about = (str(obj.dtype)[6:], tuple(obj.shape), obj.device.type != "cpu")
        header = _HEADER.pack(_TENSOR, data.numel()) + pickle.dumps(about)
        # A tensor of dozens of axes has no room for them.
        if data.numel() > ROOM - 100 and len(header) <= ROOM:
            return header, data
    raw = dump(obj)
    if len(raw) + _HEADER.size <= ROOM:
        return _HEADER.pack(_INSIDE, len(raw)) + raw, None
    return _HEADER.pack(_AFTER, len(raw)), torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _received(payload: bytes, root: int, members: Members, what: str) -> Any:
    way, length = _HEADER.unpack_from(payload)
    rest = payload[_HEADER.size :]
    if way == _INSIDE:
        return load(rest[:length], root)
    try:
        if way == _AFTER:
            raw = bytearray(length)
            data = torch.frombuffer(raw, dtype=torch.uint8)
        else:
            dtype, shape, on_device = load(rest, root)
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=place_for(on_device))
            data = as_bytes(tensor)
    except Exception as error:
        # No memory, no such dtype: the others must not wait for it, nor this rank fall behind.
        members.send(torch.empty(length, dtype=torch.uint8, device="meta"), root, what)
        me = members.ranks[members.place]
        raise CollectiveError(
            f"rank {me} cannot take the {length:,} bytes from rank {root} ({type(error).__name__}: "
            f"{error}); expected room for them, and the same torch, on every rank",
            [me],
        ) from error
    members.send(data, root, what)
    return load(raw, root) if way == _AFTER else tensor
