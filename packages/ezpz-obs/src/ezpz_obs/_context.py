"""Who speaks, and at which step; and files that only grow: what logs and runs have in common."""

from __future__ import annotations

import fcntl
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ezpz_topo import get_rank_info


@dataclass(frozen=True)
class Place:
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


@dataclass(slots=True)
class Now:
    """What this process is doing: the step that a `History` recorded last, or None."""

    step: int | None = None


NOW: Final = Now()  # written by `History` at each record (20 ns), read by every log line


_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def open_to_append(path: Path, *, exclusive: bool = False) -> int:
    """Open or make a file for reading and appending, beside the three standard ones."""
    descriptor = os.open(path, _FLAGS | (os.O_EXCL if exclusive else 0), 0o644)
    if descriptor > 2:
        return descriptor
    # In a process without a standard error this file would be it, and get what native code prints.
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


def is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path aside to write to, which is renamed over this one once it is whole."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


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
