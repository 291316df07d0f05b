"""Whether a launch that failed is started again, and after how long: pure policy."""

from __future__ import annotations

import re
from typing import NamedTuple

LONGEST_PAUSE = 60.0
"""Seconds; the pauses before it are 1, 2, 4, ..."""

WITHOUT_PROGRESS = 2
"""So many attempts in a row without progress are the last."""

_NEVER = {
    0: "it succeeded",
    2: "exit status 2 is a usage error, which another attempt repeats",
    75: "exit status 75 means check-pointed, to be requeued",
    126: "exit status 126: the program cannot be executed",
    127: "exit status 127: the program was not found",
}

_TRACEBACK = b"Traceback (most recent call last):"
_ERROR_NAME = re.compile(rb"(?:[\w.]+\.)?(?:ModuleNotFoundError|ImportError)\s*(?::|$)")

_PREFIX = re.compile(rb"\[[0-9]+@[^\]\s]*\] ?")


class Attempt(NamedTuple):
    """How one attempt ended.

    Attributes:
        exit_status: The attempt's exit status, as `run` returns it.
        told: Whether a signal to the launcher ended it: the user or the scheduler wants an end.
        import_error: Whether the first failing rank died of a failed import.
        progress: The highest step reported so far; None if none was.
    """

    exit_status: int
    told: bool = False
    import_error: bool = False
    progress: int | None = None


class Decision(NamedTuple):
    """What follows.

    Attributes:
        retry: Whether to start again.
        pause: Seconds to wait before; 0 without another attempt.
        why: The reason, for people.
    """

    retry: bool
    pause: float
    why: str


class Retries:
    """The attempts of one launch: call `decide` once after each."""

    def __init__(self, allowed: int) -> None:
        """Allow so many attempts after the first.

        Args:
            allowed: Number of retries, from 0.

        Raises:
            ValueError: It is negative.
        """
        if allowed < 0:
            raise ValueError(f"allowed: got {allowed}; expected 0 or more")
        self.allowed = allowed
        self.done = 0
        """Retries decided on so far, which is the number of the attempt that runs, from 0."""
        self._best = -1
        self._idle = 0

    def decide(self, attempt: Attempt) -> Decision:
        """Say whether to start again after an attempt that ended so.

        Not after success, a signal to the launcher, exit status 2, 75, 126 or 127, or a failed
        import: the next attempt would end alike, or nobody wants it. A hang (124) is retried.
        An attempt has made progress when it reported a higher step than all before it.
        """
        progress = -1 if attempt.progress is None else attempt.progress
        self._idle = 0 if progress > self._best else self._idle + 1
        self._best = max(self._best, progress)
        against = self._against(attempt)
        if against:
            return Decision(retry=False, pause=0.0, why=against)
        pause = min(LONGEST_PAUSE, 2.0 ** min(self.done, 10))
        self.done += 1
        return Decision(
            retry=True,
            pause=pause,
            why=f"exit status {attempt.exit_status}: retry {self.done} of {self.allowed} "
            f"in {pause:g} s",
        )

    def _against(self, attempt: Attempt) -> str:
        """Return why there is no other attempt; empty if there is one."""
        if attempt.told:
            return "it was told to end"
        if attempt.exit_status in _NEVER:
            return _NEVER[attempt.exit_status]
        if attempt.import_error:
            return "a failed import, which another attempt repeats"
        if self.done >= self.allowed:
            return f"all retries are used ({self.allowed})" if self.allowed else "no --retries"
        if self._idle >= WITHOUT_PROGRESS:
            best = f"step {self._best} is the highest" if self._best >= 0 else "none reported any"
            return (
                f"{self._idle} attempts in a row without progress ({best}); expected a higher "
                "step in EZPZ_PROGRESS_FILE; see the error above, or let the script report it"
            )
        return ""


def ends_with_import_error(stderr: bytes) -> bool:
    """Whether a rank's last words are Python's traceback of an import that failed.

    Args:
        stderr: The end of its standard error; a prefix ``[rank@host] `` does no harm.
    """
    _, found, tail = stderr.rpartition(_TRACEBACK)
    if not found:
        return False
    lines = [_PREFIX.sub(b"", line) for line in tail.splitlines() if line.strip()]
    # The lines of a traceback are indented; the first that is not names the exception.
    named = next((line for line in lines if not line[:1].isspace()), b"")
    return _ERROR_NAME.match(named) is not None
