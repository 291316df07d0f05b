"""Keys of a store that others will set: which of them are there, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
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

_AT_ONCE = 1024
"""Keys in one request: a server reads a request anew with each piece that comes of it, so that one
of 120,960 keys takes 0.9 s of its time, and in parts 0.03 s (torch 2.13, libuv)."""


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
    while not _all_there(store, keys):
        left = deadline - time.monotonic()
        if left <= 0:
            return _present(store, keys)
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST)
    return list(keys)


def values(store: Store, keys: Sequence[str]) -> list[bytes]:
    """Return the values of many keys, waiting for those that are not there yet.

    Raises:
        torch.distributed.DistStoreError: One is not there in the store's time.
    """
    return [value for part in _parts(keys) for value in store.multi_get(part)]


def set_all(store: Store, keys: Sequence[str], value: str) -> None:
    """Give many keys one value."""
    for part in _parts(keys):
        store.multi_set(part, [value] * len(part))  # type: ignore[attr-defined]  # not in its stub


def _all_there(store: Store, keys: Sequence[str]) -> bool:
    return all(store.check(part) for part in _parts(keys))


def _parts(keys: Sequence[str]) -> Iterator[list[str]]:
    return (list(keys[at : at + _AT_ONCE]) for at in range(0, len(keys), _AT_ONCE))


def _present(store: Store, keys: Sequence[str]) -> list[str]:
    # Halving: few are missing among many.
    if _all_there(store, keys):
        return list(keys)
    if len(keys) == 1:
        return []
    half = len(keys) // 2
    return [*_present(store, keys[:half]), *_present(store, keys[half:])]
