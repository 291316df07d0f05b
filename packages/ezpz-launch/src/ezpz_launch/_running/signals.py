"""Signals that people and schedulers send to ezpz-launch, kept for the run loop."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Those that end a launch; SIGUSR1 and SIGUSR2 reach the ranks and end nothing."""

_PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)


Heard = tuple[list[signal.Signals], int]
"""What has arrived and was not yet looked at, and a file descriptor that wakes who sleeps on it."""


@contextmanager
def signals() -> Iterator[Heard]:
    """Collect the signals to pass on; each, and SIGCHLD, makes the file descriptor readable."""
    arrived: list[signal.Signals] = []

    def note(number: int, _frame: FrameType | None) -> None:
        arrived.append(signal.Signals(number))

    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    # What we were started to ignore (nohup) stays ignored, by the ranks too.
    heard = [s for s in _PASSED_ON if signal.getsignal(s) is not signal.SIG_IGN]
    previous = {s: signal.signal(s, note) for s in heard}
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    previous_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield arrived, read
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)


def pause(seconds: float, heard: Heard) -> int:
    """Wait, and return the number of a signal that told us to end meanwhile; 0 if none did."""
    arrived, wake = heard
    until = time.monotonic() + seconds
    while True:
        told = next((number for number in arrived if number in ENDING), None)
        left = until - time.monotonic()
        if told or left <= 0:
            return told or 0
        if select.select([wake], [], [], left)[0]:
            os.read(wake, 4096)


def signal_group(leader: int, number: int) -> None:
    """Signal a process group, if it is still there."""
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        return
