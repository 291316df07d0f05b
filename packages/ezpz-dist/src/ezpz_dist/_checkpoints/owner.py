"""Which job saves in a folder: one lock file, with job, host and process."""

from __future__ import annotations

import atexit
import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ezpz_dist._diagnosis import pid_namespace, stat_of
from ezpz_dist._errors import CheckpointError
from ezpz_dist._world import finish_before_leaving
from ezpz_topo import get_hostname

from .files import write_file

logger = logging.getLogger(__name__)

OWNER = "owner.json"
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "EZPZ_LAUNCH_ID", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, slots=True)
class Process:
    """A process; its start time distinguishes it from a later one with the same number."""

    host: str
    pid_namespace: int
    pid: int
    started: int  # in clock ticks since the host's start; 0 if it does not run

    @property
    def is_alive(self) -> bool | None:
        """True if it runs; None if this host cannot know."""
        namespace = pid_namespace()
        if self.host != get_hostname() or namespace == 0 or self.pid_namespace != namespace:
            return None
        return self.started == find_start(self.pid)


def find_start(pid: int) -> int:
    """Return the start time of a process; 0 if it does not run, or is not known."""
    try:
        fields = stat_of(pid)
    except OSError:
        return 0
    if fields[0] in ("Z", "X"):
        return 0
    return int(fields[19])


def find_this_process() -> Process:
    pid = os.getpid()
    return Process(get_hostname(), pid_namespace(), pid, find_start(pid))


@dataclass(frozen=True, slots=True)
class Owner:
    """The process of rank 0 of the job that saves in a folder."""

    process: Process
    job: str


_resume_sources: set[Process] = set()
"""Owners of folders that this process loaded from: it may take their place."""

_owned: set[Path] = set()


def read_owner(root: Path) -> Owner | None:
    """Return the process that saves there; None if there is none.

    Raises:
        OSError: The file exists and cannot be read.
    """
    try:
        content = (root / OWNER).read_bytes()
    except FileNotFoundError:
        return None
    # It is not flushed: after a power cut it may hold anything, and its process has ended.
    with suppress(AttributeError, LookupError, TypeError, ValueError):
        fields = json.loads(content)
        process = fields["process"]
        return Owner(
            Process(
                str(process["host"]),
                int(process["pid_namespace"]),
                int(process["pid"]),
                int(process["started"]),
            ),
            str(fields["job"]),
        )
    return None


def record_resume_source(root: Path) -> None:
    """Note that this process loads from there, and may save there next."""
    with suppress(OSError):  # loading needs no owner; the next save there reports it
        owner = read_owner(root)
        if owner is not None:
            _resume_sources.add(owner.process)


def check_owner(root: Path) -> None:
    """Refuse a folder in which another job saves."""
    owner = read_owner(root)
    if owner is None or owner.process == find_this_process() or owner.process in _resume_sources:
        return
    is_alive = owner.process.is_alive
    if is_alive is False:
        return
    job = f"{owner.job}, " if owner.job else ""
    runs = "runs" if is_alive else "may run"
    raise CheckpointError(
        f"another job saves in {root}: {job}process {owner.process.pid} on {owner.process.host}, "
        f"which {runs}; expected one job at a time: give each its own folder; to take its place, "
        f"load_checkpoint() from there first; if it has ended, remove {root}/{OWNER}"
    )


def claim(root: Path) -> None:
    """Make this process the owner of a folder, until it cleans up or ends."""
    check_owner(root)
    process = find_this_process()
    owner = read_owner(root)
    if owner is None or owner.process != process:
        variables = [name for name in _JOB_VARIABLES if os.environ.get(name)]
        job = " ".join(f"{name}={os.environ[name]}" for name in variables)
        write_file(root / OWNER, json.dumps(asdict(Owner(process, job))).encode())
    if not _owned:
        atexit.register(release_all)
    _owned.add(root)
    finish_before_leaving(release_all)


def release_all() -> None:
    """Remove the lock files of this process."""
    while _owned:
        root = _owned.pop()
        try:
            owner = read_owner(root)
            if owner is not None and owner.process == find_this_process():
                (root / OWNER).unlink(missing_ok=True)
        except OSError as error:
            logger.debug("%s/%s is not removed: %s", root, OWNER, error)
