"""Cores as people write them: ``4-7``, or ``0-7,104-111``."""

from __future__ import annotations

import re

from ._errors import UsageError

_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def read_cores(text: str) -> list[int]:
    """Return the cores of a list of ranges.

    Raises:
        UsageError: It does not parse, or a range is reversed.
    """
    cores: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if high < low:
            raise UsageError(f"cores {text!r}: {part!r}; expected ranges such as 0-7,104-111")
        cores += range(low, high + 1)
    return cores


def count_cores(text: str) -> int:
    """Return the number of cores of a list of ranges."""
    return len(read_cores(text))


def mask_of(text: str) -> str:
    """Return the mask of a list of ranges: ``0xf0`` for ``4-7``."""
    return hex(sum(1 << core for core in set(read_cores(text))))
