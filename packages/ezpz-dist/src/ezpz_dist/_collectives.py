"""Collectives that are the same under every launcher, and in a world of one."""

from __future__ import annotations

import logging
import math
import operator
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from ezpz_device import find_clock, get_torch_device

from . import _members, _objects
from ._errors import CollectiveError, grouped
from ._members import Call, Members, exchange
from ._mpi import find_channel
from ._world import find_world

logger = logging.getLogger(__name__)


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
    clock = find_clock(device, synchronize=True)
    assert clock is not None  # of a device that is given there is one
    clock.mark()


_CALL = Call("barrier()")
LONGEST = 1e9  # seconds: 30 years; torch's clocks overflow not far beyond, and would not wait


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
    members = _members.find_members("barrier()", group)
    channel = find_channel("barrier()", implementation, members, group)
    if timeout is not None and not 0 < timeout <= LONGEST:
        said = f"expected seconds, more than 0 and at most {LONGEST:g}, or None"
        exchange(_CALL, channel, refusal=ValueError(f"timeout {timeout!r}; {said}"))
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
        HangError, MismatchError, NotSetUpError: As of `barrier`.
        TypeError: ``root`` is no int, or ``group`` no group.
        ValueError: ``root`` is no rank of the group, or this rank is not in it.
    """
    members = _members.find_members("broadcast()", group)
    call = Call(f"broadcast(root={root!r})")
    try:
        root = _checked(root, members)
        call = Call(f"broadcast(root={root})")  # one of numpy's ints has another repr
        sends = members is not None and members.ranks[members.place] == root
        payload, data = _packed(obj) if sends else (b"", None)
    except Exception as error:  # whatever it is: the others must not wait for it
        exchange(call, members, refusal=error)
        raise
    if members is None:
        return own_result(obj)
    every = exchange(call, members, payload)
    if sends:
        if data is not None:
            members.send(data, root, call.name)
        return own_result(obj)
    payload = bytes(_members.payload_of(members.ranks.index(root), every))
    result: T = _received(payload, root, members, call.name)
    return result


def own_result(obj: T) -> T:
    """Return what a rank gets of its own object: the object, a tensor without its graph."""
    if not isinstance(obj, Tensor):
        return obj
    if obj.grad_fn is not None:  # a parameter is broadcast for its value
        _warn_of_gradient("broadcast()")
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


def _packed(obj: object) -> tuple[bytes, Tensor | None]:
    """Return what goes into the exchange, and what follows it: uint8 [bytes]."""
    obj = own_result(obj)
    if isinstance(obj, Tensor) and _objects.is_plain(obj) and obj.nbytes > _members.ROOM - 100:
        header = _HEADER.pack(_TENSOR, obj.nbytes) + pickle.dumps(_objects.about(obj))
        if len(header) <= _members.ROOM:  # one of dozens of axes has no room for them
            return header, _objects.as_bytes(obj)
    raw = _objects.dump(obj)
    if len(raw) + _HEADER.size <= _members.ROOM:
        return _HEADER.pack(_INSIDE, len(raw)) + raw, None
    return _HEADER.pack(_AFTER, len(raw)), _objects.as_tensor(raw)


def _received(payload: bytes, root: int, members: Members, what: str) -> Any:
    way, length = _HEADER.unpack_from(payload)
    rest = payload[_HEADER.size :]
    if way == _INSIDE:
        return _objects.load(rest[:length], root)
    try:
        if way == _AFTER:
            raw = bytearray(length)
            data = torch.frombuffer(raw, dtype=torch.uint8)
        else:
            tensor = _objects.empty(*_objects.load(rest, root))
            data = _objects.as_bytes(tensor)
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
    return _objects.load(raw, root) if way == _AFTER else tensor


# Every rank's object on every rank.

_LENGTH = struct.Struct("=Q")
_WASTE = 4  # how many times more than there is may be moved, to move it in one collective


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
        HangError, MismatchError, NotSetUpError, TypeError: As of `barrier`.
        ValueError: This rank is not in ``group``.
    """
    call = Call("all_gather_object()")
    members = _members.find_members(call.name, group)
    if members is None:
        return [own_result(obj)]
    try:
        mine = _objects.dump(own_result(obj))
    except Exception as error:  # whatever it is: the others must not wait for it
        exchange(call, members, refusal=error)
        raise
    room = _members.ROOM - _LENGTH.size
    payload = _LENGTH.pack(len(mine)) + (mine if len(mine) <= room else b"")
    every = exchange(call, members, payload)
    lengths: list[int] = []
    pickles: list[bytearray] = []
    for place in range(len(members.ranks)):
        slot = _members.payload_of(place, every)
        lengths += _LENGTH.unpack_from(slot)
        pickles.append(slot[_LENGTH.size : _LENGTH.size + lengths[-1]])
    longest = max(lengths)
    if room < longest <= _WASTE * sum(lengths) / len(lengths):
        every = members.gather(bytearray(mine).ljust(longest, b"\0"), call.name)
        pickles = [every[at * longest :][:length] for at, length in enumerate(lengths)]
    elif room < longest:
        # One rank's is far longer than the others': padding to it would need its memory for each.
        pickles = [bytearray(length) for length in lengths]
        pickles[members.place][:] = mine
        for rank, raw in zip(members.ranks, pickles, strict=True):
            members.send(torch.frombuffer(raw, dtype=torch.uint8), rank, call.name)
    return [
        own_result(obj) if place == members.place else _objects.load(raw, members.ranks[place])
        for place, raw in enumerate(pickles)
    ]


# Numbers, tensors, arrays and dicts of them, combined over the ranks.

D = TypeVar("D", bound=dict[Any, Any])

OPS = ("sum", "mean", "min", "max", "product")
_GATHERED = 1 << 16
"""Bytes up to which a rank takes the data of all and combines them itself, in one collective for
all types; beyond, one all-reduce a type moves less."""

Group = dist.ProcessGroup | None


@overload
def all_reduce(
    obj: Tensor, op: str = ..., implementation: str = ..., group: Group = ...
) -> Tensor: ...
@overload
def all_reduce(
    obj: float, op: str = ..., implementation: str = ..., group: Group = ...
) -> float: ...
@overload
def all_reduce(obj: D, op: str = ..., implementation: str = ..., group: Group = ...) -> D: ...
@overload
def all_reduce(obj: Any, op: str = ..., implementation: str = ..., group: Group = ...) -> Any: ...
def all_reduce(
    obj: Any, op: str = "sum", implementation: str = "torch", group: dist.ProcessGroup | None = None
) -> Any:
    """Combine numbers, tensors and arrays over all ranks; every rank gets the result.

    Collective: every rank calls this, with the same operation, keys, shapes and dtypes.
    Ranks that differ are named on every rank, by rank, key and source line, and the group
    can be used further. The argument is not changed. NaN on any rank gives NaN. No gradient
    flows through it: a tensor with ``requires_grad`` is warned about, once.

    Numbers and small tensors, also a dict of up to 27 numbers, need a single collective, and
    larger ones a second. Tensors beyond 64 KiB over all ranks need one for each type in which
    they travel: float32 (16-bit floats and complex64 too), float64 (complex128 too) or int64 (all
    integers). The host waits for the device.

    Args:
        obj: An int of at most 64 bits, a float, a numpy scalar, a dense tensor or a numpy
            array. A tensor has any shape, and is on the host or this rank's device. It has
            floats or complex numbers from 16 to 128 bits, or ints to 64 bits (no bools, no
            unsigned ones beyond uint8). Or a dict of these, also of dicts, with strings or
            ints for keys.
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
        CollectiveError, HangError, MismatchError, NotSetUpError: As of `barrier`.
        OverflowError: An int of more than 64 bits.
        TypeError: ``obj`` is something else, or ``group`` no group.
        ValueError: ``op`` or ``implementation`` is unknown, ``op`` is not defined for a dtype,
            or this rank is not in ``group``.
    """
    members = _members.find_members("all_reduce()", group)
    channel = find_channel("all_reduce()", implementation, members, group)
    try:
        if op not in (*OPS, "avg"):
            raise ValueError(f"op {op!r}; expected one of {', '.join(OPS)}")
        summands = _Summands(obj, "mean" if op == "avg" else op)
        if channel is not None:
            summands.load(channel)
    except Exception as error:  # a device out of memory too: the others must not wait for it
        exchange(Call("all_reduce()"), channel, refusal=error)
        raise
    results = summands.alone() if channel is None else summands.combine(channel)
    return _objects.refold(obj, iter(results))


class _Summands:
    """What one rank brings: leaves, those that are numbers, and those that are tensors."""

    def __init__(self, obj: object, op: str) -> None:
        self._op = op
        self._keys, self._leaves = _objects.unfold(obj)
        self._kinds: list[str] = []
        self._numbers: dict[int, int | float] = {}
        self._tensors: dict[int, Tensor] = {}
        self._flats: list[tuple[list[int], Flat]] = []
        self._packed = b""
        self._together = True
        for at, leaf in enumerate(self._leaves):
            try:
                self._kinds.append(self._take(at, leaf))
            except (OverflowError, TypeError, ValueError) as error:
                key = self._keys[at]
                raise type(error)(f"{error}; it is at key {key}" if key else str(error)) from error

    def _take(self, at: int, leaf: object) -> str:
        if (number := as_number(leaf)) is not None:
            self._numbers[at] = number
            return "number"
        if (tensor := as_summand(leaf, self._op)) is not None:
            self._tensors[at] = tensor
            return f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"
        if isinstance(leaf, dict):  # an empty one
            return "{}"
        raise TypeError(
            f"all_reduce of {type(leaf).__name__}; expected an int, a float or a tensor, a numpy "
            "array, or a dict of these"
        )

    def alone(self) -> list[Any]:
        done = self._leaves.copy()
        for at, number in self._numbers.items():
            done[at] = like(done[at], combine([number], self._op))
        for at, tensor in self._tensors.items():
            result = tensor.resolve_conj().clone(memory_format=torch.contiguous_format)
            done[at] = result if isinstance(done[at], Tensor) else result.numpy()
        return done

    def load(self, channel: Members) -> None:
        """Bring everything into the form in which it travels: all that can fail on one rank."""
        self._packed = pack(list(self._numbers.values()))
        if not self._tensors:
            return
        by_type = grouped((_TRAVELS_AS[one.dtype], at) for at, one in self._tensors.items())
        # By name: not in the order in which this rank happens to have them.
        for dtype, places in sorted(by_type.items(), key=lambda item: str(item[0])):
            flat = Flat(dtype, [self._tensors[at] for at in places], self._op)
            self._flats.append((places, flat))
        total = len(self._packed) + sum(flat.nbytes for _, flat in self._flats)
        self._together = total <= _members.ROOM or total * len(channel.ranks) <= _GATHERED
        for _, flat in self._flats:
            flat.load(torch.device("cpu") if self._together else channel.where)
        if self._together:
            raw = (_objects.raw_of(flat.data) for _, flat in self._flats)
            self._packed = b"".join([self._packed, *raw])

    def combine(self, channel: Members) -> list[Any]:
        """Return the results of all ranks. Collective: every rank of the channel calls this."""
        call = Call("all_reduce", self._op, tuple(zip(self._keys, self._kinds, strict=True)))
        length, ranks, what = len(self._packed), len(channel.ranks), _members.summary(call)[1]
        if length <= _members.ROOM:
            slots = exchange(call, channel, self._packed)
            every = [_members.payload_of(place, slots) for place in range(ranks)]
        else:
            exchange(call, channel)
            whole = channel.gather(bytearray(self._packed), what)
            every = [whole[place * length : (place + 1) * length] for place in range(ranks)]
        # All of them first: what fails on one rank only must not come between.
        for _, flat in () if self._together else self._flats:
            if flat.elements:
                channel.reduce(flat.data, "sum" if self._op == "mean" else self._op, what)
        done = self._leaves.copy()
        count = len(self._numbers)
        numbers = combine_packed(every, count, self._op) if count else ()
        for at, number in zip(self._numbers, numbers, strict=True):
            done[at] = like(done[at], number)
        start = _PACKED * count
        for places, flat in self._flats:
            if self._together:
                end = start + flat.nbytes
                flat.combine_rows([one[start:end] for one in every])
                start = end
            for at, result in zip(places, flat.results(ranks), strict=True):
                done[at] = result if isinstance(done[at], Tensor) else result.numpy()
        return done


# Numbers of several ranks, combined exactly and alike on each.

_PACKED = 9  # bytes of a packed number
_FAR = 64  # binary places by which summands are moved where their sum's steps overflow


def as_number(value: object) -> int | float | None:
    """Return an int or a float for a number of Python's or numpy's; None for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        if isinstance(value, numpy.integer):
            number: float = int(value)
        elif isinstance(value, numpy.floating) and value.itemsize <= 8:
            number = float(value)
        else:  # a bool, a complex number, a long double that no float can hold
            return None
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    else:
        number = int(value) if isinstance(value, int) else float(value)
    if isinstance(number, int) and not -(1 << 63) <= number < 1 << 63:
        raise OverflowError(f"all_reduce of {number}; expected an int of at most 64 bits")
    return number


def like(mine: object, result: float) -> Any:
    """Return the result as the kind of number that this rank gave: numpy's dtypes, if it fits."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(mine, numpy.generic):
        return result
    if isinstance(mine, numpy.floating):
        return mine.dtype.type(result)
    if isinstance(result, int):
        limits = numpy.iinfo(mine.dtype)
        return mine.dtype.type(result) if limits.min <= result <= limits.max else result
    return numpy.float64(result)


def pack(numbers: Sequence[int | float]) -> bytes:
    """Return nine bytes a number: first all kinds, so that an int and a float are told apart."""
    kinds = "".join(["q" if isinstance(number, int) else "d" for number in numbers])
    return kinds.encode() + struct.pack(f"={kinds}", *numbers)


def combine_packed(every: Sequence[bytes | bytearray], count: int, op: str) -> list[float]:
    """Return the ``count`` numbers that those at the start of each rank's bytes make."""
    rows = [struct.unpack_from(f"={packed[:count].decode()}", packed, count) for packed in every]
    columns = zip(*rows, strict=True)
    if op not in ("sum", "mean") or any(b"q" in packed[:count] for packed in every):
        return [combine(column, op) for column in columns]
    # What nearly every call is, in a third of the time.
    try:
        totals = list(map(math.fsum, columns))
    except (OverflowError, ValueError):
        return [combine(column, op) for column in zip(*rows, strict=True)]
    return totals if op == "sum" else [total / len(rows) for total in totals]


def combine(numbers: Sequence[int | float], op: str) -> int | float:
    whole = {*map(type, numbers)} == {int}
    if op in ("sum", "mean"):
        share = len(numbers) if op == "mean" else 1
        if not whole:
            return _total(numbers, share)
        return sum(numbers) / share if op == "mean" else sum(numbers)
    if op == "product":  # as floats where one is: that of ints can be too large to become one
        return math.prod(numbers if whole else map(float, numbers))
    if not whole and any(map(math.isnan, numbers)):
        return math.nan
    chosen = min(numbers) if op == "min" else max(numbers)
    return chosen if whole else float(chosen)


def _total(mixed: Sequence[int | float], share: int) -> float:
    # And what is lost where a large int becomes a float.
    lost = [number - int(float(number)) for number in mixed if isinstance(number, int)]
    numbers = [*map(float, mixed), *map(float, lost)]
    try:
        return math.fsum(numbers) / share
    except ValueError:  # infinities of both signs
        return math.nan
    except OverflowError:  # of an intermediate sum, not necessarily of the last
        near = [math.ldexp(number, -_FAR) for number in numbers]
        return math.fsum(near) / share * 2.0**_FAR


# Tensors and arrays as few flat ones, which ranks combine in one go.

_TRAVELS_AS: dict[torch.dtype, torch.dtype] = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.complex64), torch.float32),
    **dict.fromkeys((torch.float64, torch.complex128), torch.float64),
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.int64),
}
"""Three types for all: every backend and MPI has them, and a dict needs few collectives.

Sums of 16-bit floats are made in 32 bits (their mean must not overflow), complex numbers are
pairs of reals, and a sum modulo 2**64 is one modulo 2**8 as well.
"""

DTYPES = tuple(_TRAVELS_AS)  # what `all_reduce` takes, in every world
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul,
}  # fmt: skip


def as_summand(value: object, op: str) -> Tensor | None:
    """Return a detached tensor for a tensor or numpy array; None for anything else."""
    numpy, tensors = sys.modules.get("numpy"), sys.modules.get("torch.distributed.tensor")
    if isinstance(value, Tensor):
        if value.requires_grad:
            _warn_of_gradient("all_reduce()")
        if tensors is not None and isinstance(value, tensors.DTensor):
            raise TypeError(
                "all_reduce of a DTensor, which has collectives of its own; expected a plain "
                "tensor; give its full_tensor() or to_local()"
            )
        tensor = value
    elif numpy is not None and type(value) in (numpy.ndarray, numpy.memmap):
        try:
            # A copy: torch warns of arrays that cannot be written, and refuses negative strides.
            tensor = torch.from_numpy(numpy.array(value, order="C"))
        except TypeError as error:
            raise TypeError(f"all_reduce of a {value.dtype} array: {error}") from error  # type: ignore[attr-defined]
    else:
        return None
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
        raise TypeError(
            f"all_reduce of a {tensor.layout} {tensor.dtype} tensor on {tensor.device}; expected "
            f"a dense one of {', '.join(str(dtype) for dtype in DTYPES)}"
        )
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the mean of a {tensor.dtype} tensor; expected a floating-point one")
    if op not in ("sum", "mean") and tensor.is_complex():
        raise ValueError(f"the {op} of a {tensor.dtype} tensor; expected real numbers")
    return tensor.detach()


_warned = False


def _warn_of_gradient(operation: str) -> None:
    """Warn, once, that no gradient goes through a collective that is given a tensor with one."""
    global _warned
    if _warned or not torch.is_grad_enabled():
        return
    _warned = True
    logger.warning(
        "%s of a tensor with requires_grad returns one without: no gradient flows through it. "
        "Give it tensor.detach() if only the value counts; for the gradient use "
        "torch.distributed._functional_collectives.all_reduce",
        operation,
    )


class Flat:
    """Tensors that travel as one: one after the other, in a type that every backend has."""

    def __init__(self, dtype: torch.dtype, tensors: Sequence[Tensor], op: str) -> None:
        self._dtype, self._tensors, self._op = dtype, tensors, op
        self._ordered = op in ("min", "max") and dtype in _BITS
        pairs = [2 if tensor.is_complex() else 1 for tensor in tensors]
        self._sizes = [t.numel() * pair for t, pair in zip(tensors, pairs, strict=True)]
        devices = {tensor.device for tensor in tensors}
        self._home = devices.pop() if len(devices) == 1 else None
        self.elements = sum(self._sizes)
        self.nbytes = self.elements * dtype.itemsize
        self.data = torch.empty(0)  # [elements]; for a minimum or maximum ints in the floats' order

    def load(self, where: torch.device) -> None:
        # Where they lie, if that is one place: one copy between devices, not one for each.
        self.data = torch.empty(self.elements, dtype=self._dtype, device=self._home or where)
        for part, tensor in zip(
            self.data.split_with_sizes(self._sizes), self._tensors, strict=True
        ):
            real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            part.view(real.shape).copy_(real)
        if self._ordered:
            # Floats compare as their bits do, once those of negative ones are turned over. So a
            # NaN can be made to win: whether one survives a minimum would depend on its rank.
            bits = self.data.view(_BITS[self._dtype])
            limits = torch.iinfo(bits.dtype)
            lost = self.data.isnan()
            bits ^= (bits >> (limits.bits - 1)) & limits.max
            self.data = bits.masked_fill_(lost, limits.min if self._op == "min" else limits.max)
        self.data = self.data.to(where)

    def combine_rows(self, every: Sequence[bytes | bytearray]) -> None:
        """Combine the bytes of all ranks here: by elements, in an order that all ranks share."""
        if not self.elements:
            return
        rows = torch.frombuffer(bytearray(b"".join(every)), dtype=self.data.dtype)
        rows = rows.view(len(every), self.elements)
        combine = _COMBINE["sum" if self._op == "mean" else self._op]
        while len(rows) > 1:
            half = len(rows) // 2
            pairs = combine(rows[:half], rows[half : 2 * half])
            rows = pairs if 2 * half == len(rows) else torch.cat([pairs, rows[2 * half :]])
        self.data = rows[0]

    def results(self, ranks: int) -> list[Tensor]:
        data = self.data
        if self._ordered:
            limits = torch.iinfo(data.dtype)
            data = (data ^ ((data >> (limits.bits - 1)) & limits.max)).view(self._dtype)
        if self._op == "mean":
            data = data / ranks
        if self._home is not None:
            data = data.to(self._home)
        # Parts of one storage would keep, and save, all of it.
        copy = len(self._tensors) > 1
        done = []
        for part, tensor in zip(data.split_with_sizes(self._sizes), self._tensors, strict=True):
            if tensor.is_complex():  # a clone: one may not begin at an odd place of a storage
                shaped = torch.view_as_complex(part.clone().view(*tensor.shape, 2))
            else:
                shaped = part.view(tensor.shape)
            done.append(shaped.to(device=tensor.device, dtype=tensor.dtype, copy=copy))
        return done
