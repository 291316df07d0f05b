"""The first line of each attempt: where, with what, and of which commit it ran."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from ezpz_obs._context import Place
from ezpz_obs._records.file import Before
from ezpz_obs._records.lines import SCHEMA, encode_anything
from ezpz_topo import TopoError, detect, fold_nodelist, redact

_WORTH_KNOWING = (
    "ezpz", "ezpz_device", "ezpz_dist", "ezpz_obs", "ezpz_topo", "ezpz_tp", "torch",
    "accelerate", "deepspeed", "mpi4py", "numpy", "transformers",
)  # fmt: skip
_GIT_SECONDS = 2.0  # a working tree on a busy file system is not worth more


def make_header(
    place: Place, before: Before, *, run: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what is known of this attempt. No command is started but rank 0's git, for 2 s."""
    return {
        "ezpz_obs": SCHEMA,
        "attempt": before.attempts,
        "time": time.time(),
        "run": run,
        "rank": place.rank,
        "world_size": place.world_size,
        "host": place.host,
        **_surroundings(),
        "continues": before.last_step,
        # git looks at every file of the folder, which all ranks share.
        "git": find_commit() if place.rank == 0 else None,
        "versions": _versions(),
        # As it will stand in the file: what an object says of itself may hold a secret, too.
        **redact(orjson.loads(encode_anything({"argv": sys.argv, "config": config}))),
    }


def _surroundings() -> dict[str, Any]:
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
    """Return the commit of the script's folder, and whether files of it were changed.

    None where there is no repository, no git, or no answer within 2 s.
    """
    script = Path(sys.argv[0] if sys.argv and sys.argv[0] else ".")
    folder = script.resolve().parent if script.is_file() else Path.cwd()
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, check=False,
            stdin=subprocess.DEVNULL, timeout=_GIT_SECONDS,
            # `status` may write the index, which is the user's.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    """Return the versions of what this process has imported already."""
    found = {"python": platform.python_version()}
    for name in _WORTH_KNOWING:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found
