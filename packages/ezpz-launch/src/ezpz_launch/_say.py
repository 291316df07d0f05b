"""What ezpz-launch itself has to say, on standard error."""

from __future__ import annotations

import sys
from contextlib import suppress


def say(message: str) -> None:
    """Write a line of ours; where nobody can read it, go on without."""
    # Of a standard error that is closed, print would make standard output.
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"ezpz-launch: {message}", file=sys.stderr, flush=True)
