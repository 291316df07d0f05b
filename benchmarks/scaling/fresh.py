"""Programs in processes of their own: what is measured once a process, or counted by strace."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

STRACE = shutil.which("strace")

# What a rank would not have either: this process's own place in some job.
_PLACE = re.compile(
    "RANK|WORLD_SIZE|LOCAL_|MASTER_|PMI|PALS|OMPI|SLURM|PBS|EZPZ|COBALT|FLUX|JSM|TORCHELASTIC|MPI"
)
_UNFINISHED = "<unfinished ...>"
_RESUMED = re.compile(r" *<\.\.\. \w+ resumed>(.*)")

PRINT_ALL = """
import json, os, traceback

def forked(measure, size):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps(measure(size)).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said)

def print_all(measure, sizes, runs):
    rows = {size: [] for size in sizes}
    for _ in range(runs):
        for size in sizes:
            rows[size].append(forked(measure, size))
    print(json.dumps(rows))
"""
"""Code that measures each size in forks, all sizes in turn, and prints what `answer` returns."""


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without its place in a job, and with what is given."""
    kept = {name: value for name, value in os.environ.items() if not _PLACE.match(name)}
    # Compiled files are there when a job starts: the first rank of all wrote them.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def answer(code: str, *words: str, env: Mapping[str, str] | None = None) -> Any:
    """Run Python code in a fresh process; return what it printed last, as JSON."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *words],
        env={**environment(), **(env or {})}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        printed, errors = process.communicate(timeout=300)
    finally:
        # With all that it has forked.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise SystemExit(f"scale: a measurement failed:\n{errors}")
    return json.loads(printed.splitlines()[-1])


def traced(
    words: list[str], trace: str, env: Mapping[str, str], folder: str | None = None
) -> list[str]:
    """Run a command under strace and return its lines: descriptors with their paths, no PIDs.

    Args:
        words: The command.
        trace: Of ``--trace``.
        env: Its whole environment.
        folder: Where it runs; None: here.
    """
    assert STRACE is not None
    with tempfile.TemporaryDirectory() as kept:
        out = Path(kept, "trace")
        done = subprocess.run(
            [STRACE, "-f", "-y", "-qq", "-s", "0", "-e", f"trace={trace}", "-o", out, *words],
            env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"scale: {words} failed under strace:\n{done.stdout}")
        return whole(out.read_text("utf-8", "replace").splitlines())


def whole(lines: Iterable[str]) -> list[str]:
    """Return strace's lines with those calls in one piece that another thread's have cut in two."""
    found, begun = [], dict[str, str]()
    for line in lines:
        pid, _, call = line.partition(" ")
        resumed = _RESUMED.match(call)
        if call.endswith(_UNFINISHED):
            begun[pid] = line.removesuffix(_UNFINISHED)
        else:
            found.append(begun.pop(pid, f"{pid} ") + resumed[1] if resumed else line)
    return found
