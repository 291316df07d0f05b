"""The collective of ours that this rank's main thread waits in, for whoever asks."""

from __future__ import annotations

_waits: list[str] = []

_failed_at = ""


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
    """Say what is waited for."""
    _waits.append(what)


def leave() -> None:
    """Say that the innermost wait is over."""
    _waits.pop()
