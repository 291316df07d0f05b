"""Rows of text as a table."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest


def align_columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return lines whose cells stand below each other; columns in ``right`` end alike."""
    columns = []
    for number, column in enumerate(zip_longest(*rows, fillvalue="")):
        width = max(map(len, column))
        justify = str.rjust if number in right else str.ljust
        columns.append([justify(cell, width) for cell in column])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
