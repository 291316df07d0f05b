"""Who writes a check-point now, in a name that tells later whether the writer still lives."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ezpz_dist._errors import CheckpointError
from ezpz_dist._world import finish_before_leaving
from ezpz_topo import get_hostname

from .folder import OWNER

if TYPE_CHECKING:
    from .store import Store

logger = logging.getLogger(__name__)

_TOKEN = re.compile(r"(?P<host>.+)~(?P<space>\d+)~(?P<pid>\d+)~(?P<start>\d+)~[0-9a-f]{8}")


def owner_token() -> str:
    """Return a name for an attempt of this process: host, pid namespace, pid, start, a nonce."""
    space, start = _birth(os.getpid())
    return f"{get_hostname()}~{space}~{os.getpid()}~{start}~{uuid.uuid4().hex[:8]}"


def is_dead(token: str) -> bool | None:
    """Return whether the process that made a token has ended; None where that cannot be told.

    It can be on its own host, within one pid namespace: the process of that number is gone, or
    was started at another time.
    """
    found = _TOKEN.fullmatch(token)
    if found is None or found["host"] != get_hostname():
        return None
    space, _ = _birth(os.getpid())
    if int(found["space"]) != space or not space:
        return None
    _, start = _birth(int(found["pid"]))
    return start != int(found["start"])


@functools.lru_cache(maxsize=1)
def _pid_space() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0  # not Linux


def _birth(pid: int) -> tuple[int, int]:
    """Return our pid namespace and the process's start in clock ticks; (space, 0): none such."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return _pid_space(), 0
    # Field 2, the command, may hold spaces and parentheses; field 3 is the state, 22 the start.
    fields = text.rpartition(")")[2].split()
    return _pid_space(), 0 if fields[0] in ("Z", "X") else int(fields[19])


_RUN = ("SLURM_JOB_ID", "PBS_JOBID", "EZPZ_LAUNCH_ID", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, slots=True)
class Owner:
    """Who saves in a folder: the process of rank 0 of the run that completed the last save there.

    Attributes:
        token: Of the process.
        run: Ids of its job and launch, for people.
        step: What it saved last.
        sequence: Of that.
    """

    token: str
    run: str
    step: int
    sequence: int

    @property
    def process(self) -> str:
        """Return what tells the process from others."""
        return self.token.rpartition("~")[0]

    @property
    def is_me(self) -> bool:
        """Return whether it is this process."""
        return self.process == owner_token().rpartition("~")[0]


_followed: set[str] = set()
"""Processes whose checkpoints this one went to load: it may go on in their place."""

_owned: dict[str, Store] = {}


def read_owner(store: Store) -> Owner | None:
    """Return who saves there; None: no process, as far as can be read."""
    try:
        if store.size(OWNER) is None:
            return None
        with store.open(OWNER, "rb") as file:
            about = json.loads(file.read())
        return Owner(
            str(about["owner"]), str(about["run"]), int(about["step"]), int(about["sequence"])
        )
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError):
        return None


def follow(store: Store) -> None:
    """Note that this process loads from there, and may go on to save there."""
    if (owner := read_owner(store)) is not None:
        _followed.add(owner.process)


def refuse_other(store: Store) -> Owner | None:
    """Return who saved there last; None: no process, as far as is known.

    Raises:
        CheckpointError: It is another process, which may still run, and this one has not loaded
            what that saved.
    """
    owner = read_owner(store)
    if owner is None or owner.is_me or owner.process in _followed:
        return owner
    dead = is_dead(owner.token)
    if dead:
        return owner
    host, _, pid, _ = (owner.process.rsplit("~", 3) + ["?"] * 3)[:4]
    run = f"{owner.run}, " if owner.run else ""
    raise CheckpointError(
        f"another job saves in {store.root}: {run}process {pid} on {host}, which "
        f"{'runs' if dead is False else 'may run'} and saved step {owner.step}; expected one job "
        "at a time: give each its own folder; to go on in its place, load_checkpoint() from there "
        f"first; if it has ended, remove {store.root}/{OWNER}"
    )


def claim(store: Store, step: int, sequence: int) -> None:
    """Say that this process saves there."""
    run = " ".join(f"{name}={os.environ[name]}" for name in _RUN if os.environ.get(name))
    about = {"owner": owner_token(), "run": run, "step": step, "sequence": sequence}
    store.put(OWNER, json.dumps(about).encode())


def release_at_end(store: Store) -> None:
    """Have the claim of this process taken back when it cleans up or ends."""
    if not _owned:
        atexit.unregister(_release)
        atexit.register(_release)
    _owned[store.root] = store
    finish_before_leaving(_release)


def _release() -> None:
    while _owned:
        root, store = _owned.popitem()
        try:
            owner = read_owner(store)
            if owner is not None and owner.is_me:
                store.discard(OWNER)
        except Exception as error:  # noqa: BLE001 - a URL's store at exit; we end, which is seen
            logger.debug("%s/%s is not removed: %s", root, OWNER, error)
