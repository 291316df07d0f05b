"""Every rank's object on every rank."""

from __future__ import annotations

import struct
from typing import Any

import torch
import torch.distributed as dist

from .broadcast import kept
from .call import Call
from .exchange import ROOM, exchange, payload_of
from .members import Members, find_members
from .pickled import dump, load

_LENGTH = struct.Struct("=Q")

_WASTE = 4
"""How many times more than there is may be moved, to move it in one collective."""


def all_gather_object(obj: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's object, by rank. Collective: every rank calls this.

    Args:
        obj: Any picklable object; of any size, also a different one on each rank. Where all
            are smaller than 230 bytes pickled, this is a single collective.
        group: torch's group of which this rank is a member; None: all ranks.

    Returns:
        A list by rank (in a group, by place in the group); this rank's own object is in it
        itself. Tensors are as with `broadcast`.

    Raises:
        CollectiveError: A rank's object cannot be pickled (on every rank), or not be
            unpickled (where that is so).
        HangError: Not every rank came in time.
        MismatchError: Other ranks called something else.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        TypeError: ``group`` is no group.
        ValueError: This rank is not in ``group``.
    """
    members = find_members("all_gather_object()", group)
    if members is None:
        return [kept(obj)]
    call = Call("all_gather_object()")
    try:
        mine = dump(kept(obj))
    except Exception as error:
        # Whatever it is: the others must not wait for it.
        exchange(call, members, refusal=error)
        raise
    room = ROOM - _LENGTH.size
    payload = _LENGTH.pack(len(mine)) + (mine if len(mine) <= room else b"")
    every = exchange(call, members, payload)
    slots = [payload_of(place, every) for place in range(len(members.ranks))]
    lengths = [_LENGTH.unpack_from(slot)[0] for slot in slots]
    pickles = [
        slot[_LENGTH.size : _LENGTH.size + length]
        for slot, length in zip(slots, lengths, strict=True)
    ]
    if max(lengths) > room:
        pickles = _fetch(bytearray(mine), lengths, members, call.name)
    return [
        kept(obj) if place == members.place else load(pickles[place], members.ranks[place])
        for place in range(len(pickles))
    ]


def _fetch(mine: bytearray, lengths: list[int], members: Members, what: str) -> list[bytearray]:
    """Return every rank's pickle, where not all had room in the exchange."""
    longest = max(lengths)
    if longest * len(lengths) <= _WASTE * sum(lengths):
        every = members.gather(mine.ljust(longest, b"\0"), what)
        return [every[at * longest : at * longest + length] for at, length in enumerate(lengths)]
    # One rank's is far longer than the others': padding to it would need its memory for each.
    pickles = []
    for place, length in enumerate(lengths):
        pickle = mine if place == members.place else bytearray(length)
        members.send(torch.frombuffer(pickle, dtype=torch.uint8), members.ranks[place], what)
        pickles.append(pickle)
    return pickles
