"""The header of an attempt of a run: the first line that it writes to the run's file."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ._context import RankInfo
from ._records import SCHEMA
from ._text import to_plain
from ._writer import PreviousContent

_PACKAGES: Final = (
    "ezpz", "ezpz_device", "ezpz_dist", "ezpz_obs", "ezpz_topo", "ezpz_tp", "torch",
    "accelerate", "deepspeed", "mpi4py", "numpy", "transformers",
)  # fmt: skip
_GIT_SECONDS: Final = 2.0  # a working tree on a busy file system is not worth more


def make_header(
    place: RankInfo,
    before: PreviousContent,
    *,
    run: str,
    project: str | None,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Return facts about this attempt. The only command is git, for 2 s at most."""
    from ezpz_topo import redact  # a rank that writes nothing does without it

    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            versions[name] = str(version)
    # By their plain form: an object's own text may hold a secret, too.
    given = redact(to_plain({"argv": sys.argv, "config": config}))
    header = {
        "ezpz_obs": SCHEMA,
        "attempt": before.attempts,
        "time": time.time(),
        "run": run,
        "rank": place.rank,
        "world_size": place.world_size,
        "host": place.host,
        **_find_environment(),
        "continues": before.last_step,
        "git": find_commit(),
        "versions": versions,
        **given,
        # ezpz-launch sets the cause of the previous attempt's end.
        "last_fault": redact(os.environ.get("EZPZ_LAST_FAULT")),
    }
    if project:
        header["project"] = project
    return header


def _find_environment() -> dict[str, Any]:
    # Not above: a rank that writes nothing does without eight modules.
    from ezpz_topo import TopoError, detect, fold_nodelist

    try:
        topology = detect(ask=False)
    except TopoError as error:  # the rank is known by now: what else there is can wait
        return {"hosts": None, "machine": None, "job": None, "unknown": str(error)}
    job = topology.allocation
    return {
        "hosts": fold_nodelist(job.hosts) or None,
        "machine": topology.machine.name,
        "job": {"scheduler": job.scheduler, "id": job.job_id, "launcher": topology.rank.launcher},
    }


def find_commit() -> dict[str, Any] | None:
    """Return the commit of the script's folder; None without a repository, git or its answer."""
    folder = Path.cwd()
    if sys.argv and Path(sys.argv[0]).is_file():
        folder = Path(sys.argv[0]).resolve().parent
    commit = _run_git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    if changes is None:
        return {"commit": commit, "dirty": None}
    return {"commit": commit, "dirty": bool(changes)}


def _run_git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=_GIT_SECONDS,
            # `status` may write the index, which is the user's.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return done.stdout.decode(errors="replace").strip()
