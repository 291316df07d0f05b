"""The end of a process that has a `History`: of a script, or of a function of multiprocessing."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any


def call_at_exit(end: Callable[[], None]) -> Callable[[], None]:
    """Have a function called when this process ends; return what takes that back."""
    atexit.register(end)
    finalizer: Any = None
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize  # such a process has it

        # Python < 3.14 ends a process that multiprocessing has forked without calling `atexit`'s.
        # Above 0: before ezpz_dist's, which takes down what statistics go through.
        finalizer = Finalize(None, end, exitpriority=1)

    def forget() -> None:
        atexit.unregister(end)
        if finalizer is not None:
            finalizer.cancel()

    return forget


def find_cause() -> BaseException | None:
    """Return what ends this process; None if it is no exception."""
    # Of a script Python keeps it; of a function of multiprocessing it is on its way.
    return getattr(sys, "last_value", None) or sys.exc_info()[1]
