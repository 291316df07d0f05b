"""The name that `ezpz.DataLoader` with one reader had before."""

from __future__ import annotations

from typing import Any, TypeVar

import ezpz_dist

T_co = TypeVar("T_co", covariant=True)


class DataLoader(ezpz_dist.DataLoader[T_co]):
    """`ezpz.DataLoader` with ``one_reader=True``, and otherwise the same: prefer that name."""

    def __init__(self, *args: Any, one_reader: bool = True, **more: Any) -> None:
        super().__init__(*args, one_reader=one_reader, **more)
