"""The host's memory: what this process has of it, and may have."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def host_use(proc: Path = _PROC) -> tuple[int | None, int]:
    """Return this process's resident bytes, None where not known, and the most there have been."""
    try:
        with (proc / "self" / "status").open("rb") as file:
            status = file.read()
        # getrusage's own peak outlives exec: a small process started by a large one has its.
        return _kibibytes(status, b"\nVmRSS:"), _kibibytes(status, b"\nVmHWM:")
    except (OSError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return None, peak if sys.platform == "darwin" else peak * 1024


def _kibibytes(status: bytes, key: bytes) -> int:
    start = status.index(key) + len(key)
    return int(status[start : status.index(b"kB", start)]) * 1024


@cache
def host_total(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the bytes this process may use: the host's, or less by a control group's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *_limits(proc, cgroups)])


def _limits(proc: Path, cgroups: Path) -> list[int]:
    """Return the limits of the control groups that hold this process, version 1 and 2."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []  # no control groups here
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Each group is bound by those above it. In a container the path may be the host's,
        # of which the container sees the root only.
        folder = root / group.lstrip("/")
        while folder.is_relative_to(root):
            with suppress(OSError, ValueError):  # no such group, or "max"
                found.append(int((folder / name).read_text(encoding="ascii")))
            if folder == root:
                break
            folder = folder.parent
    return found


def reset_host_peak(proc: Path = _PROC) -> bool:
    """Set this process's peak back to what it has now; return whether that was possible."""
    try:
        # proc(5): 5 resets the peak resident set size, and nothing else.
        (proc / "self" / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True
