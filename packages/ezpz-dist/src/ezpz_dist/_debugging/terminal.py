"""The terminal that a person at this rank can be asked at, if there is one."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

STDIN = "stdin"
"""Where the process's own standard input and output will do."""

_QUIET = frozenset({"none", "ezpz", "torchrun"})
"""Launchers that leave their terminal's input alone; mpiexec and srun read it themselves, and
would get some of the lines that are meant for the debugger."""

_PTS_MAJORS = range(136, 144)  # Linux: Documentation/admin-guide/devices.txt


class _Process(NamedTuple):
    """What ``/proc/PID/stat`` says of job control; proc_pid_stat(5)."""

    pid: int
    parent: int
    group: int
    terminal: int
    """Device number of the controlling terminal; 0 for none."""
    foreground: int
    """The process group that the terminal listens to."""


def find_terminal(launcher: str, *, proc: str = "/proc") -> tuple[str, str]:
    """Return the path of a terminal that can be read here, or ``""`` and why there is none.

    Our own, if this process is in its foreground (a background process would be stopped by
    SIGTTIN). Else the one of the launcher above us: ezpz-launch and torchrun give each rank
    a session of its own, without a terminal, and do not read theirs. A process may use a
    terminal that is not its session's; job control does not concern it there.

    Args:
        launcher: Who started the ranks, as `ezpz_topo.RankInfo.launcher` has it.
        proc: Where the kernel tells of processes; for tests.

    Returns:
        `STDIN` where standard input and output are that terminal; else its path.
    """
    try:
        own = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return _anothers(launcher, proc)
    try:
        behind = os.tcgetpgrp(own) != os.getpgrp()
    finally:
        os.close(own)
    if behind:
        return "", "this process runs in the background of its terminal"
    if os.isatty(0) and os.isatty(1):
        return STDIN, ""
    return ("/dev/tty", "") if launcher in _QUIET else ("", _read_by(launcher))


def _anothers(launcher: str, proc: str) -> tuple[str, str]:
    """Return the terminal of a process above this one, for a process that has none."""
    owner = _owner(os.getppid(), proc)
    if owner is None:
        plain = os.isatty(0) and os.isatty(1)
        return (STDIN, "") if plain else ("", "no process above this one has a terminal")
    if launcher not in _QUIET:
        return "", _read_by(launcher)
    if owner.group != owner.foreground:
        return "", f"process {owner.pid} above it runs in the background of its terminal"
    path = _path(owner, proc)
    return path, "" if path else f"the terminal of process {owner.pid} cannot be opened here"


def _read_by(launcher: str) -> str:
    return f"the terminal's input is read by the launcher ({launcher})"


def has_input() -> bool:
    """Whether standard input holds commands: a file or pipe, not closed or the null device."""
    try:
        mine = os.fstat(0)
    except OSError:
        return False
    return not stat.S_ISCHR(mine.st_mode)


def _owner(pid: int, proc: str) -> _Process | None:
    """Return the nearest of these processes, from child to parent, that has a terminal."""
    while pid > 0:
        process = _read(pid, proc)
        if process is None or process.terminal:
            return process
        pid = process.parent
    return None


def _read(pid: int, proc: str) -> _Process | None:
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            # pid (name) state ppid pgrp session tty_nr tpgid: a name may hold anything.
            fields = file.read().rpartition(b")")[2].split()
        return _Process(pid, int(fields[1]), int(fields[2]), int(fields[4]), int(fields[5]))
    except (OSError, IndexError, ValueError):
        return None  # it ended meanwhile, or there is no /proc (macOS)


def _path(owner: _Process, proc: str) -> str:
    """Return a path by which the process's terminal can be opened; empty where there is none."""
    paths = [f"{proc}/{owner.pid}/fd/{number}" for number in (0, 2, 1)]
    major, minor = os.major(owner.terminal), os.minor(owner.terminal)
    if major in _PTS_MAJORS:
        # As devpts numbers them, 256 a major number.
        paths.insert(0, f"/dev/pts/{(major - _PTS_MAJORS[0]) * 256 + minor}")
    for path in paths:
        try:
            if os.stat(path).st_rdev == owner.terminal:
                os.close(os.open(path, os.O_RDWR | os.O_NOCTTY))
                return path
        except OSError:
            continue  # closed, another user's, or another container's
    return ""
