"""Where a rank hangs: py-spy prints the stacks of its Python processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

from ezpz_launch._run.processes import (
    arguments_of,
    children_of,
    executable_of,
    has_mapped,
    send,
    shorten_command,
)

MAX_WORKERS = 4
"""Children of the training processes that are shown as well: a few data loaders say it all."""

NODE_SECONDS = 10.0
"""For the stacks of all ranks of a node: less than ezpz-launch waits for them."""

_HELPER_PROCESSES = ("multiprocessing.resource_tracker", "torch/_inductor/compile_worker")
"""Python processes that libraries start beside the training, and that only ever wait."""


def find_py_spy() -> str | None:
    """Return py-spy on PATH, or beside Python, for an environment that is not activated."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), os.path.dirname(sys.executable)]
    return shutil.which("py-spy", path=os.pathsep.join(filter(None, folders)))


def read_stacks(pids: dict[int, int]) -> str:
    """Return the Python stacks of ranks, by rank and process id.

    A rank that py-spy cannot read prints its own stacks by faulthandler to its standard error.
    """
    py_spy = find_py_spy()
    texts = []
    for rank, pid in pids.items():
        seconds = max(1.0, NODE_SECONDS / len(pids))
        text = dump_stacks(pid, py_spy, seconds) if py_spy else None
        if text is not None:
            texts.append(f"rank {rank}:\n{text.rstrip()}\n")
            continue
        training, workers = find_python_processes(pid)
        for process in training + workers:
            send(process, signal.SIGABRT)
    return "".join(texts)


def find_python_processes(rank_pid: int) -> tuple[list[int], list[int]]:
    """Return the first Python process in each branch below a rank's, and some of their children."""
    training: list[int] = []
    workers: list[int] = []
    level = [(child, False) for child in children_of(rank_pid)]
    for pid, is_below_training in level:
        is_python = _is_python_program(pid)
        if is_python and is_below_training:
            workers.append(pid)
        elif is_python:
            training.append(pid)
        level += [(child, is_below_training or is_python) for child in children_of(pid)]
    return training, workers[:MAX_WORKERS]


def _is_python_program(pid: int) -> bool:
    program = os.path.basename(executable_of(pid)).lower()
    # The second: a program with an interpreter inside.
    is_python = program.startswith(("python", "pypy")) or has_mapped(pid, b"/libpython")
    if not is_python:
        return False
    return not any(name in word for name in _HELPER_PROCESSES for word in arguments_of(pid))


def dump_stacks(rank_pid: int, py_spy: str, seconds: float) -> str | None:
    """Return the stacks of a rank's Python processes; None if one of them cannot be read."""
    training, workers = find_python_processes(rank_pid)
    if not training:
        return None
    deadline = time.monotonic() + seconds
    dumps: list[tuple[int, subprocess.Popen[bytes]]] = []
    parts: list[str] = []
    try:
        # All at once: each waits for a process of its own.
        dumps += [(pid, _start_py_spy(py_spy, pid)) for pid in training + workers]
        for pid, dump in dumps:
            text = _read_dump(dump, deadline)
            if not text and pid in training:
                return None
            title = shorten_command(arguments_of(pid), 200)
            text = text or "py-spy got no stack of it"
            parts.append(f"rank's process {pid}: {title}\n{text}\n")
    except OSError:
        return None  # py-spy itself cannot be started
    finally:
        for _, dump in dumps:
            dump.kill()
            dump.communicate()
    return "\n".join(parts)


def _start_py_spy(py_spy: str, pid: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [py_spy, "dump", "--pid", str(pid)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _read_dump(dump: subprocess.Popen[bytes], deadline: float) -> str:
    try:
        output, _ = dump.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return ""
    if dump.returncode != 0:
        return ""
    # Its first lines show the command, which our own line has already.
    head, version, stacks = output.decode(errors="replace").strip().partition("\nPython v")
    if not version:
        return head
    return f"Python {stacks}"
