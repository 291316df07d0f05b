"""Records of a History without a folder, in memory: 8 bytes a number."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from ezpz_obs._records.numbers import as_float


class Kept:
    """Records by the names they have, one double after the other.

    A million records of ten metrics take 96 MB. Integers beyond 2^53 are rounded.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._runs: list[tuple[tuple[str, ...], array[float]]] = []
        self._values: array[float] = array("d")

    def put(self, record: Mapping[str, Any]) -> None:
        """Keep one record."""
        names = tuple(record)
        if names != self._names:
            self._names, self._values = names, array("d")
            self._runs.append((names, self._values))
        self._values.extend([as_float(value) for value in record.values()])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Give the records in order; every metric is a float here."""
        for names, values in self._runs:
            width = len(names)
            for start in range(0, len(values), width):
                record: dict[str, Any] = dict(
                    zip(names, values[start : start + width], strict=True)
                )
                record["step"] = int(record["step"])
                yield record
