"""The check ``versions``: every host of the allocation has the same Python, torch and ezpz."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping

from ezpz_topo import CheckResult, TopoError, fold_nodelist, get_allocation, get_rank_info

from .command import Ended, run

PACKAGES = ("torch", "ezpz-suite", "ezpz-topo", "ezpz-device", "ezpz-tp", "ezpz-dist",
            "ezpz-launch", "ezpz-obs", "mpi4py", "numpy")  # fmt: skip

# One write a rank, so that lines do not mix. torch itself takes a second to import.
PROGRAM = f"""\
import importlib.metadata, json, os, sys
found = {{"python": sys.version.split()[0]}}
for name in {PACKAGES!r}:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = "not installed"
host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
sys.stdout.write("ezpz-versions " + json.dumps([host, found]) + chr(10))
"""

_MARK = "ezpz-versions "


def check(seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Start one process on each host of the allocation, and compare what is installed there.

    Args:
        seconds: How long it may take.
        env: The environment to read, and the processes'; default ``os.environ``.
    """
    env = os.environ if env is None else env
    try:
        job, rank = get_allocation(env, ask=False), get_rank_info(env)
    except TopoError as error:
        return CheckResult.of(error)
    if job.num_nodes < 2:
        return CheckResult.ok("one host: nothing to compare")
    if rank.world_size > 1:
        return CheckResult.ok("not compared: this is one of several ranks", hosts=list(job.hosts))
    words = [sys.executable, "-P", "-m", "ezpz_launch", "--ppn=1", "--grace=0.5", sys.executable,
             "-P", "-c", PROGRAM]  # fmt: skip
    # All hosts of the job are asked, whichever a hostfile would choose.
    mine = {name: value for name, value in env.items() if name != "HOSTFILE"}
    with tempfile.TemporaryDirectory(prefix="ezpz-doctor-") as state:
        # The records of launches are the user's own.
        ended = run(words, {**mine, "EZPZ_STATE_DIR": state}, 0.7 * seconds, grace=0.15 * seconds)
    return judge(job.hosts, ended, seconds)


def judge(hosts: tuple[str, ...], ended: Ended, seconds: float) -> CheckResult:
    """Compare what the processes of these hosts said."""
    found = said(ended.stdout)
    facts = {"hosts": list(hosts), "versions": found}
    differing = _differing(found)
    if differing:
        return CheckResult.error(
            differing,
            "use one environment on all hosts: on a file system that they share, or the same "
            "module or container on each",
            **facts,
        )
    if ended.status is None:
        return CheckResult.warning(
            f"{len(found)} of {len(hosts)} hosts answered in {0.7 * seconds:.1f} s",
            "give them more time: ezpz doctor --timeout=120 --only=versions",
            **facts,
        )
    if ended.status or len(found) < len(hosts):
        return CheckResult.error(
            f"{len(found)} of {len(hosts)} hosts told their versions, and ezpz-launch ended with "
            f"{ended.status}: {ended.last_words}",
            f"see what is wrong there: ezpz-launch --ppn 1 {sys.executable} --version",
            **facts,
        )
    shown = next(iter(found.values()))
    return CheckResult.ok(
        f"Python {shown['python']}, torch {shown['torch']} and ezpz's packages are the same on "
        f"{len(found)} hosts",
        **facts,
    )


def said(output: str) -> dict[str, dict[str, str]]:
    """Return host -> package -> version."""
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    return dict(json.loads(line.removeprefix(_MARK)) for line in lines)


def _differing(found: Mapping[str, Mapping[str, str]]) -> str:
    """Say which package differs first, and on which hosts; empty where none does."""
    for name in ("python", *PACKAGES):
        hosts_of: dict[str, list[str]] = {}
        for host, versions in found.items():
            hosts_of.setdefault(versions[name], []).append(host)
        if len(hosts_of) > 1:
            most = sorted(hosts_of.items(), key=lambda item: -len(item[1]))
            told = [f"{version} on {_fold(hosts)}" for version, hosts in most]
            return f"{name} is {', '.join(told[:4])}"
    return ""


def _fold(hosts: list[str]) -> str:
    folded = fold_nodelist(hosts)
    return folded if len(folded) <= 60 else f"{len(hosts)} hosts ({folded[:40]}...)"
