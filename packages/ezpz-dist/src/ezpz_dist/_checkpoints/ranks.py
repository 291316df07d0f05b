"""What ranks tell each other about a checkpoint, so that one's failure is everyone's."""

from __future__ import annotations

import atexit
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
from ezpz_dist._objects import as_tensor, dump, load, raw_of, receive_object, send_object
from ezpz_dist._watch import first_line, waiting
from ezpz_dist._world import World
from ezpz_topo import get_hostname

T = TypeVar("T")

_HOST = torch.device("cpu")

_LISTED = 8  # failures that a message lists


@dataclass(frozen=True, slots=True)
class Failed:
    rank: int
    host: str
    text: str


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
        if self.size == 1:
            return [value]
        # Uneven: sent one by one, so that rank 0 needs no room for the longest of each.
        if self.rank:
            send_object(value, 0, _HOST, self.group)
            return []
        others = range(1, self.size)
        return [value, *(receive_object(rank, _HOST, self.group) for rank in others)]

    def tell(self, value: Any) -> Any:
        """Return rank 0's value on every rank. Collective."""
        if self.size == 1:
            return value
        mine = as_tensor(dump(value) if self.rank == 0 else b"")
        length = torch.tensor([len(mine)])
        dist.broadcast(length, 0, group=self.group)
        room = mine if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(room, 0, group=self.group)
        return value if self.rank == 0 else load(raw_of(room), 0)

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
        odd = next(((rank, each) for rank, each in enumerate(every) if each != every[0]), None)
        found = self.tell(None if odd is None else (*odd, every[0]))
        if found is not None:
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
            return Failed(self.rank, self.hosts[self.rank], text), error

    def _judge(self, what: str, failed: list[Failed], cause: Exception | None) -> None:
        if not failed:
            return
        if self.size == 1:
            text = failed[0].text
        else:
            said = [f"rank {one.rank} on {one.host}: {one.text}" for one in failed[:_LISTED]]
            more = [f"and {len(failed) - _LISTED} more ranks"] if len(failed) > _LISTED else []
            text = "; ".join(said + more)
        raise CheckpointError(f"{what}: {text}") from cause


@contextmanager
def collecting_later() -> Iterator[None]:
    """Put garbage collection off: with 40,000 tensors to list it took half the time."""
    # In the main thread only: another would undo what the training does to it meanwhile.
    if not gc.isenabled() or threading.current_thread() is not threading.main_thread():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
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
        return Ranks()
    if _made is None or _made[0] is not world:
        # Dropped before `cleanup` runs at exit: see there for groups that outlive it.
        atexit.unregister(_forget)
        atexit.register(_forget)
        with waiting("the group for checkpoints", world):
            timeout = timedelta(seconds=world.timeout)
            group = dist.new_group(backend="gloo", timeout=timeout)
        info = world.info
        _made = world, Ranks(world, group, info.rank, info.world_size, world.hosts)
    return _made[1]
