"""A forked child has its parent's file and sinks open, and is to leave them alone."""

from __future__ import annotations

import os
import weakref
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .recorder import Places


def disown_in_children(places: Places) -> None:
    """Have forked children close their copy of the file, and refuse records.

    The lock on a file is its copies' too: a worker of a DataLoader that outlives a killed
    training would keep the next attempt out. And what it recorded would be a second run's.
    """
    if not hasattr(os, "register_at_fork"):
        return
    of_parent = weakref.ref(places)

    def disown() -> None:
        found = of_parent()
        if found is None or found.closed:
            return
        if found.writer is not None:
            found.writer.lost = 0  # for the parent to say
            found.writer.close()
        found.writer, found.kept, found.feeders, found.progress = None, None, (), None
        found.closed = "in a process forked from its own"
        found.lock = RLock()  # another thread of the parent's may hold the old one for ever

    os.register_at_fork(after_in_child=disown)
