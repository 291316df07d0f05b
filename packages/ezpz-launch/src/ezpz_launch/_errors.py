"""What ezpz-launch raises, and how it says something."""

from __future__ import annotations

import sys
from contextlib import suppress

# The error tree of ezpz_launch; the exit status belongs to the error.


class LaunchError(Exception):
    """Base of every error that ezpz_launch raises on purpose."""

    exit_status = 2


class UsageError(LaunchError):
    """The command line asks for something that does not exist or cannot be."""


class CommandNotFoundError(LaunchError):
    """The user's program, or the launcher's, is not there: 127, as in a shell."""

    exit_status = 127


class CommandNotExecutableError(LaunchError):
    """The user's program is there but cannot be executed: 126, as in a shell."""

    exit_status = 126


# What ezpz-launch itself has to say, on standard error.


def say(message: str) -> None:
    """Write a line of ours; where nobody can read it, go on without."""
    # Of a standard error that is closed, print would make standard output.
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"ezpz-launch: {message}", file=sys.stderr, flush=True)
