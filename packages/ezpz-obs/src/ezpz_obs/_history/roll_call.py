"""Which ranks are missing, asked of the others through torch's store after a failure."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

_SECONDS = 2.0
"""For the others to fail too, and say so."""

_HEARD = 1.0
"""For the others to read what one of them has found."""

_EACH = 64
"""Up to so many ranks each asks for itself. Of more, the first to come asks for all: one server
answers them, and thousands would ask it for thousands of keys."""

_AT_ONCE = 1024
"""Keys in one request: a server's time for one grows with the square (torch 2.13)."""

_SHOWN = 8


def call_roll(dist: Any, name: str, rank: int, ranks: int) -> tuple[list[int], int] | str:
    """Say in the store that this rank is here, and return the ranks that do not.

    Returns:
        The first missing ranks, and how many there are; or, where the store does not answer, a
        sentence that says so.
    """
    found: list[tuple[list[int], int]] = []

    def ask() -> None:
        # The store of the rendezvous; the function is private and old, and the only way to it.
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # noqa: SLF001
        store.set(str(rank), "here")
        if ranks <= _EACH:
            found.append(look(store))
            return
        if int(store.compare_set("asks", "", str(rank))) == rank:
            store.set("missing", json.dumps(look(store)))
        store.wait(["missing"], timedelta(seconds=_SECONDS + _HEARD))
        shown, count = json.loads(store.get("missing"))
        found.append((shown, count))
        heard = store.add("heard", 1)
        until = time.monotonic() + _HEARD
        # Rank 0 may hold the store, and may be about to end.
        while rank == 0 and heard < ranks - count and time.monotonic() < until:
            time.sleep(0.02)
            heard = store.add("heard", 0)

    def look(store: Any) -> tuple[list[int], int]:
        until = time.monotonic() + _SECONDS
        missing: Sequence[int] = [other for other in range(ranks) if other != rank]
        while missing and time.monotonic() < until:
            missing = _missing(store, missing)
            time.sleep(0.05 if missing else 0)
        return list(missing[:_SHOWN]), len(missing)

    def ask_quietly() -> None:
        try:
            ask()
        except RuntimeError:
            return  # the store is gone with the rank that held it: that is the answer

    # A request to a server that was stopped has no time-out of torch's: so in a thread.
    thread = threading.Thread(target=ask_quietly, name="ezpz_obs roll call", daemon=True)
    thread.start()
    thread.join(2 * _SECONDS)
    if not found:
        return "torch's store does not answer, so the rank that holds it (rank 0) may be gone"
    return found[0]


def _missing(store: Any, ranks: Sequence[int]) -> list[int]:
    """Return those of the ranks that are not there: few among many, so by halving."""
    if len(ranks) <= _AT_ONCE:
        if store.check([str(rank) for rank in ranks]):
            return []
        if len(ranks) == 1:
            return [ranks[0]]
    half = len(ranks) // 2
    return [*_missing(store, ranks[:half]), *_missing(store, ranks[half:])]
