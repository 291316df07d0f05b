"""What ezpz-launch raises, and how it says something."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Mapping

from ezpz_topo import fold_nodelist


class LaunchError(Exception):
    """Base of every error that ezpz_launch raises on purpose; the exit status belongs to it."""

    exit_status = 2


class UsageError(LaunchError):
    """The command line asks for something that does not exist or cannot be."""


class CommandNotFoundError(LaunchError):
    """The user's program, or the launcher's, is not there: 127, as in a shell."""

    exit_status = 127


class CommandNotExecutableError(LaunchError):
    """The user's program is there but cannot be executed: 126, as in a shell."""

    exit_status = 126


class StageError(LaunchError):
    """Staging failed on some hosts; ``hosts`` has the reason for each."""

    exit_status = 1

    def __init__(self, hosts: Mapping[str, str], nodes: int) -> None:
        self.hosts = dict(hosts)
        alike = Counter(re.sub(r"\d+", "N", why) for why in hosts.values())
        self.is_shared = max(alike.values()) > max(1, nodes // 2)
        """Whether most of several hosts have one reason, which is then none of their own."""
        whys = list(dict.fromkeys(hosts.values()))
        text = f"not staged on any of {nodes} nodes: {whys[0]}"
        if len(hosts) < nodes or len(whys) > 1:
            named = [f"{host}: {why}" for host, why in list(hosts.items())[:8]]
            more = f"; and {len(hosts) - 8} more hosts" if len(hosts) > 8 else ""
            text = f"not staged on {'; '.join(named)}{more}"
        if len(hosts) < nodes:
            text += "; the other nodes have it now: start again with --exclude "
            text += fold_nodelist(list(hosts))
        super().__init__(text)


def say(message: str) -> None:
    """Write a line of ours to standard error; where it cannot be written, go on without."""
    # Of a standard error that is closed, print would make standard output.
    if sys.stderr is not None:
        try:
            print(f"ezpz-launch: {message}", file=sys.stderr, flush=True)
        except OSError:
            discard(sys.stderr.fileno())


def open_closed_streams() -> None:
    """Open the null device as standard input, output or error that we were started without."""
    # The next file or socket would take its number, and get what ranks write.
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(null, True)


def discard(fd: int) -> None:
    """Drop what is still to be written there: the interpreter's own flush would fail as well."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)
