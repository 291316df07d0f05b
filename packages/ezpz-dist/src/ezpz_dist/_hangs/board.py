"""The side store: what ranks tell each other when something is wrong, and nothing before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it so

from ezpz_dist._store import LOST, set_all, within

EVENTS = "events"
FOREVER = timedelta(days=3650)

_HELD = 0.3
"""Seconds after which the main thread's connection is taken to be in a long request of its."""


@dataclass(frozen=True, slots=True)
class Board:
    """Keys under which the ranks of one set-up leave events and answers.

    A rank waits for its own key; an event is put into the log, then those whom it concerns
    are woken by theirs. A store's client serves one caller at a time, so that the watcher,
    which sleeps in a request, has a connection of its own.

    Attributes:
        rank: This rank.
        hosts: By rank, the name of its host.
        store: The main thread's connection.
        connect: Makes a connection whose requests wait so many seconds; raises
            `torch.distributed.DistNetworkError` or ``DistStoreError``.
        holder: Process and PID namespace of rank 0, which holds the store.
    """

    rank: int
    hosts: Sequence[str]
    store: Store
    connect: Callable[[float], Store]
    holder: tuple[int, int] = (0, 0)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.hosts)

    def reach(self) -> Store:
        """Return a connection that answers: the main thread's, or a new one where that is held.

        A new one can take seconds, because torch asks the name service about it, on both
        sides, and where that does not answer the server stands still meanwhile (torch 2.13).
        To be used inside `within`: a stopped server is waited for without end.

        Raises:
            torch.distributed.DistNetworkError: Rank 0, which holds the store, is gone; or
                ``DistStoreError``: it does not answer.
        """
        try:
            within(_HELD, lambda: self.store.add(EVENTS, 0))
        except LOST:
            return self.connect(1.0)
        return self.store

    def post(self, store: Store, kind: str, wake: Iterable[int] | None = None, **event: Any) -> int:
        """Put an event into the log and wake the ranks it is for; return its number.

        Args:
            store: A connection.
            kind: What happened.
            wake: Ranks; default: all but this one.
            event: JSON-able details.
        """
        number = store.add(EVENTS, 1)
        store.set(_event(number), json.dumps({"kind": kind, "from": self.rank, **event}))
        others = (rank for rank in range(self.size) if rank != self.rank)
        set_all(store, [_wake(rank) for rank in (others if wake is None else wake)], "!")
        return number

    def events_after(self, store: Store, seen: int) -> list[dict[str, Any]]:
        """Return the events after the first ``seen``, in order."""
        last = store.add(EVENTS, 0)
        # An event is announced a moment before it can be read: `get` waits for it.
        return [json.loads(store.get(_event(number))) for number in range(seen + 1, last + 1)]

    def sleep(self, store: Store) -> None:
        """Wait until this rank is woken; nothing is sent meanwhile."""
        store.wait([_wake(self.rank)], FOREVER)
        store.delete_key(_wake(self.rank))

    def wake_myself(self, store: Store) -> None:
        """End this rank's `sleep`."""
        store.set(_wake(self.rank), "!")


def _event(number: int) -> str:
    return f"event/{number}"


def _wake(rank: int) -> str:
    return f"wake/{rank}"
