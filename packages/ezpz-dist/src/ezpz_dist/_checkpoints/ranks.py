"""Work that all ranks do together, and that fails on all of them together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ezpz_dist._diagnosis import describe_gone
from ezpz_dist._errors import CheckpointError, DistError
from ezpz_dist._objects import receive_object, send_object
from ezpz_dist._watch import first_line, waiting
from ezpz_dist._world import World
from ezpz_topo import get_hostname

T = TypeVar("T")
R = TypeVar("R")

HOST = torch.device("cpu")
MAX_LISTED = 8  # failures that a message lists


@dataclass(frozen=True, slots=True)
class Failure:
    """Why work failed, as it is sent to the other ranks."""

    text: str


def return_none(results: list[Any]) -> None:
    """Combine the results of all ranks to nothing."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that save and load together. A world of one needs no group."""

    world: World | None = None
    group: Any = None
    rank: int = 0
    size: int = 1
    hosts: tuple[str, ...] = field(default_factory=lambda: (get_hostname(),))

    def run_on_all(
        self,
        what: str,
        work: Callable[[], T],
        combine: Callable[[list[T]], R] = return_none,  # type: ignore[assignment]
    ) -> R:
        """Run work on every rank, combine the results on rank 0, and return that on every rank.

        Collective.

        Raises:
            CheckpointError: On every rank: the work failed on some, or combining failed.
        """
        outcome, cause = self._attempt(work, is_named=True)
        outcomes = self._gather(outcome)
        combined: Any = None
        if self.rank == 0:
            combined = join_failures(outcomes)
            if combined is None:
                combined, cause = self._attempt(lambda: combine(cast("list[T]", outcomes)))
        return cast("R", self._share(what, combined, cause))

    def run_on_rank0(self, what: str, work: Callable[[], T]) -> T:
        """Run work on rank 0 and return its result on every rank. Collective.

        Raises:
            CheckpointError: On every rank: the work failed.
        """
        outcome: Any = None
        cause = None
        if self.rank == 0:
            outcome, cause = self._attempt(work)
        return cast("T", self._share(what, outcome, cause))

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Name what this rank waits for, should another not come."""
        if threading.current_thread() is threading.main_thread():
            with waiting(what, self.world):
                yield
            return
        try:
            yield
        except RuntimeError as error:
            raise CheckpointError(
                f"{what} in the background: {describe_gone(MAX_LISTED)} ({first_line(error)}); "
                "expected each rank to go on until it is complete: wait for it before cleanup()"
            ) from error

    def check_equal(self, values: Sequence[Any]) -> None:
        """Raise unless all values equal rank 0's."""
        for rank, value in enumerate(values):
            if value != values[0]:
                raise CheckpointError(
                    f"{self.describe(rank)}{value}; rank 0 has {values[0]}; expected the same on "
                    "every rank"
                )

    def describe(self, rank: int) -> str:
        """Return ``"rank 1 on n1: "``; nothing in a world of one."""
        if self.size == 1:
            return ""
        return f"rank {rank} on {self.hosts[rank]}: "

    def _attempt(
        self, work: Callable[[], T], *, is_named: bool = False
    ) -> tuple[T | Failure, Exception | None]:
        """Return the result of work, or its failure; ``is_named``: always with this rank."""
        try:
            return work(), None
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait
            text = str(error)
            if not isinstance(error, DistError):
                text = describe_error(error)
                is_named = True
            if is_named:
                text = self.describe(self.rank) + text
            return Failure(text), error

    def _gather(self, value: Any) -> list[Any]:
        """Return every rank's value on rank 0; elsewhere nothing."""
        # One by one: rank 0 then needs no room for the longest of each, and lengths differ a lot.
        if self.rank:
            send_object(value, 0, HOST, self.group)
            return []
        others = range(1, self.size)
        return [value, *(receive_object(rank, HOST, self.group) for rank in others)]

    def _share(self, what: str, outcome: Any, cause: Exception | None) -> Any:
        """Return rank 0's outcome on every rank, or raise it there."""
        shared = [outcome]
        if self.size > 1:
            dist.broadcast_object_list(shared, 0, self.group, HOST)
        if isinstance(shared[0], Failure):
            raise CheckpointError(f"{what}: {shared[0].text}") from cause
        return shared[0]


def join_failures(outcomes: list[Any]) -> Failure | None:
    """Return the failures among outcomes as one; None if there are none."""
    texts = [outcome.text for outcome in outcomes if isinstance(outcome, Failure)]
    if not texts:
        return None
    listed = texts[:MAX_LISTED]
    if len(texts) > MAX_LISTED:
        listed.append(f"and {len(texts) - MAX_LISTED} more ranks")
    return Failure("; ".join(listed))


def describe_error(error: Exception) -> str:
    """Return an error in words, with the file that it came from where torch wraps that."""
    origin = error.__cause__ or error.__context__
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(origin, OSError):
        return f"{type(origin).__name__}: {origin} ({text})"
    return text


def find_ranks(world: World | None) -> Ranks:
    """Return the ranks of a world. Collective the first time: it makes their group."""
    if world is None or world.info.world_size == 1:
        return Ranks(world)
    if "ranks" not in world.kept:
        with waiting("the group for checkpoints", world):
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout))
        info = world.info
        world.kept["ranks"] = Ranks(world, group, info.rank, info.world_size, world.hosts)
    return cast("Ranks", world.kept["ranks"])
