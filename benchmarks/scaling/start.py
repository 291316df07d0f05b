"""What a rank does before the user's first line: the shim's processes, and the files it reads."""

from __future__ import annotations

import math
import os
import re
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from ezpz_launch._planning.launchers.shim import SHIM

from .fresh import STRACE, environment, traced
from .growth import NODES, PER_NODE, Absent, Curve, Fact, Found, sampled

NODES_IN_ALL, RANKS = NODES[-1], NODES[-1] * PER_NODE
MISSING = "strace is not installed"

PROGRAMS = {
    "python alone": "pass",
    "import torch": "import torch",
    "setup_torch()": "import ezpz; ezpz.setup_torch()",
}
_CALL = re.compile(r"(?:\d+ +)?(?:\[pid +\d+\] )?(\w+)\((.*)\) += (-?\d+|0x[0-9a-f]+)(<[^>]*>)?")
_PATH = re.compile(r'"((?:[^"\\]|\\.)*)"')


def shim(runs: int) -> Iterator[Found]:
    """Yield what the rank shim adds to a rank; of ranks."""
    sizes = [nodes * PER_NODE for nodes in NODES]

    def cpu(words: list[str], size: int) -> float:
        least = math.inf
        for _ in range(20):  # what disturbs one only adds
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(words, env=_place(size), check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
            least = min(least, spent * 1e3)
        return least

    bare = sampled([sizes[0]], runs, lambda size: cpu(["true"], size))[sizes[0]]
    points = sampled(sizes, runs, lambda size: cpu(_words(size), size))
    own = {size: [sample - min(bare) for sample in some] for size, some in points.items()}
    yield Curve("start", "the rank shim, CPU time beyond the command's", "ms", "ranks", "measured",
                own, 0, "of a shell on this machine")  # fmt: skip
    if STRACE is None:
        yield Absent("start", "processes of the rank shim", MISSING)
        return
    counts = {
        size: _count(traced(_words(size), "fork,vfork,clone,clone3,execve", _place(size)))
        for size in sizes
    }
    yield Curve("start", "processes that the rank shim starts, beside the command", "processes",
                "ranks", "counted", {size: [forks] for size, (forks, _) in counts.items()}, 0,
                "a subshell, which becomes the command")  # fmt: skip


def _words(size: int) -> list[str]:
    names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"]
    return ["sh", SHIM, "pmi", str(size), str(PER_NODE), *names, "--", "true"]


def _place(size: int) -> dict[str, str]:
    last = {"PMI_RANK": str(size - 1), "PMI_SIZE": str(size)}
    return environment(**last, MPI_LOCALRANKID=str(PER_NODE - 1), MPI_LOCALNRANKS=str(PER_NODE))


def _count(lines: list[str]) -> tuple[float, float]:
    """Return how often a process was forked, and how often a program was executed."""
    calls = [match[1] for line in lines if (match := _CALL.search(line)) and int(match[3], 0) >= 0]
    executed = calls.count("execve")
    return float(len(calls) - executed), float(executed)


def kinds() -> dict[str, str]:
    """Return the folders whose files are read at start, by what they are: longest first."""
    root = Path(__file__).resolve().parents[2]
    return {
        str(root): "environment",
        sysconfig.get_path("purelib"): "environment",
        sysconfig.get_path("platlib"): "environment",
        sys.prefix: "environment",
        sys.base_prefix: "Python",
    }


def kind_of(path: str) -> str:
    """Return what a path belongs to: environment, Python, or the node itself."""
    for folder, kind in sorted(kinds().items(), key=lambda each: -len(each[0])):
        if path.startswith(folder):
            return kind
    return "node"


def looked_at(lines: list[str]) -> list[tuple[str, str, bool]]:
    """Return call, path and success of every system call that names a file."""
    found = []
    for line in lines:
        match = _CALL.search(line)
        if match is None or '"' not in match[2]:
            continue
        path = _PATH.search(match[2])
        if path is None:
            continue
        name = path[1]
        if not name.startswith("/"):
            continue  # relative to a descriptor: of the folder that was opened before
        found.append((match[1], os.path.normpath(name), not match[3].startswith("-")))
    return found


def files(metadata_rate: float, read_rate: float) -> Iterator[Found]:
    """Yield the files that a rank looks for and reads, and what all ranks' add up to.

    Args:
        metadata_rate: Look-ups and opens a second of the shared file system, assumed.
        read_rate: GB a second that all nodes together read from it, assumed.
    """
    if STRACE is None:
        yield Absent("start", "files of a rank's start", MISSING)
        return
    env = environment()
    for name, code in PROGRAMS.items():
        words = [sys.executable, "-c", code]
        subprocess.run(
            words, env=env, check=True, capture_output=True
        )  # compiled, and in the cache
        began = time.perf_counter()
        lines = traced(words, "%file", env)
        took = time.perf_counter() - began
        calls = [each for each in looked_at(lines) if kind_of(each[1]) != "node"]
        opened = {path for call, path, ok in calls if ok and call in ("open", "openat")}
        sizes = sum(os.path.getsize(path) for path in opened if os.path.isfile(path))
        failed = sum(not ok for _, _, ok in calls)
        yield Fact("start", f"{name}: calls that name a file of the environment", len(calls),
                   "calls a rank", "counted", f"{failed} of them find nothing")  # fmt: skip
        yield Fact("start", f"{name}: files opened, folders too", len(opened), "files a rank",
                   "counted", f"{sizes / 1e6:,.1f} MB; {took:.1f} s under strace")  # fmt: skip
    yield from _shared(len(calls), len(opened), sizes, metadata_rate, read_rate)


def _shared(
    calls: int, opened: int, size: int, metadata_rate: float, read_rate: float
) -> Iterator[Found]:
    """Yield what the last program's start means for a file system that all nodes share."""
    at = f"at {metadata_rate:,.0f} calls/s, assumed"
    reads = f"at {read_rate:,.0f} GB/s, assumed"
    total = RANKS * calls
    yield Fact("start", "not staged: look-ups and opens of 120,960 ranks", total, "calls", "model",
               "each rank by itself")  # fmt: skip
    yield Fact("start", "  time of its metadata servers", total / metadata_rate, "s", "model", at)
    once = NODES_IN_ALL * calls
    yield Fact("start", "  the same, if a node's ranks share one cache", once / metadata_rate, "s",
               "model", f"{at}; negative look-ups cached, too")  # fmt: skip
    whole = NODES_IN_ALL * size / 1e9
    yield Fact("start", "  read by 10,080 nodes", whole, "GB", "model", "once a node")
    yield Fact("start", "  time for that", whole / read_rate, "s", "model", reads)
    yield Fact("start", "staged to the nodes: opens of the shared file system", NODES_IN_ALL,
               "calls", "model", f"one archive a node in place of {opened} files")  # fmt: skip
    yield Fact("start", "  time for the archives, each node its own", whole / read_rate, "s",
               "model", f"{reads}; files that no rank opens left out")  # fmt: skip
    yield Fact("start", "  time if one node reads it and nodes pass it on",
               14 * size / 1e9 / 10, "s", "model",
               "14 rounds of a binary tree of 10,080 nodes, 10 GB/s a link, assumed")  # fmt: skip
