"""The door of the console script: `_cli.main`, as a process that starts and ends quickly."""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_GARBAGE = 100_000
"""So many new objects are looked through for garbage: what a small launch never has."""


def main() -> NoReturn:
    """Run ``ezpz-launch`` and end this process with its exit status."""
    # Nothing of what is imported is garbage: to look for some takes 4 of 50 ms.
    gc.set_threshold(_GARBAGE)
    from ._cli import main as run  # noqa: PLC0415

    status = run()
    for stream in (sys.stdout, sys.stderr):
        try:
            # None: it was closed when we started.
            if stream is not None:
                stream.flush()
        except OSError:
            continue  # nobody reads it
    # To take a process's modules apart before it ends serves nobody, and takes 6 ms.
    os._exit(status)
