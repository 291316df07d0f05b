"""Which ranks are missing, asked of the others through torch's store after a failure."""

from __future__ import annotations

import threading
import time
from typing import Any

_SECONDS = 2.0
"""For the others to fail too, and say so."""


def call_roll(dist: Any, name: str, rank: int, ranks: int) -> list[int] | str:
    """Say in the store that this rank is here, and return the ranks that do not.

    Returns:
        The missing ranks; or, where the store does not answer, a sentence that says so.
    """
    found: list[list[int]] = []

    def ask() -> None:
        # The store of the rendezvous; the function is private and old, and the only way to it.
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # noqa: SLF001
        store.set(str(rank), "here")
        until = time.monotonic() + _SECONDS
        missing = [other for other in range(ranks) if other != rank]
        while missing and time.monotonic() < until:
            missing = [other for other in missing if not store.check([str(other)])]
            time.sleep(0.05 if missing else 0)
        found.append(missing)

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
