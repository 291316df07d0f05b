"""Whole numbers as people list them: cores and ranks as ``4-7``, or ``0-7,104-111``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ezpz_launch._errors import UsageError

# As many as there can be, and few enough that a slip of the finger fills no memory.
_RANGE = r"([0-9]{1,6})(?:-([0-9]{1,6}))?"


def read_cores(text: str) -> list[int]:
    """Return the cores of a list of ranges.

    Raises:
        UsageError: It does not parse, or a range is reversed.
    """
    return read_ranges(text, "cores", "0-7,104-111")


def read_ranges(text: str, what: str, example: str) -> list[int]:
    """Return the numbers of a list of ranges.

    Args:
        text: The list.
        what: What they are, for the error.
        example: How they are written, for the error.

    Raises:
        UsageError: It does not parse, or a range is reversed.
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(_RANGE, part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if high < low:
            raise UsageError(f"{what} {text!r}: {part!r}; expected ranges such as {example}")
        numbers += range(low, high + 1)
    return numbers


def count_cores(text: str) -> int:
    """Return the number of cores of a list of ranges."""
    return len(set(read_cores(text)))


def mask_of(text: str) -> str:
    """Return the mask of a list of ranges: ``0xf0`` for ``4-7``."""
    mask = 0
    for core in read_cores(text):
        mask |= 1 << core
    return hex(mask)


def fold_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as ranges: ``0,4-7``."""
    ranges: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
