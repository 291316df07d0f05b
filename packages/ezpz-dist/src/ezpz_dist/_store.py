"""Keys of a store that others will set: which of them are there, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed import (  # type: ignore[attr-defined]  # torch exports them so
    DistNetworkError,
    DistStoreError,
    Store,
)

T = TypeVar("T")

LOST = (DistNetworkError, DistStoreError)
"""What torch raises where the store's server is gone, stopped, or has no such key in time."""

_FIRST, _LONGEST = 0.1e-3, 0.05


def within(seconds: float, ask: Callable[[], T]) -> T:
    """Return what a function answers that talks to a store, or raise if it takes longer.

    A server whose process is stopped accepts connections and never answers; neither connecting
    to it nor most requests have a time-out of their own (torch 2.13). The thread that waits for
    it is left behind.

    Raises:
        torch.distributed.DistStoreError: There was no answer in that time.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        # Whatever it is, the caller's thread raises it.
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run, name="ezpz-asks", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise DistStoreError(f"the store did not answer in {seconds:g} s")
    return answers[0]


def arrived(store: Store, keys: Sequence[str], seconds: float) -> list[str]:
    """Return those keys that are there, once all are or the time is over.

    It asks again and again: a `Store.wait` that times out writes two lines of torch's own to
    standard error. The server must have shown that it answers: asked for a key's presence, a
    stopped one is waited for without end (torch 2.13).
    """
    deadline = time.monotonic() + seconds
    pause = _FIRST
    while keys and not store.check(list(keys)):
        left = deadline - time.monotonic()
        if left <= 0:
            return _present(store, keys)
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST)
    return list(keys)


def _present(store: Store, keys: Sequence[str]) -> list[str]:
    # Halving: few are missing among many.
    if not keys or store.check(list(keys)):
        return list(keys)
    if len(keys) == 1:
        return []
    half = len(keys) // 2
    return [*_present(store, keys[:half]), *_present(store, keys[half:])]
