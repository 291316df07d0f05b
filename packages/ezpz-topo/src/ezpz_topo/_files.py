"""Files that somebody else names: read whole, but neither for ever nor into all of memory."""

from __future__ import annotations

import os
import stat


def read_regular(path: str, limit: int) -> bytes:
    """Return what a regular file says.

    Raises:
        OSError: It cannot be read, is no regular file (a FIFO would wait for its writer,
            ``/dev/zero`` has no end), or is longer than ``limit`` bytes.
        ValueError: The path holds a NUL.
    """
    with open(path, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path!r} is not a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(f"{path!r} has more than {limit} bytes")
    return data


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
