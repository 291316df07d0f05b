"""What ranks tell each other about a checkpoint, so that one's failure is everyone's."""

from __future__ import annotations

import gc
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
from ezpz_dist._world import World, finish_before_leaving
from ezpz_topo import get_hostname

T = TypeVar("T")

_HOST = torch.device("cpu")
_LISTED = 8  # failures that a message lists


class Failed(str):
    """What kept a rank from its work: who, where and why, in words."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that save and load together; a world of one needs no group."""

    world: World | None = None
    group: Any = None
    rank: int = 0
    size: int = 1
    hosts: tuple[str, ...] = field(default_factory=lambda: (get_hostname(),))

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on rank 0; elsewhere nothing. Collective."""
        # Uneven: sent one by one, so that rank 0 needs no room for the longest of each.
        if self.rank:
            send_object(value, 0, _HOST, self.group)
            return []
        others = range(1, self.size)
        return [value, *(receive_object(rank, _HOST, self.group) for rank in others)]

    def tell(self, value: Any) -> Any:
        """Return rank 0's value on every rank. Collective."""
        told = [value]
        if self.size > 1:
            dist.broadcast_object_list(told, 0, self.group, _HOST)
        return told[0]

    def deal(self, values: Sequence[Any]) -> Any:
        """Return this rank's of rank 0's values, one a rank. Collective."""
        if self.rank:
            return receive_object(0, _HOST, self.group)
        for rank in range(1, self.size):
            send_object(values[rank], rank, _HOST, self.group)
        return values[0]

    def everywhere(self, what: str, work: Callable[[], T]) -> list[T]:
        """Do something on every rank; return every rank's result on rank 0. Collective."""
        mine, error = self._attempt(work)
        outcomes = self.gather(mine)
        self._judge(what, self.tell([each for each in outcomes if isinstance(each, Failed)]), error)
        return cast("list[T]", outcomes)

    def here(self, what: str, work: Callable[[], T]) -> T:
        """Do something on every rank; return this rank's result. Collective."""
        held: list[T] = []
        self.everywhere(what, lambda: held.append(work()))
        return held[0]

    def first(self, what: str, work: Callable[[], T]) -> T:
        """Do something on rank 0; return its result on every rank. Collective."""
        mine, error = self._attempt(work) if self.rank == 0 else (None, None)
        found = self.tell(mine)
        self._judge(what, [found] if isinstance(found, Failed) else [], error)
        return cast("T", found)

    def first_for_each(self, what: str, work: Callable[[], Sequence[T]]) -> T:
        """Do something on rank 0 that gives each rank something of its own. Collective."""
        mine, error = self._attempt(work) if self.rank == 0 else (None, None)
        failed = isinstance(mine, Failed)
        found = self.deal([mine] * self.size if failed else cast("Sequence[T]", mine))
        self._judge(what, [found] if isinstance(found, Failed) else [], error)
        return cast("T", found)

    def same(self, what: str, value: Any) -> None:
        """Make sure that every rank gave the same, or say both values on all. Collective."""
        every = self.gather(value)
        odd = next((rank for rank, each in enumerate(every) if each != every[0]), 0)
        if found := self.tell(odd and (odd, every[odd], every[0])):
            rank, other, first = found
            raise CheckpointError(
                f"{what}: rank {rank} on {self.hosts[rank]} has {other} and rank 0 {first}; "
                "expected the same on every rank"
            )

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Name what the main thread waits in, should a rank not come; for others say it plainly."""
        if threading.current_thread() is threading.main_thread():
            with waiting(what, self.world):
                yield
            return
        try:
            yield
        except RuntimeError as error:
            raise CheckpointError(
                f"{what} in the background: {describe_gone(_LISTED)} ({first_line(error)}); "
                "expected each rank to go on until it is complete: wait for it before cleanup()"
            ) from error

    def _attempt(self, work: Callable[[], T]) -> tuple[T | Failed, Exception | None]:
        try:
            return work(), None
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for word
            text = str(error) if isinstance(error, DistError) else _words(error)
            who = f"rank {self.rank} on {self.hosts[self.rank]}: " if self.size > 1 else ""
            return Failed(who + text), error

    def _judge(self, what: str, failed: list[Failed], cause: Exception | None) -> None:
        if failed:
            more = [f"and {len(failed) - _LISTED} more ranks"] if len(failed) > _LISTED else []
            raise CheckpointError(f"{what}: {'; '.join([*failed[:_LISTED], *more])}") from cause


@contextmanager
def collecting_later() -> Iterator[None]:
    """Put garbage collection off: with 40,000 tensors to list it took half the time."""
    # In the main thread only: another would undo what the training does to it meanwhile.
    if later := gc.isenabled() and threading.current_thread() is threading.main_thread():
        gc.disable()
    try:
        yield
    finally:
        if later:
            gc.enable()


def _words(error: BaseException) -> str:
    """Return an error in words, with its cause: torch wraps what a file raised."""
    origin = error.__cause__ or error.__context__
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"{_words(origin)} ({text})" if isinstance(origin, OSError) else text


_made: tuple[World, Ranks] | None = None


def _forget() -> None:
    global _made
    _made = None


def ranks_of(world: World | None) -> Ranks:
    """Return the ranks of a world. Collective the first time: it makes their group."""
    global _made
    if world is None or world.info.world_size == 1:
        return Ranks(world)
    if _made is None or _made[0] is not world:
        finish_before_leaving(_forget)  # see `cleanup` for groups that outlive it
        with waiting("the group for checkpoints", world):
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout))
        info = world.info
        _made = world, Ranks(world, group, info.rank, info.world_size, world.hosts)
    return _made[1]
