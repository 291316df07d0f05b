"""What a rank starts with: the time of our programs, their processes, and what they report."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ezpz_launch._plan.shim import SHIM
from ezpz_launch._run.launch import VARIABLE, RankSettings

from .fresh import STRACE, environment, traced
from .growth import NODES, PER_NODE, Absent, Curve, Fact, Found, sampled
from .strace import MISSING, done

NODES_IN_ALL, RANKS = NODES[-1], NODES[-1] * PER_NODE

CONTROL = RankSettings(
    "20260101T000000000001Z-12345-abcdef.0", 30.0, ("10.0.0.1:40000",), "a" * 64,
    device_type="xpu", devices=PER_NODE, job_id="1234567.aurora-pbs-0001",
)  # fmt: skip
"""Such as ezpz-launch gives its ranks on several hosts of a machine with twelve devices a node."""


def shim(runs: int) -> Iterator[Found]:
    """Yield what the rank shim adds to a rank; of ranks."""
    sizes = [nodes * PER_NODE for nodes in NODES]

    def cpu(words: list[str], size: int) -> float:
        least = math.inf
        for _ in range(20):  # what disturbs one only adds
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(words, env=_place(size), stderr=subprocess.DEVNULL, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
            least = min(least, spent * 1e3)
        return least

    bare = sampled([sizes[0]], runs, lambda size: cpu(["true"], size))[sizes[0]]
    points = sampled(sizes, runs, lambda size: cpu(_words(size), size))
    own = {size: [sample - min(bare) for sample in some] for size, some in points.items()}
    name = "the rank shim and rank_main.py, CPU time beyond the command's"
    yield Curve("start", name, "ms", "ranks", "measured",
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
                "the command, forked by what the shim becomes")  # fmt: skip
    # The agent of a node is started by its first rank: here a program that does nothing.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "agent.py").touch()
        control = replace(CONTROL, programs=folder).to_text()
        first = {**_place(PER_NODE), "PMI_RANK": "0", "MPI_LOCALRANKID": "0", VARIABLE: control}
        forks, _ = _count(traced(_words(PER_NODE), "fork,vfork,clone,clone3,execve", first))
    yield Fact("start", "the same on a node's first rank", forks, "processes", "counted",
               "its node's agent is one, a Python of the standard library alone")  # fmt: skip
    written = traced(_words(RANKS), "write", _place(RANKS))
    size = sum(int(match[3]) for line in written if (match := done(line)))
    yield Fact("start", "reports of a rank on standard error", size, "bytes", "counted",
               "its start and its end, each twice")  # fmt: skip
    yield Fact("start", "reports that ezpz-launch reads, of 120,960 ranks", size * RANKS / 1e6,
               "MB", "model", "through the launcher's own connections")  # fmt: skip


def _words(size: int) -> list[str]:
    names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"]
    return ["sh", SHIM, "pmi", str(size), str(PER_NODE), *names, "--", "true"]


def _place(size: int) -> dict[str, str]:
    """Return what the last rank of so many is told, by the launcher and by ezpz-launch."""
    last = {"PMI_RANK": str(size - 1), "PMI_SIZE": str(size), VARIABLE: CONTROL.to_text()}
    return environment(**last, MPI_LOCALRANKID=str(PER_NODE - 1), MPI_LOCALNRANKS=str(PER_NODE))


def _count(lines: list[str]) -> tuple[float, float]:
    """Return how often a process was forked, and how often a program was executed."""
    calls = [match[1] for line in lines if (match := done(line)) and int(match[3], 0) >= 0]
    executed = calls.count("execve")
    return float(len(calls) - executed), float(executed)


def agent() -> tuple[list[str], dict[str, str]]:
    """Return command and environment of a node's agent that finds nobody at its address."""
    nobody = replace(CONTROL, addresses=("127.0.0.1:9",))
    words = [sys.executable, "-I", "-S", str(Path(SHIM).with_name("agent.py")), "0"]
    # It stays for as long as what started its shim, which is gone at once here.
    words = ["sh", "-c", '"$@" &', "sh", *words]
    return words, environment(**{VARIABLE: nobody.to_text()})
