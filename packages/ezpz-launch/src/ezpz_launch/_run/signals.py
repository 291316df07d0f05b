"""Signals that people and schedulers send to ezpz-launch, collected for the run."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Those that end a launch; SIGUSR1 and SIGUSR2 reach the ranks and end nothing."""


class Inbox(NamedTuple):
    """Signals that have arrived, and a file descriptor that is readable when one does."""

    arrived: list[signal.Signals]
    wake_fd: int

    def first_stop_signal(self) -> signal.Signals | None:
        for number in self.arrived:
            if number in STOP_SIGNALS:
                return number
        return None


@contextmanager
def collect_signals() -> Iterator[Inbox]:
    """Collect signals; each, and SIGCHLD, makes the file descriptor readable."""
    arrived: list[signal.Signals] = []

    def record(number: int, _frame: FrameType | None) -> None:
        arrived.append(signal.Signals(number))

    def ignore(_number: int, _frame: FrameType | None) -> None:
        return

    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    previous = {}
    for number in (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2):
        # What we were started to ignore (nohup) stays ignored, by the ranks too.
        if signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, record)
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, ignore)
    previous_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield Inbox(arrived, read)
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)


def pause(seconds: float, inbox: Inbox) -> int:
    """Wait; return the number of a stop signal that arrived meanwhile, or 0."""
    deadline = time.monotonic() + seconds
    while True:
        stop_signal = inbox.first_stop_signal()
        if stop_signal is not None:
            return stop_signal
        left = deadline - time.monotonic()
        if left <= 0:
            return 0
        if select.select([inbox.wake_fd], [], [], left)[0]:
            os.read(inbox.wake_fd, 4096)
