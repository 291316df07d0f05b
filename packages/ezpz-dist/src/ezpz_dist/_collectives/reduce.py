"""Numbers, tensors, arrays and dicts of them, combined over the ranks."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from . import scalars, tensors
from .call import Call, summary
from .exchange import ROOM, Channel, exchange, payload_of
from .leaves import refold, unfold
from .members import find_members
from .over_mpi import find_channel

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
        self._flats: list[tuple[list[int], tensors.Flat]] = []
        self._packed = b""
        self._together = True
        for at, leaf in enumerate(self._leaves):
            try:
                self._kinds.append(self._take(at, leaf))
            except (OverflowError, TypeError, ValueError) as error:
                key = self._keys[at]
                raise type(error)(f"{error}; it is at key {key}" if key else str(error)) from error

    def _take(self, at: int, leaf: object) -> str:
        number = scalars.as_number(leaf)
        if number is not None:
            self._numbers[at] = number
            return "number"
        tensor = tensors.as_tensor(leaf, self._op)
        if tensor is not None:
            self._tensors[at] = tensor
            return tensors.kind(tensor)
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
            done[at] = scalars.like(done[at], scalars.combine([number], self._op))
        for at, tensor in self._tensors.items():
            result = tensor.resolve_conj().clone(memory_format=torch.contiguous_format)
            done[at] = tensors.like(done[at], result)
        return done

    def load(self, channel: Channel) -> None:
        """Bring everything into the form in which it travels: all that can fail on one rank."""
        self._packed = scalars.pack(list(self._numbers.values()))
        if not self._tensors:
            return
        self._flats = tensors.flatten(self._tensors, self._op)
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
            results = scalars.combine_packed(every, count, self._op)
            for at, number in zip(self._numbers, results, strict=True):
                done[at] = scalars.like(done[at], number)
        start = scalars.SIZE * count
        for places, flat in self._flats:
            if self._together:
                end = start + flat.nbytes
                flat.combine_rows([one[start:end] for one in every])
                start = end
            for at, result in zip(places, flat.results(len(channel.ranks)), strict=True):
                done[at] = tensors.like(done[at], result)
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
