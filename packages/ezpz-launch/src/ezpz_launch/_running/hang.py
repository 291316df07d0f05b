"""Ranks that write nothing any more: who they are, and where each of them is."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence

from .launch import NEVER, Launch
from .nodes import Nodes
from .outcome import name_ranks
from .output import Output
from .status import Status

_PATIENCE = 15.0
"""Seconds that the nodes have to tell where their ranks are."""


class Hang:
    """Looks for a hang of one launch.

    Args:
        launch: The launch.
        output: What the ranks write.
        wake: Called, from another thread, when an answer has come.

    Attributes:
        declared: Whether the ranks hang.
    """

    def __init__(self, launch: Launch, output: Output, wake: Callable[[], None]) -> None:
        self.declared = False
        self._launch, self._output, self._wake = launch, output, wake
        self._until = NEVER
        self._unanswered = 0
        self._answers: deque[bytes] = deque()

    @property
    def next_look(self) -> float:
        """When to look again, in `time.monotonic`'s seconds."""
        idle = self._launch.idle_timeout
        return self._output.last + idle if idle and not self.declared else NEVER

    def is_one(self, now: float, status: Status) -> bool:
        """Whether no rank has written anything for too long."""
        idle, files = self._launch.idle_timeout, self._launch.control.files
        if not idle or status.all_ended:
            return False
        if now - self._output.last >= idle and files and status.has_running:
            # Of what goes to files we see nothing but their times.
            age = time.time() - _newest(files, status.running)
            self._output.last = max(self._output.last, now - max(age, 0.0))
        return now - self._output.last >= idle

    def declare(self, now: float, status: Status, nodes: Nodes) -> None:
        """Name the ranks that have not ended, and ask them where they are."""
        self.declared = True
        running, unstarted = status.running, status.unstarted
        self._unanswered = len({rank // self._launch.ppn for rank in running})
        self._until = now + _PATIENCE
        silence = f"no output for {self._launch.idle_timeout:g} s"
        if unstarted:
            named = name_ranks(self._launch, unstarted)
            self._output.say(f"{silence}; ranks that never started: {named}")
        if running:
            named = name_ranks(self._launch, running)
            self._output.say(f"{silence}; ranks that had not ended: {named}; where they are:")
            nodes.stacks(running)

    def answer(self, text: bytes) -> None:
        """Take what one node says of its ranks; called from other threads, too."""
        self._answers.append(text)
        self._wake()

    def is_told(self, now: float) -> bool:
        """Say what has been answered; whether that was all, or nobody waits any longer."""
        while self._answers:
            text = self._answers.popleft().decode(errors="replace").rstrip()
            self._unanswered -= 1
            if text:
                self._output.say(f"stacks\n{text}")
        over = self._until != NEVER and (self._unanswered <= 0 or now >= self._until)
        if over:
            self._until = NEVER
        return over


def _newest(folder: str, ranks: Sequence[int]) -> float:
    """Return when one of these ranks wrote to its files last, in seconds since the epoch.

    Files that are not seen from here, on disks of other hosts, may be written to at any time.
    """
    newest = 0.0
    for rank in ranks:
        for name in (f"rank-{rank}.out", f"rank-{rank}.err"):
            try:
                newest = max(newest, os.stat(os.path.join(folder, name)).st_mtime)
            except OSError:
                return time.time()
    return newest
