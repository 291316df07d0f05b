"""Processes as /proc shows them; where there is none, little is known.

A neighbour of the node's agent, which knows the standard library and its own folder alone.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_WAITING = ("sh", "bash", "dash", "zsh", "ksh", "busybox", "time", "timeout", "env", "nice")
"""Programs that only wait for another one."""


def is_running(pid: int) -> bool:
    """Whether a process is there, and not only waited for."""
    fields = _stat(pid)
    if fields:
        return fields[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not os.path.exists("/proc/self/stat")


def parent(pid: int) -> int:
    """Return the process that a process is a child of now; 0 where /proc does not tell."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def children(pid: int) -> list[int]:
    """Return the children of a process; none where the kernel does not list them."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except (OSError, ValueError):
        return []


def birth(pid: int) -> str:
    """Return when a process started, in ticks; empty where it is gone, or /proc is absent."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def _stat(pid: int) -> list[str]:
    """Return the fields of proc(5)'s stat from the state on; none where there are none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name may hold anything, so count from its end.
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def command(pid: int) -> str:
    """Return what a process is known by: no options, whose values may be secrets."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            words = file.read().split("\0")
    except OSError:
        return ""
    named = words[:1]
    for word in words[1:3]:
        if word.startswith("-") or set(word) & set("=:@"):
            break
        named.append(word)
    text = " ".join(map(os.path.basename, named)).strip()[:80]
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def marked(*marks: bytes) -> list[int]:
    """Return the processes that were started with these variables; none where /proc is absent."""
    return [pid for pid, environment in _environments() if set(marks) <= set(environment)]


def of_launch(launch_id: bytes) -> list[int]:
    """Return the processes of a launch, and of launches inside its ranks.

    Not of another job: one that a rank has submitted has that rank's environment.
    """
    found, job = [], _job([b"%s=%s" % pair for pair in os.environb.items()])
    for pid, environment in _environments():
        for variable in environment if _job(environment) <= job else ():
            name, _, value = variable.partition(b"=")
            if name in (b"EZPZ_LAUNCH_ID", b"EZPZ_INSIDE") and launch_id in value.split(b":"):
                found.append(pid)
                break
    return found


def _job(environment: list[bytes]) -> set[bytes]:
    return {each for each in environment if each.startswith((b"PBS_JOBID=", b"SLURM_JOB_ID="))}


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    """Return each other process that we may look into, with what it was started with."""
    try:
        names = os.listdir("/proc")
    except FileNotFoundError:
        return
    for name in names:
        if name.isdecimal() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    environment = file.read().split(b"\0")
            except OSError:
                continue  # gone, or another user's
            yield int(name), environment


def catchers(shim: int, number: int) -> list[int]:
    """Return the processes of a rank that have a handler for a signal, and that it is meant for.

    That is what the shells and the like below a shim wait for, if it has one; not what it started
    itself: a data loader's worker has a handler of torch's, and would die of its own.
    """
    found, looked_at = [], children(shim)
    for pid in looked_at:
        pumps = _is_pump(pid)
        if catches(pid, number) and not pumps:
            found.append(pid)
        elif pumps or _only_waits(pid):
            looked_at += children(pid)
    return found


def descendants(pid: int) -> list[int]:
    """Return a process and all that descends from it."""
    found = [pid]
    for each in found:
        found += children(each)
    return found


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False where /proc does not tell."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError):
        pass  # gone, or no Linux
    return False


def _only_waits(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in _WAITING
    except OSError:
        return False


def _is_pump(pid: int) -> bool:
    """Whether it is our own, which hears every signal and acts on none."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    return words[1:3] == [b"-I", b"-S"] and any(b"rank_output" in word for word in words[3:5])


def send(target: int, number: int) -> None:
    """Signal a process, or the group of a negative number, if it is there."""
    try:
        os.kill(target, number)
    except (ProcessLookupError, PermissionError):
        # Gone, or no longer ours: a rank may have changed its user.
        return
