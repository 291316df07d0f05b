"""The ranks of a collective: what they exchange, and who called something else."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import pickle
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ._diagnosis import calling_line
from ._errors import CollectiveError, MismatchError, NotSetUpError, fold
from ._watch import finish, waiting
from ._world import World, current_world, find_world

# What a rank calls, in words that all ranks must have in common.

WORDS = 200
"""Characters of a call that a message shows: a dict can have thousands of keys."""


class Call(NamedTuple):
    """One call of a collective, as far as all ranks must agree on it.

    Attributes:
        name: ``"all_reduce"``, ``"broadcast(root=0)"``, ``"barrier()"``.
        op: ``"sum"``, ``"mean"``, ... where it combines; else empty.
        leaves: Where it combines: for each key in words what is there (``"float32 [3]"``);
            the key is empty where the argument is no dict.
    """

    name: str
    op: str = ""
    leaves: tuple[tuple[str, str], ...] | None = None

    def signature(self) -> str:
        """Return all of it in words: equal where the calls fit together."""
        if self.leaves is None:
            return self.name
        inner = "{" + ", ".join([f"{key}: {kind}" for key, kind in self.leaves]) + "}"
        if len(self.leaves) == 1 and not self.leaves[0][0]:
            inner = self.leaves[0][1]
        return f"{self.name} of {inner} ({self.op})"


@lru_cache(32)  # a training loop calls the same few again and again
def summary(call: Call) -> tuple[bytes, str]:
    """Return eight bytes that stand for a call, and words for whoever asks what is going on."""
    signature = call.signature()
    return digest(signature), shorten(signature)


def shorten(signature: str) -> str:
    """Return a signature at a length that a line of a message can bear."""
    return signature if len(signature) <= WORDS else f"{signature[: WORDS - 1]}…"


def digest(text: str) -> bytes:
    """Return eight bytes that stand for a text, the same in every process."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


# Objects as bytes, for ranks of the same job.


def is_plain(obj: object) -> bool:
    """Say whether an object is a dense tensor whose bytes are all there is to it."""
    return (
        isinstance(obj, torch.Tensor)
        and type(obj) in (torch.Tensor, torch.nn.Parameter)
        and obj.layout is torch.strided
        and not obj.is_quantized
        and not obj.is_meta
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a plain tensor as uint8 [bytes], on its device; copied if need be."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)


def place_for(on_device: bool) -> torch.device:
    """Return where a tensor of another rank belongs here: on this rank's device, or the host."""
    world = find_world()
    return world.device if on_device and world is not None else torch.device("cpu")


def dump(obj: object) -> bytes:
    """Return an object's bytes; tensors in it lose their graph, and find their device by `load`.

    Raises:
        CollectiveError: It cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    except Exception as error:  # pickling runs the object's own code
        raise CollectiveError(
            f"{type(obj).__name__} cannot be pickled ({type(error).__name__}: {error}); expected "
            "an object of importable classes, without open files, locks or lambdas"
        ) from error
    return buffer.getvalue()


def load(data: bytes | bytearray, sender: int) -> Any:
    """Return the object of `dump`'s bytes.

    Args:
        data: Its bytes.
        sender: The rank that it is from, for the message.

    Raises:
        CollectiveError: It cannot be made here: a class that this rank cannot import.
    """
    try:
        return pickle.loads(data)  # noqa: S301  # from a rank of this very job
    except Exception as error:  # unpickling runs the object's own code
        raise CollectiveError(
            f"what rank {sender} sent cannot be unpickled here ({type(error).__name__}: {error}); "
            "expected the same modules on every rank",
            [sender],
        ) from error


class _Pickler(pickle.Pickler):
    """Writes tensors as their bytes: by itself torch would put them on the sender's device."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or not is_plain(obj):
            return NotImplemented
        data = as_bytes(obj)
        raw = bytearray(data.numel())
        if raw:
            torch.frombuffer(raw, dtype=torch.uint8).copy_(data)
        return _tensor, (raw, str(obj.dtype)[6:], tuple(obj.shape), obj.device.type != "cpu")


def _tensor(raw: bytearray, dtype: str, shape: tuple[int, ...], on_device: bool) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=place_for(on_device))
    if raw:
        as_bytes(tensor).copy_(torch.frombuffer(raw, dtype=torch.uint8))
    return tensor


# The ranks of a collective, and how torch carries what they say.

REDUCE_OPS: dict[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
"""What every backend can do: oneCCL and gloo have no AVG."""

_DIRECT = 1 << 20
"""Bytes, of all ranks, that each sends straight to all others, on the host: one message each,
all at once, takes half the time of gloo's ring (2 and 4 ranks, torch 2.13)."""

_CHUNK = 1 << 24
"""Bytes that a broadcast moves at once: what is staged on a device stays within this."""


@dataclass(frozen=True, slots=True)
class Members:
    """Several ranks that take part in a collective, seen from one of them.

    Attributes:
        world: What set-up decided.
        group: torch's group; None: the world's.
        ranks: Their ranks in the world, by place in the group.
        place: This rank's place in the group.
        where: Where tensors must lie for the group's backend to send them.
        scope: Which group it is, in words: ranks that wait in different ones are told apart.
    """

    world: World
    group: dist.ProcessGroup | None
    ranks: Sequence[int]
    place: int
    where: torch.device
    scope: str = ""

    def gather(self, mine: bytearray, what: str, timeout: float | None = None) -> bytearray:
        """Return every rank's bytes, of equal length, one after the other by place."""
        size = len(self.ranks)
        every = bytearray(len(mine) * size)
        group = self.group or dist.group.WORLD
        assert group is not None  # set-up made it
        got = on_host = torch.frombuffer(every, dtype=torch.uint8)
        what += self.scope
        with waiting(what, self.world, self.ranks):
            if self.where.type == "cpu" and len(every) <= _DIRECT:
                sent = torch.frombuffer(mine * size, dtype=torch.uint8)
                swap = getattr(group, "all_to_all_single", None) or group.alltoall_base
                work = swap(
                    got,
                    sent,
                    [],
                    [],
                    self._within(dist.AllToAllOptions(), timeout),
                )
            else:
                sent = torch.frombuffer(mine, dtype=torch.uint8).to(self.where)
                got = torch.empty_like(on_host, device=self.where)
                # The group's own method, named anew in torch 2.13: dist's function costs a fifth
                # more, and warns of the old name.
                gather = getattr(group, "all_gather_single", None) or group._allgather_base  # noqa: SLF001
                options = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]  # it is there
                work = gather(got, sent, self._within(options, timeout))
            finish(work, timeout, what, self.world, members=self.ranks, where=self.where)
            if got is not on_host:
                on_host.copy_(got)
        return every

    def _within(self, options: Any, timeout: float | None) -> Any:
        """Give an operation more time than the group's own, where more was asked for.

        Not less: gloo closes the connections of an operation that runs out of its own time.
        """
        if timeout is not None:
            options.timeout = timedelta(seconds=max(timeout, self.world.timeout))
        return options

    def reduce(self, tensor: torch.Tensor, op: str, what: str) -> None:
        """Combine a contiguous tensor at `where` over the ranks, in place."""
        with waiting(what + self.scope, self.world, self.ranks):
            dist.all_reduce(tensor, op=REDUCE_OPS[op], group=self.group)

    def send(self, data: torch.Tensor, root: int, what: str) -> None:
        """Fill a tensor on every rank with what the one of ``root`` holds.

        Args:
            data: uint8 [bytes], anywhere; on each rank of the same length, at least 1. On the
                meta device what comes is dropped.
            root: The sender's rank in the world.
            what: The operation, for whoever asks.
        """
        sends = self.ranks[self.place] == root
        for piece in data.split(_CHUNK):
            staged = (
                piece if piece.device == self.where else torch.empty_like(piece, device=self.where)
            )
            with waiting(what + self.scope, self.world, self.ranks):
                if sends and staged is not piece:
                    staged.copy_(piece)
                dist.broadcast(staged, src=root, group=self.group)
                if not (sends or staged is piece or piece.is_meta):
                    piece.copy_(staged)


_everyone: Members | None = None
"""The world's, made once: most calls are for all ranks."""


def find_members(operation: str, group: dist.ProcessGroup | None) -> Members | None:
    """Return the ranks that take part; None where this process is the only one.

    Args:
        operation: What is called, for messages: ``"barrier()"``.
        group: torch's group of which this rank is a member; None: the world.

    Raises:
        NotSetUpError: There are several ranks, and `setup_torch` was not called.
        TypeError: ``group`` is no process group.
        ValueError: This rank is not a member of ``group``.
    """
    world = current_world(operation)
    if world is None:
        # A group that a script made by itself, without any launcher's variables.
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise NotSetUpError(
                f"{operation} on rank {dist.get_rank()} of {dist.get_world_size()}, in a process "
                "group that setup_torch() did not make; expected ezpz.setup_torch() in place of "
                "init_process_group, on every rank"
            )
        return None
    if group is None:
        size = world.info.world_size
        if size == 1:
            return None
        global _everyone
        everyone = _everyone
        if everyone is None or everyone.world is not world:
            where = world.on_host
            everyone = _everyone = Members(world, None, range(size), world.info.rank, where)
        return everyone
    ranks = _ranks_of(group, operation, world.info.rank)
    if len(ranks) == 1:
        return None
    where = torch.device("cpu") if "gloo" in dist.get_backend(group) else world.device
    scope = f" in group {group.group_name}"
    return Members(world, group, ranks, ranks.index(world.info.rank), where, scope)


def _ranks_of(group: object, operation: str, rank: int) -> list[int]:
    # new_group returns this, and not None, to ranks that are not in the group.
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{operation} on rank {rank} with a group of which it is no member; expected the call "
            "on the group's members only"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{operation} with group={group!r}; expected a torch.distributed.ProcessGroup, for "
            "example from new_group() or mesh.get_group(), or None for all ranks"
        )
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        raise ValueError(
            f"{operation} with a group that torch does not know; expected one made since "
            "setup_torch() and not destroyed"
        ) from None


# The small exchange with which every collective begins.

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


# Ranks that called different things: who, what, and where in their code.

_PARTIES = 8
"""Different calls that are told apart; more make no message clearer."""

_KEYS = 3
"""Keys that a message names for each rank."""

_PATIENCE = 10.0
"""Seconds for a rank to say what it called; they all are in this function."""

_LOST = (dist.DistNetworkError, dist.DistStoreError)


@dataclass(frozen=True, slots=True)
class Slots:
    """What the exchange showed.

    Attributes:
        world: What set-up decided.
        ranks: The ranks, by place.
        place: This rank's place.
        heads: By place, bytes that are equal where the calls are.
        refused: The places of those who cannot take part.
        every: All bytes of the exchange: the same on every rank, and never twice.
    """

    world: World
    ranks: Sequence[int]
    place: int
    heads: list[bytes]
    refused: set[int]
    every: bytes


def explain(call: Call, slots: Slots, refusal: Exception | None) -> CollectiveError:
    """Return the error that every rank raises. Collective: every rank of ``slots`` calls this.

    One rank of each party says through the store what it called; nothing is kept there.
    """
    parties: dict[bytes, list[int]] = {}
    for place, head in enumerate(slots.heads):
        parties.setdefault(head, []).append(place)
    # The majority first; of equally many, those with the lowest rank.
    ordered = sorted(parties.values(), key=lambda party: (-len(party), party[0]))
    if slots.refused:
        ordered.sort(key=lambda party: party[0] in slots.refused)
    told = _tell_and_ask(call, slots, refusal, [party[0] for party in ordered[:_PARTIES]])
    hosts = slots.world.hosts

    def name(party: list[int]) -> str:
        ranks = [slots.ranks[place] for place in party]
        return f"rank {ranks[0]} ({hosts[ranks[0]]})" if len(ranks) == 1 else f"ranks {fold(ranks)}"

    expected = told[0]
    lines = []
    if ordered[0][0] not in slots.refused:
        lines.append(f"{name(ordered[0])} {_verb(ordered[0])} {_words(expected)}")
    for party, said in zip(ordered[1:], told[1:], strict=False):
        if bool(slots.refused) == (party[0] in slots.refused):
            lines.append(f"{name(party)} {_difference(expected, said, party)}")
    if len(ordered) > _PARTIES:
        lines.append(f"and {len(ordered) - _PARTIES} more different calls")
    if slots.refused:
        ranks = sorted(slots.ranks[place] for place in slots.refused)
        return CollectiveError(
            f"{'; '.join(lines)}; expected every rank to take part; mend the call there", ranks
        )
    ranks = sorted(slots.ranks[place] for party in ordered[1:] for place in party)
    return MismatchError(
        f"{'; '.join(lines)}; expected every rank to call the same, with the same keys, shapes "
        "and dtypes",
        ranks,
    )


def _verb(party: list[int]) -> str:
    return "calls" if len(party) == 1 else "call"


def _words(said: Mapping[str, Any]) -> str:
    return f"{shorten(said['signature'])} at {said['at']}"


def _difference(expected: Mapping[str, Any], said: Mapping[str, Any], party: list[int]) -> str:
    if said["refusal"]:
        return f"cannot take part in {_words(said)}: {said['refusal']}"
    mine, theirs = said["leaves"], expected["leaves"]
    alike = (said["name"], said["op"]) == (expected["name"], expected["op"])
    if not alike or mine is None or theirs is None or ("" in mine) != ("" in theirs):
        return f"{_verb(party)} {_words(said)}"
    has = "has" if len(party) == 1 else "have"
    found = [f"{has} no key {key}" for key in theirs if key not in mine]
    found += [f"{has} a key {key} that the others have not" for key in mine if key not in theirs]
    found += [
        f"{has} {kind}{f' at key {key}' if key else ''} instead of {theirs[key]}"
        for key, kind in mine.items()
        if theirs.get(key, kind) != kind
    ]
    more = [f"and {len(found) - _KEYS} more differences"] if len(found) > _KEYS else []
    return f"{', '.join(found[:_KEYS] + more)} at {said['at']}"


def _tell_and_ask(
    call: Call, slots: Slots, refusal: Exception | None, speakers: list[int]
) -> list[dict[str, Any]]:
    """Return what each of the speakers called; each says so itself, the others listen."""
    mine = {
        "name": call.name,
        "op": call.op,
        "leaves": None if call.leaves is None else dict(call.leaves),
        "signature": call.signature(),
        "at": calling_line(),
        "refusal": refusal and f"{type(refusal).__name__}: {refusal}",
    }
    unknown = {**mine, "leaves": None, "signature": "something else", "at": "?", "refusal": ""}
    # No counter that a failure could put out of step: what all ranks have just seen.
    subject = f"mismatch/{digest(f'{list(slots.ranks)}{slots.every.hex()}').hex()}"
    store, until = slots.world.store, time.monotonic() + min(_PATIENCE, slots.world.timeout)
    keys = [f"{subject}/{place}" for place in speakers]
    told: list[dict[str, Any]] = []
    try:
        if slots.place in speakers:
            store.set(f"{subject}/{slots.place}", json.dumps(mine))
        for key in keys:
            store.wait([key], timedelta(seconds=max(0.1, until - time.monotonic())))
            told.append(json.loads(store.get(key)))
    except _LOST:
        # A rank, or the store's, has ended meanwhile: the ranks that differ are known all the same.
        told += [unknown] * (len(keys) - len(told))
        return told
    with suppress(*_LOST):
        _leave_together(slots, subject, keys, until)
    return told


def _leave_together(slots: Slots, subject: str, keys: list[str], until: float) -> None:
    """Keep the rank whose process holds the store until all have read, and leave nothing there."""
    store, size = slots.world.store, len(slots.ranks)
    if store.add(f"{subject}/read", 1) == size:
        for key in [*keys, f"{subject}/read"]:
            store.delete_key(key)
        store.set(f"{subject}/done", "")
    store.wait([f"{subject}/done"], timedelta(seconds=max(0.1, until - time.monotonic())))
    if store.add(f"{subject}/left", 1) == size:
        store.delete_key(f"{subject}/done")
        store.delete_key(f"{subject}/left")
