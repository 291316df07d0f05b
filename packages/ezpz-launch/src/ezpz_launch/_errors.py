"""What ezpz-launch raises, and how it says something."""

from __future__ import annotations

import os
import sys


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


def say(message: str) -> None:
    """Write a line of ours to standard error; where it cannot be written, go on without."""
    # Of a standard error that is closed, print would make standard output.
    if sys.stderr is not None:
        try:
            print(f"ezpz-launch: {message}", file=sys.stderr, flush=True)
        except OSError:
            discard(sys.stderr.fileno())


def discard(fd: int) -> None:
    """Drop what is still to be written there: the interpreter's own flush would fail as well."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)
