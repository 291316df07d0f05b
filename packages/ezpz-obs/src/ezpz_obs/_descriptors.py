"""Files that only grow: opened, and looked after, by descriptor."""

from __future__ import annotations

import os
from pathlib import Path

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def open_to_append(path: Path, *, anew: bool = False) -> int:
    """Open a file for reading and for appending, beside the three standard ones.

    Args:
        path: Where; it is made if need be.
        anew: Only where there is none.

    Raises:
        OSError: It cannot be opened or made.
    """
    descriptor = os.open(path, _FLAGS | (os.O_EXCL if anew else 0), 0o644)
    # In a process without a standard error this file would be it, and get what native code prints.
    lower = []
    try:
        while descriptor <= 2:
            lower.append(descriptor)
            descriptor = os.dup(descriptor)
    finally:
        for each in lower:
            os.close(each)
    return descriptor


def is_at(path: Path, descriptor: int) -> bool:
    """Say whether a path still leads to an open file."""
    try:
        found, ours = os.stat(path), os.fstat(descriptor)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)
