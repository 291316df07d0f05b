"""The collective of ours that this rank's main thread waits in, for whoever asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_waits: list[str] = []

_failed_at = ""

_holds = 0

_held_until = 0.0


def failed_at() -> str:
    """Return the line at which this rank's script has failed, whose frames are gone; or ""."""
    return _failed_at


def fail(line: str) -> None:
    """Say where this rank's script has failed."""
    global _failed_at
    _failed_at = line


def current() -> str:
    """Return the innermost one in words; empty outside of any."""
    return _waits[-1] if _waits else ""


def enter(what: str) -> None:
    """Say what is waited for; nothing in another thread."""
    if threading.current_thread() is threading.main_thread():
        _waits.append(what)


def leave() -> None:
    """Say that the innermost wait is over."""
    if threading.current_thread() is threading.main_thread():
        _waits.pop()


@contextmanager
def held() -> Iterator[None]:
    """While this lasts somebody looks at a rank in a debugger: no step takes too long."""
    global _holds, _held_until
    _holds += 1
    try:
        yield
    finally:
        _holds -= 1
        _held_until = time.monotonic()


def last_held() -> float:
    """Return when somebody last looked, by the monotonic clock: now, if they still do."""
    return time.monotonic() if _holds else _held_until
