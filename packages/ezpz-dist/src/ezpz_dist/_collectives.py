"""Collectives that are the same under every launcher, and in a world of one."""

from __future__ import annotations

import importlib
import operator
import pickle
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from ezpz_device import get_torch_device

from . import _values
from ._errors import CollectiveError
from ._members import (
    ROOM,
    Call,
    Channel,
    Members,
    as_bytes,
    dump,
    exchange,
    find_members,
    is_plain,
    load,
    payload_of,
    place_for,
    summary,
)
from ._values import refold, tell_of_gradient, unfold
from ._watch import explain, waiting
from ._world import World, find_world

# Wait for a device's work.


def synchronize(device: str | torch.device | None = None) -> None:
    """Wait until everything that was queued on a device is done; on the CPU nothing is queued.

    Not a collective: it waits for this rank's device only.

    Args:
        device: ``"cuda:0"``, ``"xpu"``, ``"mps"``, ``"cpu"``; None: this rank's device.

    Raises:
        ezpz_device.DeviceError: No device is given, and there is none for this rank.
    """
    if device is None:
        world = find_world()
        device = get_torch_device() if world is None else world.device
    where = torch.device(device)
    if where.type == "mps":
        torch.mps.synchronize()
    elif where.type != "cpu":
        torch.get_device_module(where).synchronize(where)


# The same exchange over MPI, for those who ask for it: always timed, never a blocking call.

_SPIN = 1e-3
"""Seconds in which a waiting rank asks MPI again as soon as the others have had the core."""

_POLL = 1e-3

_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
}
_OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "product": "PROD"}

_opened: OverMpi | None = None

_abandoned: list[Any] = []
"""Operations that did not come about, with their memory: MPI may still write into it."""


def find_channel(
    operation: str,
    implementation: str,
    members: Members | None,
    group: dist.ProcessGroup | None,
) -> Channel | None:
    """Return what carries a collective; None where this process is the only rank.

    Args:
        operation: What is called: ``"barrier()"``.
        implementation: ``"torch"`` or ``"mpi"``.
        members: The ranks.
        group: What the caller gave; MPI has the world only.

    Raises:
        CollectiveError: MPI's world is not this job's, or another rank cannot take part.
        MismatchError: Not every rank uses MPI, where it is the first time that one does.
        ValueError: ``implementation`` is unknown, or ``"mpi"`` with a group.
    """
    if implementation == "torch":
        return members
    refusal: ValueError | None = None
    if implementation != "mpi":
        refusal = ValueError(f"implementation {implementation!r}; expected 'torch' or 'mpi'")
    elif group is not None:
        refusal = ValueError(
            f"{operation} with implementation='mpi' and a group; expected group=None, because MPI "
            "knows nothing of torch's groups; leave one of the two out"
        )
    if refusal is not None:
        if members is not None:
            exchange(Call(operation), members, refusal=refusal)
        raise refusal
    return None if members is None else _open(operation, members)


@dataclass(frozen=True, slots=True)
class OverMpi:
    """All ranks, over a communicator of our own.

    Attributes:
        world: What set-up decided.
        ranks: Their ranks.
        place: This rank.
        where: The host: MPI need not know of devices.
    """

    world: World
    ranks: Sequence[int]
    place: int
    where: torch.device
    _mpi: ModuleType
    _comm: Any

    def gather(self, mine: bytearray, what: str, timeout: float | None = None) -> bytearray:
        """Return every rank's bytes, of equal length, one after the other by rank."""
        every = bytearray(len(mine) * len(self.ranks))
        byte = self._mpi.BYTE
        request = self._comm.Iallgather([mine, byte], [every, byte])
        finish(request, (mine, every), f"{what} over MPI", self.world, timeout)
        return every

    def reduce(self, tensor: torch.Tensor, op: str, what: str) -> None:
        """Combine a contiguous tensor on the host over the ranks, in place."""
        mpi = self._mpi
        # By address: mpi4py would want numpy to see into a tensor.
        memory = mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        spec = [memory, getattr(mpi, _TYPES[tensor.dtype])]
        request = self._comm.Iallreduce(mpi.IN_PLACE, spec, getattr(mpi, _OPS[op]))
        finish(request, tensor, f"{what} over MPI", self.world, None)


def finish(request: Any, memory: object, what: str, world: World, timeout: float | None) -> None:
    """Wait for a request of MPI's, at most so long.

    Args:
        request: An ``mpi4py.MPI.Request``.
        memory: What it reads and writes.
        what: The operation.
        world: The world.
        timeout: Seconds; None: the world's own.

    Raises:
        HangError: It is not done in time; names the ranks that have not come.
    """
    limit = world.timeout if timeout is None else timeout
    start = time.monotonic()
    with waiting(what, world):
        while not request.Test():
            waited = time.monotonic() - start
            if waited > limit:
                _abandoned.append((request, memory))
                raise explain(TimeoutError(f"not done after {limit:g} s"), what, world, waited)
            time.sleep(0 if waited < _SPIN else _POLL)


def _open(operation: str, members: Members) -> OverMpi:
    global _opened
    ours = _opened if _opened is not None and _opened.world is members.world else None
    if ours is not None and ours._mpi.Is_finalized():  # noqa: SLF001  # our own
        raise _ended(ours._mpi)  # noqa: SLF001
    # Once those who were missing have come after all, MPI is in step again.
    _abandoned[:] = [each for each in _abandoned if not each[0].Test()]
    if _abandoned:
        raise CollectiveError(
            f"{operation} with implementation='mpi' after one that not all ranks have come to yet: "
            "MPI cannot take it back; expected implementation='torch' until then"
        )
    if ours is not None:
        return ours
    # MPI may only now be initialised, and waits for all ranks, without a time-out.
    call = Call(f"{operation} with implementation='mpi', for the first time")
    exchange(call, members)
    mpi: ModuleType | None = None
    refusal: CollectiveError | None = None
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        refusal = CollectiveError(f"mpi4py cannot load an MPI ({error}); expected one; {_REMEDY}")
    else:
        refusal = _foreign(mpi, members)
    exchange(call, members, refusal=refusal)
    assert mpi is not None  # or the exchange would have raised
    # Of our own: the script's messages and ours must not meet.
    comm, request = mpi.COMM_WORLD.Idup()
    finish(request, comm, f"{call.name} over MPI", members.world, None)
    _opened = OverMpi(members.world, members.ranks, members.place, torch.device("cpu"), mpi, comm)
    return _opened


_REMEDY = "start the ranks with mpiexec, or leave implementation='mpi' out"


def _ended(mpi: ModuleType) -> CollectiveError:
    state = "was finalized" if mpi.Is_finalized() else "is not initialized"
    return CollectiveError(
        f"implementation='mpi' where MPI {state}; expected the script to leave that to mpi4py, or "
        "implementation='torch'"
    )


def _foreign(mpi: ModuleType, members: Members) -> CollectiveError | None:
    if mpi.Is_finalized() or not mpi.Is_initialized():
        # The next call would end the process.
        return _ended(mpi)
    comm, info = mpi.COMM_WORLD, members.world.info
    if (comm.rank, comm.size) == (info.rank, info.world_size):
        return None
    library = mpi.Get_library_version().splitlines()[0]
    return CollectiveError(
        f"mpi4py sees rank {comm.rank} of {comm.size} ({library}), set-up {info.rank} of "
        f"{info.world_size} ({info.launcher}); expected MPI's world to be this job's; {_REMEDY}"
    )


# Wait until every rank is here.

_CALL = Call("barrier()")

LONGEST = 1e9
"""Seconds: 30 years; torch's clocks overflow not far beyond, and would not wait at all."""


def barrier(
    group: dist.ProcessGroup | None = None,
    implementation: str = "torch",
    timeout: float | None = None,
) -> None:
    """Wait until every rank is here. Collective: every rank calls this.

    Args:
        group: torch's group of which this rank is a member; None: all ranks.
        implementation: ``"torch"``; or ``"mpi"``, which leaves devices alone, on all ranks only.
        timeout: Seconds to wait, fewer or more than `setup_torch` was given; None: those. The
            group can be used further where the missing ranks come within `setup_torch`'s.

    Raises:
        CollectiveError: Another rank cannot take part.
        HangError: Not every rank came in time.
        MismatchError: Other ranks called something else.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        TypeError: ``group`` is no group.
        ValueError: This rank is not in ``group``, ``timeout`` is not positive or beyond 30
            years, or ``implementation`` is unknown.
    """
    members = find_members("barrier()", group)
    channel = find_channel("barrier()", implementation, members, group)
    if timeout is not None and not 0 < timeout <= LONGEST:
        error = ValueError(
            f"timeout {timeout!r}; expected seconds, more than 0 and at most {LONGEST:g}, or None"
        )
        if channel is not None:
            exchange(_CALL, channel, refusal=error)
        raise error
    if channel is not None:
        exchange(_CALL, channel, timeout=timeout)


# One rank's object on every rank.

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


# Every rank's object on every rank.

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


# Numbers, tensors, arrays and dicts of them, combined over the ranks.

D = TypeVar("D", bound=dict[Any, Any])

OPS = ("sum", "mean", "min", "max", "product")

_GATHERED = 1 << 16
"""Bytes up to which a rank takes the data of all and combines them itself, in one collective for
all types; beyond, one all-reduce a type moves less."""


@overload
def all_reduce(
    obj: torch.Tensor,
    op: str = "sum",
    implementation: str = "torch",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor: ...
@overload
def all_reduce(
    obj: float,
    op: str = "sum",
    implementation: str = "torch",
    group: dist.ProcessGroup | None = None,
) -> float: ...
@overload
def all_reduce(
    obj: D, op: str = "sum", implementation: str = "torch", group: dist.ProcessGroup | None = None
) -> D: ...
@overload
def all_reduce(
    obj: Any, op: str = "sum", implementation: str = "torch", group: dist.ProcessGroup | None = None
) -> Any: ...
def all_reduce(
    obj: Any, op: str = "sum", implementation: str = "torch", group: dist.ProcessGroup | None = None
) -> Any:
    """Combine numbers, tensors and arrays over all ranks; every rank gets the result.

    Collective: every rank calls this, with the same operation, keys, shapes and dtypes;
    ranks that differ are named on every rank, by rank, key and source line, and the group
    can be used further. The argument is not changed. NaN on any rank gives NaN. No gradient
    flows through it: a tensor with ``requires_grad`` is warned about, once.

    Numbers and small tensors, also a dict of up to 27 numbers, need a single collective; what
    is larger a second one; tensors beyond 64 KiB over all ranks one for each type in which they
    travel: float32 (with 16-bit floats and complex64), float64 (with complex128) and int64 (all
    integers). The host waits for the device.

    Args:
        obj: An int of at most 64 bits, a float, a numpy scalar; a dense tensor of any shape
            on the host or this rank's device, or a numpy array, of floats or complex numbers
            from 16 to 128 bits, or of ints to 64 bits (no bools, no unsigned ones beyond
            uint8); or a dict of these, also of dicts, with strings or ints for keys.
        op: ``"sum"``, ``"mean"`` (or ``"avg"``), ``"min"``, ``"max"`` or ``"product"``. The
            mean of ints is a float; the mean of an integer tensor is refused.
        implementation: ``"torch"``; or ``"mpi"``, over MPI and host memory, on all ranks only.
        group: torch's group of which this rank is a member; None: all ranks.

    Returns:
        The same kind as ``obj``. A number for a number: an int where every rank gave an int
        (of any size: nothing overflows), else a float, summed exactly. A new tensor of the
        same shape, dtype and device for a tensor; its integers wrap around as torch's do. A
        dict with the keys in this rank's order.

    Raises:
        CollectiveError: Another rank cannot take part.
        HangError: Not every rank came in time.
        MismatchError: The ranks called different things.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        OverflowError: An int of more than 64 bits.
        TypeError: ``obj`` is something else, or ``group`` no group.
        ValueError: ``op`` or ``implementation`` is unknown, ``op`` is not defined for a dtype,
            or this rank is not in ``group``.
    """
    members = find_members("all_reduce()", group)
    channel = find_channel("all_reduce()", implementation, members, group)
    try:
        parcel = _Parcel(obj, _known(op))
        if channel is not None:
            parcel.load(channel)
    except Exception as error:
        # Whatever it is, a device out of memory too: the others must not wait for it.
        if channel is not None:
            exchange(Call("all_reduce()"), channel, refusal=error)
        raise
    return refold(obj, iter(parcel.alone() if channel is None else parcel.combine(channel)))


def _known(op: str) -> str:
    if op not in (*OPS, "avg"):
        raise ValueError(f"op {op!r}; expected one of {', '.join(OPS)}")
    return "mean" if op == "avg" else op


class _Parcel:
    """What one rank brings: leaves, those that are numbers, and those that are tensors."""

    def __init__(self, obj: object, op: str) -> None:
        self._op = op
        self._keys, self._leaves = unfold(obj)
        self._kinds: list[str] = []
        self._numbers: dict[int, int | float] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._flats: list[tuple[list[int], _values.Flat]] = []
        self._packed = b""
        self._together = True
        for at, leaf in enumerate(self._leaves):
            try:
                self._kinds.append(self._take(at, leaf))
            except (OverflowError, TypeError, ValueError) as error:
                key = self._keys[at]
                raise type(error)(f"{error}; it is at key {key}" if key else str(error)) from error

    def _take(self, at: int, leaf: object) -> str:
        number = _values.as_number(leaf)
        if number is not None:
            self._numbers[at] = number
            return "number"
        tensor = _values.as_tensor(leaf, self._op)
        if tensor is not None:
            self._tensors[at] = tensor
            return _values.kind(tensor)
        if isinstance(leaf, dict):  # an empty one
            return "{}"
        raise TypeError(
            f"all_reduce of {type(leaf).__name__}; expected an int, a float or a tensor, a numpy "
            "array, or a dict of these"
        )

    def alone(self) -> list[Any]:
        """Return the results of one rank."""
        done = self._leaves.copy()
        for at, number in self._numbers.items():
            done[at] = _values.like(done[at], _values.combine([number], self._op))
        for at, tensor in self._tensors.items():
            result = tensor.resolve_conj().clone(memory_format=torch.contiguous_format)
            done[at] = _values.tensor_like(done[at], result)
        return done

    def load(self, channel: Channel) -> None:
        """Bring everything into the form in which it travels: all that can fail on one rank."""
        self._packed = _values.pack(list(self._numbers.values()))
        if not self._tensors:
            return
        self._flats = _values.flatten(self._tensors, self._op)
        total = len(self._packed) + sum(flat.nbytes for _, flat in self._flats)
        self._together = total <= ROOM or total * len(channel.ranks) <= _GATHERED
        for _, flat in self._flats:
            flat.load(torch.device("cpu") if self._together else channel.where)
        if self._together:
            self._packed = b"".join([self._packed, *(flat.raw() for _, flat in self._flats)])

    def combine(self, channel: Channel) -> list[Any]:
        """Return the results of all ranks. Collective: every rank of the channel calls this."""
        call = Call("all_reduce", self._op, tuple(zip(self._keys, self._kinds, strict=True)))
        every = self._swap(channel, call)
        if not self._together:
            # All of them first: what fails on one rank only must not come between.
            for _, flat in self._flats:
                if flat.elements:
                    op = "sum" if self._op == "mean" else self._op
                    channel.reduce(flat.data, op, summary(call)[1])
        done = self._leaves.copy()
        count = len(self._numbers)
        if count:
            results = _values.combine_packed(every, count, self._op)
            for at, number in zip(self._numbers, results, strict=True):
                done[at] = _values.like(done[at], number)
        start = _values.SIZE * count
        for places, flat in self._flats:
            if self._together:
                end = start + flat.nbytes
                flat.combine_rows([one[start:end] for one in every])
                start = end
            for at, result in zip(places, flat.results(len(channel.ranks)), strict=True):
                done[at] = _values.tensor_like(done[at], result)
        return done

    def _swap(self, channel: Channel, call: Call) -> list[bytearray]:
        """Return what each rank has packed: from the exchange, where there was room in it."""
        length, ranks = len(self._packed), range(len(channel.ranks))
        if length <= ROOM:
            every = exchange(call, channel, self._packed)
            return [payload_of(place, every) for place in ranks]
        exchange(call, channel)
        every = channel.gather(bytearray(self._packed), summary(call)[1])
        return [every[place * length : (place + 1) * length] for place in ranks]
