"""Standard output and error of the commands, also where they are closed, broken or full."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def print_page(text: str, command: str) -> int:
    """Print a page of help; return the exit status, 1 where it could not be written."""
    if sys.stdout is None:
        return 0  # closed: nobody wants it
    try:
        print(text, flush=True)
    except OSError as error:
        abandon(sys.stdout)
        if isinstance(error, BrokenPipeError):
            return 0  # `ezpz --help | head -1` is no failure
        complain(f"standard output: {error.strerror}", command)
        return 1
    return 0


def abandon(stream: TextIO) -> None:
    """Send what is left of a stream nowhere: the flush at its end would fail once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def complain(text: str, command: str) -> None:
    """Write a line of ours to standard error; where nobody can read it, go on without."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"{command}: {text}", file=sys.stderr, flush=True)
