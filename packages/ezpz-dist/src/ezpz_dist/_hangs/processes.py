"""Whether a process of this host runs, is stopped, or has ended: read from /proc."""

from __future__ import annotations

import os

STATES = {"T": "stopped", "t": "stopped by a debugger", "Z": "ended", "X": "ended"}


def pid_namespace() -> int:
    """Return the number of this process's PID namespace; 0 where there is no /proc (macOS)."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def state_of(pid: int, namespace: int) -> str:
    """Return ``"stopped"``, ``"ended"``, ``"running"``, ``"waiting for a disk or driver"``, or "".

    Args:
        pid: A process of this host.
        namespace: The PID namespace in which it has that number; another than ours: "".
    """
    if not namespace or namespace != pid_namespace():
        return ""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            letter = file.read().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "ended"
    except OSError:
        return ""
    if letter == "D":
        return "waiting for a disk or driver"
    return STATES.get(letter, "running")
