"""Who writes a check-point now, in a name that tells later whether the writer still lives."""

from __future__ import annotations

import functools
import os
import re
import uuid
from pathlib import Path

from ezpz_topo import get_hostname

_TOKEN = re.compile(r"(?P<host>.+)~(?P<space>\d+)~(?P<pid>\d+)~(?P<start>\d+)~[0-9a-f]{8}")


def owner_token() -> str:
    """Return a name for an attempt of this process: host, pid namespace, pid, start, a nonce."""
    space, start = _birth(os.getpid())
    return f"{get_hostname()}~{space}~{os.getpid()}~{start}~{uuid.uuid4().hex[:8]}"


def is_dead(token: str) -> bool | None:
    """Return whether the process that made a token has ended; None where that cannot be told.

    It can be on its own host, within one pid namespace: the process of that number is gone, or
    was started at another time.
    """
    found = _TOKEN.fullmatch(token)
    if found is None or found["host"] != get_hostname():
        return None
    space, _ = _birth(os.getpid())
    if int(found["space"]) != space or not space:
        return None
    _, start = _birth(int(found["pid"]))
    return start != int(found["start"])


@functools.lru_cache(maxsize=1)
def _pid_space() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0  # not Linux


def _birth(pid: int) -> tuple[int, int]:
    """Return our pid namespace and the process's start in clock ticks; (space, 0): none such."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return _pid_space(), 0
    # Field 2, the command, may hold spaces and parentheses; field 3 is the state, 22 the start.
    fields = text.rpartition(")")[2].split()
    return _pid_space(), 0 if fields[0] in ("Z", "X") else int(fields[19])
