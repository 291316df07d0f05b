"""The small exchange with which every collective begins.

Each rank contributes a slot of fixed size: a hash of what it calls, and what little it has to
send. So ranks that took different branches learn of it at once: by itself gloo would time out
without a name, or, with different shapes, hand one of them a wrong result as a success.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Protocol

import torch

from ezpz_dist._world import World

from .call import Call, digest, summary
from .mismatch import Slots, explain

SLOT = 256
"""Bytes of a slot: latency is the same from 32 to 1024 (gloo), and 27 numbers fit in."""

_HEADER = struct.Struct("=8sBI")
_ALIKE = 9
"""Bytes of the header in which ranks that take part in the same call do not differ."""

_TAKES_PART, _REFUSES = 0, 1

ROOM = SLOT - _HEADER.size
"""Bytes of a slot that a collective has for itself."""

_calls = itertools.count()
"""Makes every exchange of this process distinct; need not agree between ranks."""


class Channel(Protocol):
    """How bytes and tensors get from rank to rank: torch, or MPI."""

    @property
    def world(self) -> World:
        """What set-up decided."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that take part, by place."""

    @property
    def place(self) -> int:
        """This rank's place."""

    @property
    def where(self) -> torch.device:
        """Where tensors must lie to be sent."""

    def gather(self, mine: bytearray, what: str, timeout: float | None = None) -> bytearray:
        """Return every rank's bytes, of equal length, one after the other by place."""

    def reduce(self, tensor: torch.Tensor, op: str, what: str) -> None:
        """Combine a contiguous tensor at `where` over the ranks, in place."""


def exchange(
    call: Call,
    channel: Channel,
    payload: bytes | bytearray = b"",
    *,
    timeout: float | None = None,
    refusal: Exception | None = None,
) -> bytearray:
    """Make sure that all ranks call the same, and return all slots; see `payload_of`.

    Args:
        call: What this rank calls.
        channel: The ranks.
        payload: At most `ROOM` bytes.
        timeout: Seconds to wait; None: the group's own.
        refusal: Why this rank cannot take part, so that the others need not wait for it.

    Raises:
        MismatchError: The ranks called different things; the same error on all of them.
        CollectiveError: Some of the ranks refused; the same error on all of them.
        Exception: ``refusal`` itself, where every rank refused.
    """
    hashed, what = summary(call)
    tag = _TAKES_PART
    if refusal is not None:
        hashed, tag = digest(f"{type(refusal).__name__}: {refusal}"), _REFUSES
    mine = bytearray(SLOT)
    _HEADER.pack_into(mine, 0, hashed, tag, next(_calls) & 0xFFFFFFFF)
    mine[_HEADER.size : _HEADER.size + len(payload)] = payload
    every = channel.gather(mine, what, timeout)
    heads = [bytes(every[at : at + _ALIKE]) for at in range(0, len(every), SLOT)]
    if refusal is None and heads.count(heads[channel.place]) == len(heads):
        return every
    refused = {place for place, head in enumerate(heads) if head[-1] == _REFUSES}
    if refusal is not None and len(refused) == len(heads):
        raise refusal
    slots = Slots(channel.world, channel.ranks, channel.place, heads, refused, bytes(every))
    raise explain(call, slots, refusal) from refusal


def payload_of(place: int, every: bytearray) -> bytearray:
    """Return what the rank at a place gave to `exchange`, with zeros up to `ROOM`."""
    return every[place * SLOT + _HEADER.size : (place + 1) * SLOT]
