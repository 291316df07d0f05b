"""Who speaks, and at which step; and files that only grow: what logs and runs have in common."""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ezpz_topo import get_rank_info

# Who speaks, and at which step: what every log line and every run's file begin with.


@dataclass(frozen=True)
class Place:
    """One process of a job: its rank, of how many, on which host."""

    rank: int
    world_size: int
    host: str


def find_place(env: Mapping[str, str] | None = None) -> Place:
    """Return who this process is; ``host`` is the name up to its first dot."""
    # torch.distributed knows best, where it is set up: ranks of ``torch.multiprocessing.spawn``
    # have no variables that say who they are.
    host = socket.gethostname().partition(".")[0]
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)  # None while torch is being imported
    if env is None and dist is not None and dist.is_available() and dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size(), host)
    info = get_rank_info(os.environ if env is None else env)
    return Place(info.rank, info.world_size, host)


class Now:
    """What this process is doing: the step that a `History` recorded last, or None."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step: int | None = None


NOW: Final = Now()
"""Written by `History` at each record (an attribute, 20 ns), read by every log line."""


# Files that only grow: opened, and looked after, by descriptor.

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def open_to_append(path: Path, *, exclusive: bool = False) -> int:
    """Open or make a file for reading and appending, beside the three standard ones."""
    descriptor = os.open(path, _FLAGS | (os.O_EXCL if exclusive else 0), 0o644)
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
    try:
        found, ours = os.stat(path), os.fstat(descriptor)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)


_DEEPEST = 20  # what goes further is a cycle, as likely as not
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def to_json(value: Any, said: Callable[[Any], object], depth: int = 0) -> Any:
    """Return what orjson takes; ``said`` gives text, or a number, of what JSON has no word for."""
    if not isinstance(value, str | int | float | Mapping | list | tuple | set | frozenset | None):
        value = said(value)
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        if depth > _DEEPEST:
            return "..."
        if isinstance(value, Mapping):
            names = (key if isinstance(key, str) else str(said(key)) for key in value)
            inner = (to_json(one, said, depth + 1) for one in value.values())
            return dict(zip(map(_encodable, names), inner, strict=True))
        return [to_json(one, said, depth + 1) for one in value]
    if isinstance(value, float):
        # Python's words for the three that JSON has none for are others'.
        return float(value) if math.isfinite(value) else _NOT_FINITE[str(float(value))]
    if value is None or (isinstance(value, int) and -(1 << 63) <= value < 1 << 64):
        return value
    return _encodable(value if isinstance(value, str) else str(said(value)))


def _encodable(text: str) -> str:
    # Names of files in another encoding hold surrogates, which UTF-8 has not.
    return text.encode("utf-8", "backslashreplace").decode()
