"""Which rank this process is, the step it is at, and files that only grow."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ezpz_topo import get_rank_info


@dataclass(frozen=True)
class RankInfo:
    rank: int
    world_size: int
    host: str


def find_rank_info() -> RankInfo:
    """Return this process's rank, world size and host name (up to its first dot)."""
    # torch.distributed knows best, where it is set up: ranks of ``torch.multiprocessing.spawn``
    # have no variables that name them.
    host = socket.gethostname().partition(".")[0]
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)  # None while torch is being imported
    if dist is not None and dist.is_available() and dist.is_initialized():
        return RankInfo(dist.get_rank(), dist.get_world_size(), host)
    info = get_rank_info(os.environ)
    return RankInfo(info.rank, info.world_size, host)


@dataclass(slots=True)
class Now:
    """What this process is doing: the step that a `History` recorded last, or None."""

    step: int | None = None


NOW: Final = Now()  # written by `History` at each record (20 ns), read by every log line

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def open_to_append(path: Path) -> int:
    """Open or make a file for reading and appending, beside the three standard ones."""
    descriptor = os.open(path, _FLAGS, 0o644)
    if descriptor > 2:
        return descriptor
    # In a process without a standard error this file would be it, and get what native code prints.
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path aside to write to, which is renamed over this one once it is whole."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
