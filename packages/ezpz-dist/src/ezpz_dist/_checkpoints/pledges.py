"""The ranks' words, in the store, for where all of them stop to save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # torch exports it so

from ezpz_dist._hangs.watcher import find_watcher, on_notice
from ezpz_dist._store import arrived, within
from ezpz_dist._world import World

T = TypeVar("T")

NEVER = 1 << 62
"""The step of a rank that takes no more steps: all go on, and nothing is saved."""

_ASKING = 20.0
"""Seconds for a request to the store. Its server stands still while torch asks the name service
about somebody's new connection, often for 5 s where that does not answer (torch 2.13)."""


class Pledges:
    """Every rank gives the step that it is in; the largest is where all of them stop.

    A handful of requests a rank, however many ranks there are: maximum and count are kept by
    the store. All methods raise what `_store.LOST` lists where rank 0, which holds the store,
    is gone or does not answer.

    Args:
        name: Unique to one agreement, the same on every rank; the prefix of its keys.
        world: The ranks; None: this one alone.
        hear: Called with each notice that `tell` gets on any rank, in the watcher's thread.
    """

    def __init__(
        self, name: str, world: World | None, hear: Callable[[dict[str, Any]], None]
    ) -> None:
        watcher = find_watcher()
        self._name, self._hear = name, hear
        self._rank, self._size = (
            (0, 1) if world is None else (world.info.rank, world.info.world_size)
        )
        self._board = None if watcher is None else watcher.board
        # Opened now, not in a hurry: torch asks the name service about each connection, on
        # both sides, and that can take seconds (torch 2.13). Nobody else uses it, so that
        # nobody's long wait is in the way.
        self._store: Store = (
            HashStore()
            if world is None or self._board is None
            else self._board.connect(world.timeout)
        )
        self.forget = on_notice(name, hear)

    def tell(self, **notice: Any) -> None:
        """Have ``hear`` called on every rank, this one too."""
        if self._board is None:
            self._hear(notice)
            return
        post, everybody = self._board.post, range(self._board.size)
        self._ask(lambda store: post(store, "notice", everybody, name=self._name, payload=notice))

    def ask(self) -> bool:
        """Ask every rank for its step; return whether this rank is the first to ask."""
        return self._ask(lambda store: store.add(f"{self._name}/asked", 1) == 1)

    def are_asked_for(self) -> bool:
        """Return whether a rank has asked."""
        return self._ask(lambda store: store.add(f"{self._name}/asked", 0) > 0)

    def give(self, step: int) -> int | None:
        """Give this rank's step, once.

        Returns:
            Where to stop, if this was the last rank's and anybody has asked: else they are all
            done with their steps, and need not be told.
        """
        return self._ask(lambda store: self._give(store, step))

    def agree_on_name(self, step: int) -> str:
        """Return what the first rank to say so calls the step at which all stop."""
        key, said = f"{self._name}/step", str(step)
        return self._ask(lambda store: store.compare_set(key, "", said).decode())

    def saved(self) -> bool:
        """Say that this rank has saved; return whether all have."""
        return self._ask(lambda store: store.add(f"{self._name}/saved", 1) == self._size)

    def leave(self) -> None:
        """Say that this rank knows how it ended; rank 0, which holds the store, waits for all."""
        count, every = f"{self._name}/left", f"{self._name}/all-left"
        if self._ask(lambda store: store.add(count, 1)) == self._size:
            self._ask(lambda store: store.set(every, ""))
        if self._rank == 0:
            arrived(self._store, [every], _ASKING)

    def _give(self, store: Store, step: int) -> int | None:
        key = f"{self._name}/largest"
        largest = store.compare_set(key, "", str(step))
        while int(largest) < step:
            largest = store.compare_set(key, largest.decode(), str(step))
        last = store.add(f"{self._name}/given", 1) == self._size
        if not last or store.add(f"{self._name}/asked", 0) == 0:
            return None
        return int(store.get(key))

    def _ask(self, request: Callable[[Store], T]) -> T:
        """Return the store's answer; soon, even where its process is stopped."""
        return within(_ASKING, lambda: request(self._store))
