"""The files that a rank looks for and reads until its first step, and what all ranks' add up to."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ezpz_launch._plan.shim import SHIM
from ezpz_launch._run.launch import VARIABLE

from .fresh import STRACE, environment, traced
from .growth import Absent, Fact, Found
from .start import CONTROL, NODES_IN_ALL, RANKS, agent
from .strace import MISSING, kind_of, kinds, looked_at

TRACED = "%file,getdents64,fstat,close"

SCRIPTS = {"python alone": "pass", "import torch": "import torch"}

# As a user's, in a folder of the job's. What of its files lies in memory is told at the end.
TRAIN = """
import json, sys
import ezpz
rank = ezpz.setup_torch(backend="gloo")
with ezpz.History("outputs", cross_rank=True) as history:
    history.update({"loss": 0.5})
with open("/proc/self/status") as status:
    lines = dict(line.split(":", 1) for line in status)
ezpz.cleanup()
print(json.dumps(int(lines["RssFile"].split()[0]) * 1024))
"""
_RANKS = 2
"""Rank 1 of two is traced: rank 0 holds the store and writes, which no other one does."""


class Files(NamedTuple):
    """What a process asked of a file system that all nodes share.

    Attributes:
        calls: That name a file of the environment.
        failed: Those of them that find nothing.
        held: Calls on descriptors: fstat, close, lists of folders.
        opened: Files and folders that it opened.
        size: Bytes of these files.
        job: Calls of both kinds in the job's own folder.
        seconds: Under strace.
    """

    calls: int
    failed: int
    held: int
    opened: int
    size: int
    job: int
    seconds: float


def files(metadata_rate: float, read_rate: float) -> Iterator[Found]:
    """Yield the files that a rank looks for and reads, and what all ranks' add up to.

    Args:
        metadata_rate: Look-ups and opens a second of the shared file system, assumed.
        read_rate: GB a second that all nodes together read from it, assumed.
    """
    if STRACE is None:
        yield Absent("start", "files of a rank's start", MISSING)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, code in SCRIPTS.items():
            words = [sys.executable, "-c", code]
            subprocess.run(words, env=environment(), cwd=folder, check=True)  # compiled
            yield from _told(name, _counted(words, environment(), folder))
        words, env = agent()
        subprocess.run(words, env=env, cwd=folder, check=True)
        of_agent = _counted(words, env, folder)
        yield from _told("a node's agent", of_agent)
        Path(folder, "train.py").write_text(TRAIN, "utf-8")
        _last_rank(folder, trace=False)
        found, mapped = _last_rank(folder, trace=True)
    yield from _told("a whole rank: shim, setup_torch(), History", found)
    yield Fact("start", "  of that in a rank's memory", mapped / 1e6, "MB", "measured",
               "pages of mapped files (RssFile), which is what was read")  # fmt: skip
    yield from _shared(found, of_agent, metadata_rate, read_rate)


def _counted(words: list[str], env: Mapping[str, str], folder: str) -> Files:
    began = time.perf_counter()
    lines = traced(words, TRACED, env, folder)
    return _sorted(lines, folder, time.perf_counter() - began)


def _sorted(lines: list[str], folder: str, seconds: float) -> Files:
    folder = os.path.realpath(folder)
    folders = kinds(folder)
    by_kind = {kind: [] for kind in ("environment", "job", "node")}
    for call in looked_at(lines, folder):
        by_kind[kind_of(call.path, folders)].append(call)
    named = [call for call in by_kind["environment"] if call.by_name]
    opened = {call.path for call in named if call.ok and call.name in ("open", "openat")}
    return Files(
        len(named), sum(not call.ok for call in named), len(by_kind["environment"]) - len(named),
        len(opened), sum(os.path.getsize(path) for path in opened if os.path.isfile(path)),
        len(by_kind["job"]), seconds,
    )  # fmt: skip


def _last_rank(folder: str, *, trace: bool) -> tuple[Files, int]:
    """Run the script on two ranks; return what the last one did, and the bytes mapped there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(_RANKS):
        env = environment(
            PMI_RANK=str(rank), PMI_SIZE=str(_RANKS), MPI_LOCALRANKID=str(rank),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        alone = replace(CONTROL, addresses=(), device_type="", devices=0)
        env[VARIABLE] = alone.to_text()
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        ranks.append(env)
    words = ["sh", SHIM, "pmi", str(_RANKS), str(_RANKS), "PMI_RANK", "PMI_SIZE"]
    words += ["MPI_LOCALRANKID", "--", "python", "-W", "ignore", "train.py"]
    first = subprocess.Popen(
        words, env=ranks[0], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    found = Files(0, 0, 0, 0, 0, 0, 0.0)
    try:
        if trace:
            found = _counted(words, ranks[1], folder)
        else:
            subprocess.run(words, env=ranks[1], cwd=folder, check=True, capture_output=True)
        said, _ = first.communicate(timeout=300)
    finally:
        first.kill()
        first.wait()
    if first.returncode:
        raise SystemExit(f"scale: rank 0 of {words} failed")
    return found, json.loads(said.splitlines()[-1])


def _told(name: str, found: Files) -> Iterator[Found]:
    yield Fact("start", f"{name}: calls that name a file of the environment", found.calls,
               "calls", "counted",
               f"{found.failed} of them find nothing; {found.held} more on descriptors: fstat, "
               "close, lists of folders")  # fmt: skip
    yield Fact("start", f"{name}: files opened, folders too", found.opened, "files", "counted",
               f"{found.size / 1e6:,.1f} MB; {found.job} calls in the job's folder; "
               f"{found.seconds:.1f} s under strace")  # fmt: skip


def _shared(
    found: Files, of_agent: Files, metadata_rate: float, read_rate: float
) -> Iterator[Found]:
    """Yield what a rank's start means for a file system that all nodes share."""
    at = f"at {metadata_rate:,.0f} calls/s, assumed"
    reads = f"at {read_rate:,.0f} GB/s, assumed"
    total = RANKS * found.calls + NODES_IN_ALL * of_agent.calls
    yield Fact("start", "not staged: look-ups and opens of 120,960 ranks", total, "calls", "model",
               "each rank by itself, and an agent a node; what is done on descriptors comes on "
               "top")  # fmt: skip
    yield Fact("start", "  time of its metadata servers", total / metadata_rate, "s", "model", at)
    once = NODES_IN_ALL * found.calls
    yield Fact("start", "  the same, if a node's ranks share one cache", once / metadata_rate, "s",
               "model", f"{at}; negative look-ups cached, too")  # fmt: skip
    whole = NODES_IN_ALL * found.size / 1e9
    yield Fact("start", "  read by 10,080 nodes", whole, "GB", "model",
               "whole files, once a node: at most so much")  # fmt: skip
    yield Fact("start", "  time for that", whole / read_rate, "s", "model", reads)
    yield Fact("start", "staged to the nodes: opens of the shared file system", NODES_IN_ALL,
               "calls", "model", f"one archive a node, not {found.opened} files")  # fmt: skip
    left = RANKS * found.job
    yield Fact("start", "  calls in the job's folder, which stays shared", left, "calls", "model",
               f"{found.job} a rank: the script, and where Python looks for each module first; "
               f"{left / metadata_rate:,.0f} s {at}")  # fmt: skip
    yield Fact("start", "  time for the archives, each node its own", whole / read_rate, "s",
               "model", f"{reads}; not compressed; without files that no rank opens")  # fmt: skip
    yield Fact("start", "  time if one node reads it and nodes pass it on",
               14 * found.size / 1e9 / 10, "s", "model",
               "14 rounds of a binary tree of 10,080 nodes, 10 GB/s a link, assumed")  # fmt: skip
