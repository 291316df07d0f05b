"""When the ranks of a launch are told to end, are killed, and their launcher is ended."""

from __future__ import annotations

from .launch import NEVER
from .nodes import Nodes
from .status import Status

SETTLE = 1.0
"""Seconds that the other ranks have to end by themselves after the first failure.

Ranks that stop together (all check-pointed and exit 75, say) end at nearly the same time.
"""

_LAUNCHER_ENDS = 2.0
"""Seconds that a launcher has to end after its last rank, and again after SIGTERM."""

_KILLED = 0.5
"""Seconds that it has once its ranks have been killed."""

_LINGER = 10.0
"""Seconds that a launcher has to end after ranks that all ended well."""


class Ending:
    """The end of one launch; all times are `time.monotonic`'s seconds.

    Args:
        grace: Seconds between SIGTERM and SIGKILL.

    Attributes:
        begun: Whether the ranks are to end: told by somebody, failed or hanging.
        killed: Whether SIGKILL was sent.
    """

    def __init__(self, grace: float) -> None:
        self.begun = self.killed = False
        self._grace = grace
        self._terminate_at = self._kill_at = self._end_launcher_at = NEVER
        self._end_left_at = NEVER

    @property
    def next(self) -> float:
        """When the next of these is due."""
        return min(self._terminate_at, self._kill_at, self._end_left_at, self._end_launcher_at)

    def told(self, now: float, grace: float) -> None:
        """Let the ranks, which have heard the signal themselves, be killed after a grace."""
        self.begun = True
        self._terminate_at = NEVER
        self._kill_at = min(self._kill_at, now + grace)

    def settle(self, now: float) -> None:
        """Let the ranks end by themselves for a moment; then SIGTERM, then after the grace more."""
        self.begun = True
        self._terminate_at = now + SETTLE
        self._kill_at = now + SETTLE + self._grace

    def forgive(self, seconds: float) -> None:
        """Let those seconds not count for the ranks."""
        self._terminate_at += seconds
        self._kill_at += seconds

    def look(self, now: float, status: Status, nodes: Nodes) -> None:
        """See whether the launcher is what is left."""
        if status.all_ended and not self.begun and self._end_launcher_at == NEVER:
            self._end_left_at = now + SETTLE
            self._end_launcher_at = now + _LINGER
        if self.begun and not self.killed:
            if status.has_running:
                self._end_launcher_at = NEVER
            elif self._end_launcher_at == NEVER:
                patience = _LAUNCHER_ENDS if status.all_ended else SETTLE
                unreached = nodes.unreached(status.held)
                self._end_launcher_at = now + (0.0 if unreached else patience)

    def terminates(self, now: float) -> bool:
        """Whether the ranks are to have SIGTERM: true once."""
        due = now >= self._terminate_at
        if due:
            self._terminate_at = NEVER
        return due

    def kills(self, now: float) -> bool:
        """Whether they are to have SIGKILL: true again and again, for those that come late."""
        due = now >= self._kill_at
        if due:
            self._kill_at = now + SETTLE
            self.killed = True
            self._end_launcher_at = min(self._end_launcher_at, now + _KILLED)
        return due

    def ends_left(self, now: float) -> bool:
        """Whether a launcher waits for what its ranks left running: again and again, as above."""
        due = now >= self._end_left_at
        if due:
            self._end_left_at = now + _LAUNCHER_ENDS
        return due

    def ends_launcher(self, now: float) -> bool:
        """Whether the launcher is to be ended: true again and again, until it has."""
        due = now >= self._end_launcher_at
        if due:
            self._end_launcher_at = now + (_KILLED if self.killed else _LAUNCHER_ENDS)
        return due
