"""Whether a launch that failed is started again, and after how long: pure policy."""

from __future__ import annotations

import re
from typing import NamedTuple

from ezpz_launch._nodes.bad_nodes import tracebacks

_LONGEST_PAUSE = 60.0  # seconds; the pauses before it are 1, 2, 4, ...
_WITHOUT_PROGRESS = 2  # so many attempts in a row without progress are the last

_NEVER_AGAIN = {
    2: "exit status 2 is a usage error, which another attempt repeats",
    75: "exit status 75 means checkpointed, to be requeued",
    126: "exit status 126: the program cannot be executed",
    127: "exit status 127: the program was not found",
}

_FAILED_IMPORT = re.compile(r"(?:[\w.]+\.)?(?:ModuleNotFoundError|ImportError)\s*(?::|$)")


class Progress(NamedTuple):
    """What attempts in a row have come to, be they of one launch, or jobs of a chain."""

    best: int = -1  # the highest step that one reported; -1 for none
    idle: int = 0  # attempts since then

    def after(self, step: int | None) -> Progress:
        step = -1 if step is None else step
        return Progress(max(self.best, step), 0 if step > self.best else self.idle + 1)

    def why_stop(self, attempts: str = "attempts") -> str:
        """Say why there should be no other; empty where there may be."""
        if self.idle < _WITHOUT_PROGRESS:
            return ""
        best = f"step {self.best} is the highest" if self.best >= 0 else "none reported any"
        return (
            f"{self.idle} {attempts} in a row without progress ({best}); expected a higher "
            "step in EZPZ_PROGRESS_FILE; see the error above, or let the script report it"
        )


class Retries:
    """How often a launch may be started again; call `decide` once after each attempt."""

    def __init__(self, allowed: int) -> None:
        self._allowed, self._done = allowed, 0
        self._progress = Progress()

    def decide(
        self, exit_status: int, *, told: bool = False, import_error: bool = False,
        progress: int | None = None,
    ) -> tuple[float | None, str]:  # fmt: skip
        """Return the seconds to wait before the next attempt, None for no other; and why."""
        self._progress = self._progress.after(progress)
        if told:
            return None, "it was told to end"
        if exit_status in _NEVER_AGAIN:
            return None, _NEVER_AGAIN[exit_status]
        if import_error:
            return None, "a failed import, which another attempt repeats"
        if self._done >= self._allowed:
            return None, f"all retries are used ({self._allowed})"
        if why := self._progress.why_stop():
            return None, why
        seconds = min(_LONGEST_PAUSE, 2.0 ** min(self._done, 10))
        self._done += 1
        why = f"exit status {exit_status}: retry {self._done} of {self._allowed} in {seconds:g} s"
        return seconds, why


def ends_with_import_error(stderr: bytes) -> bool:
    """Whether a rank's last words are Python's traceback of an import that failed."""
    *_, (_, raised, _) = [(0, "", b""), *tracebacks(stderr)]
    return _FAILED_IMPORT.match(raised) is not None
