"""Numbers of several ranks, combined exactly and alike on each."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from typing import Any

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
