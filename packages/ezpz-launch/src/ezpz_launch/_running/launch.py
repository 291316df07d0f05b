"""One launch, ready to be run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ezpz_launch._request import GRACE

from .control import Control

NEVER = float("inf")


class Launch(NamedTuple):
    """What the run loop needs to know.

    Attributes:
        argv: The launcher's command line.
        nproc: How many ranks it starts.
        hosts: The hosts that get ranks, in the order of their nodes.
        ppn: Ranks of a full host.
        on_this_host: Whether this host alone has ranks.
        environment: The environment of the launcher and its ranks, complete.
        control: What the ranks' shims are told.
        grace: Seconds from SIGTERM to SIGKILL.
        idle_timeout: Seconds without any output after which the ranks hang; 0 for never.
        signal_at: Tells when to send SIGUSR1, in seconds since the epoch: NEVER until it is known.
        scratch: A file or folder made for the launch, to be removed also if we are killed.
    """

    argv: tuple[str, ...]
    nproc: int
    hosts: tuple[str, ...]
    ppn: int
    on_this_host: bool
    environment: Mapping[str, str]
    control: Control
    grace: float = GRACE
    idle_timeout: float = 0.0
    signal_at: Callable[[], float] = lambda: NEVER
    scratch: str = ""

    def host_of(self, rank: int) -> str:
        """Return the host of a rank."""
        host = self.hosts[rank // self.ppn]
        return os.uname().nodename if host in ("localhost", "127.0.0.1") else host
