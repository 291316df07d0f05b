"""Where does a rank hang: find its Python processes and ask py-spy for their stacks.

It stands alone: the node agent loads it by its path, without this package. Without py-spy,
or where ptrace is refused, the caller sends SIGABRT to `python_processes`: the shim has set
PYTHONFAULTHANDLER, so each prints its stacks as it dies.
"""

from __future__ import annotations

import os
import subprocess
import time

BOUND = 10.0
"""Seconds for all of a rank's dumps together."""

_DEEPER = 4
"""How many children of the training processes are dumped: a few data loader workers say it all."""

_BYSTANDERS = ("multiprocessing.resource_tracker", "torch/_inductor/compile_worker")
"""Python processes that libraries start beside the training, and that only ever wait."""


def find_py_spy(path: str, beside: str = "") -> str | None:
    """Find py-spy.

    Args:
        path: The rank's PATH.
        beside: Directory of this environment's commands, for a venv that is not activated.
    """
    for directory in (*path.split(os.pathsep), beside):
        program = os.path.join(directory, "py-spy")
        if directory and os.path.isfile(program) and os.access(program, os.X_OK):
            return program
    return None


def python_processes(pid: int) -> list[int]:
    """Return a rank's Python processes: the training's own first, then a few of their children.

    Args:
        pid: The rank's shim.
    """
    training, deeper = _family(pid)
    return training + deeper


def dump(pid: int, py_spy: str | None, *, bound: float = BOUND) -> str | None:
    """Return the Python stacks of a rank's processes, under a line for each process.

    Args:
        pid: The rank's shim.
        py_spy: Where py-spy is, if it is.
        bound: Seconds after which a process that does not answer is given up.

    Returns:
        None where a training process could not be asked, or there is none: without py-spy, or
        where it may not trace (Yama's ptrace_scope, a container), or does not know this Python.
    """
    training, deeper = _family(pid)
    if py_spy is None or not training:
        return None
    asked: list[tuple[int, subprocess.Popen[bytes]]] = []
    parts: list[str] = []
    end = time.monotonic() + bound
    try:
        # All at once: each waits for a process of its own.
        asked.extend((process, _ask(py_spy, process)) for process in training + deeper)
        for process, answer in asked:
            text = _answer(answer, end)
            if text is None and process in training:
                return None
            if text is None:
                text = "py-spy got no stack of it"
            parts.append(f"rank's process {process}: {_title(process)}\n{text}\n")
    except OSError:
        return None  # py-spy itself cannot be started
    finally:
        for _, answer in asked:
            answer.kill()
            answer.communicate()
    return "\n".join(parts)


def _ask(py_spy: str, process: int) -> subprocess.Popen[bytes]:
    words = [py_spy, "dump", "--pid", str(process)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(words, stdin=null, stdout=pipe, stderr=null)


def _answer(answer: subprocess.Popen[bytes], end: float) -> str | None:
    try:
        out, _ = answer.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    text = out.decode(errors="replace").strip()
    if answer.returncode != 0 or not text:
        return None
    # Its first lines tell the command, which our own line does in one.
    _, version, stacks = text.partition("\nPython v")
    return f"Python {stacks}" if version else text


def _family(pid: int) -> tuple[list[int], list[int]]:
    """Return the first Python process in each branch below PID, and some of those below them."""
    parents = _by_proc() or _by_ps()
    children: dict[int, list[int]] = {}
    for process, parent in sorted(parents.items()):
        children.setdefault(parent, []).append(process)
    training: list[int] = []
    deeper: list[int] = []
    level = [(child, False) for child in children.get(pid, [])]
    while level:
        following: list[tuple[int, bool]] = []
        for process, below in level:
            counts = _is_python(process) and not _is_ours_or_bystander(process)
            if counts:
                (deeper if below else training).append(process)
            following.extend((child, below or counts) for child in children.get(process, []))
        level = following
    return training, deeper[:_DEEPER]


def _by_proc() -> dict[int, int]:
    """Return each process's parent as Linux lists them; nothing where there is no /proc."""
    parents: dict[int, int] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return parents
    for name in names:
        if not name.isdigit():
            continue
        # "PID (COMMAND) STATE PPID ...": a command may hold spaces and brackets.
        facts = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
        if facts and facts[0] != b"Z":
            parents[int(name)] = int(facts[1])
    return parents


def _by_ps() -> dict[int, int]:
    """Return each process's parent as ps lists them."""
    parents: dict[int, int] = {}
    for line in _ps("-axo", "pid=,ppid=,stat=").splitlines():
        process, parent, state = line.split()[:3]
        if not state.startswith("Z"):
            parents[int(process)] = int(parent)
    return parents


def _is_python(process: int) -> bool:
    """Whether a Python interpreter runs in it; its name says nothing, training renames itself."""
    if not os.path.isdir("/proc/self"):
        program = _ps("-wwo", "comm=", "-p", str(process)).strip()
    else:
        try:
            program = os.readlink(f"/proc/{process}/exe")
        except OSError:
            return False
    name = os.path.basename(program).lower()
    # The second: a program with an interpreter inside.
    return name.startswith(("python", "pypy")) or b"/libpython" in _read(f"/proc/{process}/maps")


def _is_ours_or_bystander(process: int) -> bool:
    words = _words(process)
    # The pump of the rank's output stands between the shim and the command.
    ours = words[1:3] == ["-I", "-S"] and any("rank_output" in word for word in words[3:5])
    return ours or any(name in word for name in _BYSTANDERS for word in words)


def _words(process: int) -> list[str]:
    line = _read(f"/proc/{process}/cmdline")
    if line:
        return os.fsdecode(line).rstrip("\0").split("\0")
    return _ps("-wwo", "command=", "-p", str(process)).split()


def _title(process: int) -> str:
    """Return its command on one line, as text that can be written anywhere."""
    line = " ".join(" ".join(_words(process)).split())
    line = "".join(letter if letter.isprintable() else "?" for letter in line)
    return line if len(line) <= 200 else f"{line[:197]}..."


def _read(path: str) -> bytes:
    """Return what /proc has there; nothing for a process that has gone or is not ours."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _ps(*options: str) -> str:
    try:
        done = subprocess.run(
            ["ps", *options], capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")
