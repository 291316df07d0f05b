"""Numbers, tensors, arrays and nested dicts of them, combined over ranks."""

from __future__ import annotations

import logging
import math
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# A dict of dicts as a row of leaves, in an order that does not depend on insertion.


def unfold(obj: object) -> tuple[list[str], list[Any]]:
    """Return keys in words, and a leaf for each; the key is empty where ``obj`` is no dict.

    Raises:
        TypeError: A key is neither a string nor an int: others need not look alike on all ranks.
    """
    if not isinstance(obj, dict):
        return [""], [obj]
    keys: list[str] = []
    leaves: list[Any] = []
    _collect(obj, "", keys, leaves)
    return keys, leaves


def refold(obj: Any, results: Iterator[Any]) -> Any:
    """Return an object like ``obj``, its leaves replaced in `unfold`'s order."""
    if not isinstance(obj, dict):
        return next(results)
    done = dict.fromkeys(obj)
    for key in _order(obj):
        value = obj[key]
        done[key] = refold(value, results) if isinstance(value, dict) and value else next(results)
    return done


def _collect(mapping: dict[Any, Any], above: str, keys: list[str], leaves: list[Any]) -> None:
    for key in _order(mapping):
        if not isinstance(key, (str, int)):
            raise TypeError(f"all_reduce of a dict with the key {key!r}; expected strings or ints")
        value = mapping[key]
        if isinstance(value, dict) and value:
            _collect(value, f"{above}{key!r} > ", keys, leaves)
        else:
            keys.append(f"{above}{key!r}")
            leaves.append(value)


def _order(mapping: dict[Any, Any]) -> list[Any]:
    try:
        return sorted(mapping)
    except TypeError:  # strings and ints
        return sorted(mapping, key=repr)


# Numbers of several ranks, combined exactly and alike on each.

SIZE = 9
"""Bytes of a packed number."""

_PLAIN = (int, float)

_FAR = 64
"""Binary places by which summands are moved where their sum's steps overflow."""


def as_number(value: object) -> int | float | None:
    """Return an int or a float for a number of Python's or numpy's; None for anything else.

    Raises:
        OverflowError: An int of more than 64 bits.
    """
    if type(value) is float:
        return value
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
    """Return the result as the kind of number that this rank gave.

    A numpy scalar keeps its dtype; but an int that does not fit in it becomes a Python int,
    and what is no int any more (a mean) a float64.
    """
    if type(mine) in _PLAIN:
        return result
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
    """Return the ``count`` numbers that those at the start of each rank's bytes make.

    Args:
        every: By rank, what `pack` made, and whatever follows it.
        count: How many numbers each rank packed.
        op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"product"``.
    """
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
    """Return one number for those of all ranks.

    Args:
        numbers: By rank.
        op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"product"``.
    """
    whole = {*map(type, numbers)} == {int}
    if op in ("sum", "mean"):
        share = len(numbers) if op == "mean" else 1
        if not whole:
            return _total(numbers, share)
        return sum(numbers) / share if op == "mean" else sum(numbers)
    if op == "product":
        # As floats where one is: a product of ints can be too large to become one.
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

logger = logging.getLogger(__name__)

_TRAVELS_AS: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.uint8: torch.int64,
    torch.int8: torch.int64,
    torch.int16: torch.int64,
    torch.int32: torch.int64,
    torch.int64: torch.int64,
}
"""Three types for all: every backend and MPI has them, and a dict needs few collectives.

Sums of 16-bit floats are made in 32 bits (their mean must not overflow), complex numbers are
pairs of reals, and a sum modulo 2**64 is one modulo 2**8 as well.
"""

DTYPES = tuple(_TRAVELS_AS)
"""What `all_reduce` takes, in every world."""

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def as_tensor(value: object, op: str) -> Tensor | None:
    """Return a detached tensor for a tensor or numpy array; None for anything else.

    Raises:
        TypeError: It is of a type that cannot be combined.
        ValueError: ``op`` is not defined for it.
    """
    numpy = sys.modules.get("numpy")
    if isinstance(value, Tensor):
        if value.requires_grad:
            tell_of_gradient("all_reduce()")
        tensor = _plain(value)
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


def tell_of_gradient(operation: str) -> None:
    """Warn, once, that no gradient goes through a collective that is given a tensor with one."""
    global _told
    if _told or not torch.is_grad_enabled():
        return
    _told = True
    logger.warning(
        "%s of a tensor with requires_grad returns one without: no gradient flows through it. "
        "Give it tensor.detach() if only the value counts; for the gradient use "
        "torch.distributed._functional_collectives.all_reduce",
        operation,
    )


_told = False  # once a process


def _plain(tensor: Tensor) -> Tensor:
    # If it is not imported, nothing can be one.
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(tensor, module.DTensor):
        raise TypeError(
            "all_reduce of a DTensor, which has collectives of its own; expected a plain tensor; "
            "give its full_tensor() or to_local()"
        )
    return tensor


def kind(tensor: Tensor) -> str:
    """Return ``"float32 [3, 2]"``."""
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"


def tensor_like(mine: Any, result: Tensor) -> Any:
    """Return a tensor as the kind of thing that this rank gave: a tensor, or an array."""
    return result if isinstance(mine, Tensor) else result.numpy()


class Flat:
    """Tensors that travel as one: one after the other, in a type that every backend has.

    Attributes:
        data: Its elements, [elements]; for a minimum or maximum ints in the floats' order.
    """

    def __init__(self, dtype: torch.dtype, tensors: Sequence[Tensor], op: str) -> None:
        """Take the tensors; `load` puts them together."""
        self._dtype, self._tensors, self._op = dtype, tensors, op
        self._ordered = op in ("min", "max") and dtype in _BITS
        pairs = [2 if tensor.is_complex() else 1 for tensor in tensors]
        self._sizes = [t.numel() * pair for t, pair in zip(tensors, pairs, strict=True)]
        devices = {tensor.device for tensor in tensors}
        self._home = devices.pop() if len(devices) == 1 else None
        self.elements = sum(self._sizes)
        self.nbytes = self.elements * dtype.itemsize
        self.data = torch.empty(0)

    def _parts(self, data: Tensor) -> Sequence[Tensor]:
        # The method `split` spends more time in Python than this does in all.
        return [data] if len(self._sizes) == 1 else data.split_with_sizes(self._sizes)

    def load(self, where: torch.device) -> Flat:
        """Put the tensors together on a device."""
        # Where they lie, if that is one place: one copy between devices, not one for each.
        self.data = torch.empty(self.elements, dtype=self._dtype, device=self._home or where)
        for part, tensor in zip(self._parts(self.data), self._tensors, strict=True):
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
        return self

    def raw(self) -> bytearray:
        """Return the loaded elements' bytes."""
        raw = bytearray(self.nbytes)
        if raw:
            torch.frombuffer(raw, dtype=self.data.dtype).copy_(self.data)
        return raw

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
        """Return a tensor like each of those taken, on its device.

        Args:
            ranks: How many ranks there are, for the mean.
        """
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
        for part, tensor in zip(self._parts(data), self._tensors, strict=True):
            shaped = (
                # A clone: complex numbers may not begin at an odd place of a storage.
                torch.view_as_complex(part.clone().view(*tensor.shape, 2))
                if tensor.is_complex()
                else part.view(tensor.shape)
            )
            done.append(shaped.to(device=tensor.device, dtype=tensor.dtype, copy=copy))
        return done


def flatten(tensors: Mapping[int, Tensor], op: str) -> list[tuple[list[int], Flat]]:
    """Return one `Flat` for each type in which they travel, with the numbers of its tensors."""
    found: dict[torch.dtype, list[int]] = {}
    for at, tensor in tensors.items():
        found.setdefault(_TRAVELS_AS[tensor.dtype], []).append(at)
    # By name: not in the order in which this rank happens to have them.
    return [
        (places, Flat(dtype, [tensors[at] for at in places], op))
        for dtype, places in sorted(found.items(), key=lambda item: str(item[0]))
    ]
