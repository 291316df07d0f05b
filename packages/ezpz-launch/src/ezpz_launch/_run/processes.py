"""Processes of this host, as /proc shows them; where there is no /proc, as ps does.

The node programs import this module without site packages, so it needs the standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

EXEC_SECONDS = 1.0
"""How long /proc may show an empty environment while a process executes another program."""

_WAITING_PROGRAMS = {
    "sh", "bash", "dash", "zsh", "ksh", "busybox", "time", "timeout", "env", "nice",
}  # fmt: skip
"""Programs that only wait for another one."""

_POLL_SECONDS = 0.02
_PS_SECONDS = 10


def is_running(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    fields = _read_stat(pid)
    if fields:
        return fields[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return not os.path.exists("/proc/self/stat")


def parent_of(pid: int) -> int:
    """Return the current parent's process id; 0 if unknown."""
    fields = _read_stat(pid)
    if not fields:
        return 0
    return int(fields[1])


def start_time_of(pid: int) -> str:
    """Return the start time in ticks; '' if the process is gone or there is no /proc."""
    fields = _read_stat(pid)
    if not fields:
        return ""
    return fields[19]


def children_of(pid: int) -> list[int]:
    if not os.path.exists("/proc/thread-self/children"):
        rows = [line.split() for line in _run_ps("-axo", "pid=,ppid=").splitlines()]
        return [int(child) for child, parent in rows if int(parent) == pid]
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    children: list[int] = []
    for thread in threads:
        children += map(int, _read(pid, f"task/{thread}/children").split())
    return children


def descendants_of(pid: int) -> list[int]:
    """Return the process itself and everything below it."""
    found = [pid]
    for each in found:
        found += children_of(each)
    return found


def arguments_of(pid: int) -> list[str]:
    line = _read(pid, "cmdline")
    if line:
        return os.fsdecode(line).rstrip("\0").split("\0")
    return _run_ps("-wwo", "command=", "-p", str(pid)).split()


def executable_of(pid: int) -> str:
    """Return the executable's path (argv may be changed by setproctitle); '' if unknown."""
    if not os.path.isdir("/proc/self"):
        return _run_ps("-wwo", "comm=", "-p", str(pid)).strip()
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def has_mapped(pid: int, part: bytes) -> bool:
    """True if the process has mapped a file whose path contains this."""
    return part in _read(pid, "maps")


def shorten_command(words: list[str], length: int) -> str:
    """Join words into one line of at most this many printable characters."""
    line = " ".join(" ".join(words).split())
    line = "".join(letter if letter.isprintable() else "?" for letter in line)
    if len(line) <= length:
        return line
    return f"{line[: length - 3]}..."


def describe(pid: int) -> str:
    """Return pid and program; options are left out, because their values may be secrets."""
    words = arguments_of(pid)
    shown = words[:1]
    for word in words[1:3]:
        if word.startswith("-") or set(word) & set("=:@"):
            break
        shown.append(word)
    return f"pid {pid} ({shorten_command([os.path.basename(word) for word in shown], 80)})"


def environments_of_other_processes() -> Iterator[tuple[int, dict[bytes, bytes]]]:
    """Yield every other readable process with its initial environment."""
    if not os.path.isdir("/proc"):
        return
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            pairs = _read_environment(int(name)).split(b"\0")
            yield int(name), dict(pair.partition(b"=")[::2] for pair in pairs)


def is_same_job(environment: dict[bytes, bytes]) -> bool:
    """False if the environment is of another scheduler job than ours."""
    for name in (b"PBS_JOBID", b"SLURM_JOB_ID"):
        if name in environment and os.environb.get(name) != environment[name]:
            return False
    return True


def processes_of_launch(launch_id: str) -> list[int]:
    """Return the processes of a launch, and of launches inside its ranks; not of other jobs."""
    wanted = launch_id.encode()
    found = []
    for pid, environment in environments_of_other_processes():
        launches = [environment.get(b"EZPZ_LAUNCH_ID")]
        launches += environment.get(b"EZPZ_INSIDE", b"").split(b":")
        if wanted in launches and is_same_job(environment):
            found.append(pid)
    return found


def _read_environment(pid: int) -> bytes:
    deadline = time.monotonic() + EXEC_SECONDS
    while True:
        environment = _read(pid, "environ")
        if environment or not executable_of(pid) or time.monotonic() >= deadline:
            return environment
        # proc(5): env_start and env_end. During an exec they are unset, or env_end is 0.
        start, end = [*_read_stat(pid)[47:49], "", ""][:2]
        if start == end != "0":
            return environment
        time.sleep(0.001)


# Signals.


def send(target: int, number: int) -> None:
    """Send a signal to a process, or to a group (negative)."""
    try:
        os.kill(target, number)
    except (ProcessLookupError, PermissionError):
        return  # it is gone, or has changed its user


def only_waits(pid: int) -> bool:
    """True for a shell, env, time and the like, and for rank_main.py: signals are not for them."""
    if os.path.basename(executable_of(pid)) in _WAITING_PROGRAMS:
        return True
    return _is_rank_main(pid)


def _is_rank_main(pid: int) -> bool:
    words = arguments_of(pid)
    return words[1:3] == ["-I", "-S"] and os.path.basename("".join(words[3:4])) == "rank_main.py"


def processes_handling(rank_pid: int, number: int) -> list[int]:
    """Return the topmost processes of a rank that have a handler for a signal."""
    handling = []
    level = [rank_pid]
    for pid in level:
        if not _is_rank_main(pid) and has_signal_in(pid, b"SigCgt:", number):
            handling.append(pid)
        elif only_waits(pid):
            level += children_of(pid)
    return handling


def signal_is_fatal(rank_pid: int, number: int) -> bool:
    """True if no process of a rank handles, ignores or blocks a signal."""
    if not os.path.isdir("/proc/self"):
        return False
    for pid in descendants_of(rank_pid):
        if only_waits(pid):
            continue
        for mask in (b"SigCgt:", b"SigIgn:", b"SigBlk:"):
            if has_signal_in(pid, mask, number):
                return False
    return True


def has_signal_in(pid: int, mask: bytes, number: int) -> bool:
    """True if a signal is in this mask of proc(5)'s status."""
    _, found, rest = _read(pid, "status").partition(mask)
    if not found:
        return False
    bits = int(rest.split()[0], 16)
    return bool(bits >> (number - 1) & 1)


_PF_EXITING = 4  # of Linux's sched.h, in the field "flags" of proc(5)'s stat


def is_dying(pid: int) -> bool:
    """True if a process is ending just now, or SIGKILL is on its way to it."""
    fields = _read_stat(pid)
    if fields and int(fields[6]) & _PF_EXITING:
        return True
    masks = (b"SigPnd:", b"ShdPnd:")
    return any(has_signal_in(pid, mask, signal.SIGKILL) for mask in masks)


def wait_until_gone(exists: Callable[[], object], seconds: float) -> bool:
    """Wait until something no longer exists; False if it still does after these seconds."""
    deadline = time.monotonic() + seconds
    while exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


_AGENT = "agent.py"
"""Program of ours that has EZPZ_CONTROL as well, and ends with its connection."""


def kill_launcher_processes(launcher: int, launch_id: str) -> None:
    """Kill a launcher's process group, and what it started outside of it, such as Hydra's ssh.

    ``launcher`` is 0 if it is unknown; then it is found by the launch's id, as the others are.
    """
    if launcher:
        send(-launcher, signal.SIGKILL)
        wait_until_gone(lambda: is_running(launcher), 1.0)  # or it may start another
    for pid, environment in environments_of_other_processes():
        if _launch_of_control(environment) != launch_id:
            continue
        words = arguments_of(pid)
        is_agent = any(os.path.basename(word) == _AGENT for word in words[:4])
        # A connection that the user's ssh shares and keeps (ControlPersist) stays.
        is_shared = bool(words) and words[0].endswith(" [mux]")
        if not is_agent and not is_shared and is_same_job(environment):
            send(pid, signal.SIGKILL)


def _launch_of_control(environment: dict[bytes, bytes]) -> str:
    """Return the launch that an EZPZ_CONTROL belongs to."""
    for line in environment.get(b"EZPZ_CONTROL", b"").split(b"\n"):
        name, _, value = line.partition(b"=")
        if name == b"launch_id":
            return value.decode(errors="replace")
    return ""


# /proc and ps.


def _read_stat(pid: int) -> list[str]:
    """Return the fields of proc(5)'s stat from the state on; [] if there are none."""
    # The program's name comes before them and may contain anything.
    return _read(pid, "stat").rpartition(b")")[2].decode().split()


def _read(pid: int, name: str) -> bytes:
    """Return a file of /proc; b'' for a process that is gone or belongs to another user."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _run_ps(*options: str) -> str:
    try:
        done = subprocess.run(
            ["ps", *options], capture_output=True, check=False, stdin=subprocess.DEVNULL,
            timeout=_PS_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")
