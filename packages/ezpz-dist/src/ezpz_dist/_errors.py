"""The error tree of ezpz_dist, and ranks as people write them: those alike together, folded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class DistError(Exception):
    """Base of every error that ezpz_dist raises on purpose."""


class SetupError(DistError):
    """The ranks could not be brought together, or set-up was called in contradiction."""


class NotSetUpError(DistError):
    """A collective was called in a world of several ranks before `setup_torch`."""


class WrapError(DistError):
    """A model cannot be wrapped as requested."""


class CheckpointError(DistError):
    """A checkpoint cannot be written, or none that is complete and fits can be read."""


class DataError(DistError):
    """Data cannot be shared out or read as requested."""


class CollectiveError(DistError):
    """A collective did not come about.

    Attributes:
        ranks: The ranks that it is about: those that are missing, or that differ.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(ranks)


class MismatchError(CollectiveError):
    """The ranks called different operations, or with different shapes, types or keys."""


class HangError(CollectiveError):
    """Ranks did not come to a collective in time."""


class LostRankError(CollectiveError):
    """Ranks have ended, or stopped, while others wait for them."""


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, in the order in which they come."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def fold(ranks: Iterable[int]) -> str:
    """Return ranks as people write them: ``"0, 2-5"``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
