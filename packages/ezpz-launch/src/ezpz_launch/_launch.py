"""One launch: what is to run, what its ranks' shims are told, the signals it hears, its outcome."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from ._errors import UsageError
from ._options import GRACE, fold_ranks

NEVER = float("inf")

# What the run loop tells the ranks' shims: one variable, one field a line.

VARIABLE = "EZPZ_CONTROL"

NODE_TIMEOUT = 15
"""Seconds without a sign of a node after which it is lost, unless requested otherwise."""

_HERE = os.path.dirname(os.path.abspath(__file__))


class Control(NamedTuple):
    """One launch's orders to its shims; `rank_shim.sh` lists the fields."""

    launch_id: str  # by which the launch's reports and processes are told
    hold: float  # seconds for which a rank that failed waits to be released
    where: tuple[str, ...] = ()  # host:port of the run loop, for the nodes' agents
    secret: str = ""  # what agents know, and do not say
    node_timeout: int = NODE_TIMEOUT  # seconds without a sign of a node after which it is lost
    files: str = ""  # a folder for the output of each rank
    only_ranks: Sequence[int] | None = None  # ranks whose output is shown; None for all
    prefix: bool = False  # whether each line begins with its rank and host
    whole_lines: bool = False  # whether no rank's line may be cut by another's
    tee: bool = False  # whether output goes to the files and to the terminal
    port: int = 0  # to be found free on rank 0's host; 0 where it has been
    device_type: str = ""  # torch's word for the devices, cuda or xpu; empty where there are none
    devices: int = 0  # of a node
    one_device: bool = False  # whether each rank is to see one device only
    attempt: int = 0  # from 0
    progress_file: str = ""  # where scripts report their progress
    job_id: str = ""  # the scheduler's; empty outside of a job

    def value(self) -> str:
        """Return the variable's value; UsageError: a path holds a line break."""
        # Into files alone, sh's own redirection is enough.
        pumped = self.tee or (
            (self.prefix or self.only_ranks is not None or self.whole_lines) and not self.files
        )
        fields = [
            self.launch_id,
            f"{self.hold:.0f}",
            sys.executable,
            os.path.join(_HERE, "_agent.py") if self.where else "",
            " ".join(self.where),
            self.secret,
            str(self.node_timeout),
            self.files,
            "all" if self.only_ranks is None else fold_ranks(self.only_ranks),
            os.path.join(_HERE, "rank_output.py") if pumped else "",
            "--prefix" if self.prefix else "",
            str(self.port or ""),
            self.device_type,
            str(self.devices),
            str(int(self.one_device)),
            str(self.attempt),
            self.progress_file,
            self.job_id,
        ]
        for field in fields:
            if "\n" in field:
                raise UsageError(f"{field!r} holds a line break; expected a path without one")
        # sh would drop an empty line.
        return "\n".join(field or "-" for field in fields)


class Launch(NamedTuple):
    """One launch, ready to be run."""

    argv: tuple[str, ...]  # the launcher's command line
    nproc: int  # how many ranks it starts
    hosts: tuple[str, ...]  # that get ranks, in the order of their nodes
    ppn: int  # ranks of a full host
    on_this_host: bool  # whether this host alone has ranks
    environment: Mapping[str, str]  # of the launcher and its ranks, complete
    control: Control  # what the ranks' shims are told
    grace: float = GRACE  # seconds from SIGTERM to SIGKILL
    idle_timeout: float = 0.0  # seconds without any output after which ranks hang; 0 for never
    signal_at: Callable[[], float] = lambda: NEVER  # when SIGUSR1 is due, since the epoch
    scratch: str = ""  # a file or folder of the launch, to be removed also if we are killed

    def host_of(self, rank: int) -> str:
        """Return the host of a rank."""
        host = self.hosts[rank // self.ppn]
        return os.uname().nodename if host in ("localhost", "127.0.0.1") else host


class Outcome(NamedTuple):
    """How a launch ended."""

    exit_status: int  # that of ezpz-launch
    failure: tuple[int, str, int] | None = None  # rank, host and status of the first that failed
    told: signal.Signals | None = None  # the signal that ended it, if one did
    port_taken: bool = False  # whether another program holds the port on rank 0's host
    tail: bytes = b""  # the last bytes of standard error


def how(status: int) -> str:
    """Say what an exit status means."""
    if status > 128 and status - 128 in {s.value for s in signal.Signals}:
        return f"was killed by {signal.Signals(status - 128).name} (exit status {status})"
    return f"exited with status {status}"


# Signals that people and schedulers send to ezpz-launch, kept for the run loop.

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Those that end a launch; SIGUSR1 and SIGUSR2 reach the ranks and end nothing."""

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
    passed_on = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
    heard = [s for s in passed_on if signal.getsignal(s) is not signal.SIG_IGN]
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
