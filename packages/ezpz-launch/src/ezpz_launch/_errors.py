"""The error tree of ezpz_launch; the exit status belongs to the error."""

from __future__ import annotations


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
