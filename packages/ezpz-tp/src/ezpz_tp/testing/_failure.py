"""What a rank that failed leaves behind."""

from __future__ import annotations

import traceback

from ezpz_tp._errors import ParallelError

MARGIN = 5.0
"""Seconds more for a collective than for the call, so that a hang is reported by the latter."""


class RankError(ParallelError):
    """A rank ended without a word, or raised what cannot be sent to another process."""


def with_rank(error: BaseException, rank: int, world_size: int, text: str = "") -> BaseException:
    """Note on an error which rank raised it, and its traceback there when given as text."""
    note = f"raised by rank {rank} of {world_size}"
    error.add_note(f"{note}:\n{text}" if text else note)
    return error


def release_frames(error: BaseException) -> None:
    """Let go of everything that the frames of a traceback hold; its lines stay."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__]


def not_in_time(timeout: float, world_size: int, where: dict[int, str]) -> TimeoutError:
    """The error for ranks that did not finish; ``where`` is the stack of each."""
    ranks = ", ".join(map(str, where))
    stacks = "".join(f"\nrank {rank}:\n{stack}" for rank, stack in where.items())
    return TimeoutError(
        f"of {world_size} ranks, {ranks} did not finish within {timeout:g} s. Either a collective "
        "that some ranks call and others do not, or timeout= is too short. They stood at:" + stacks
    )
