"""The checks ``disk`` and ``shared-memory``: files can be written, and there is room for more."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

from ezpz_launch._errors import LaunchError
from ezpz_launch._records.state_folder import records_folder
from ezpz_topo import CheckResult

_TRIED = 1 << 20
"""Bytes that are written to see that they can be: no figure tells of a quota."""

_LITTLE = 1 << 30
"""Less room than this is warned about: one checkpoint of 70 million parameters with AdamW."""

SHARED_MEMORY = "/dev/shm"


def disk(_seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Write into the folders that a launch and a training write into, and see what room they have.

    These are the working directory, ``TMPDIR``, and the folder of ezpz-launch's records. What is
    written has no name, and is gone at once.
    """
    env = os.environ if env is None else env
    try:
        records = records_folder(env)
        places = {
            "the working directory": os.getcwd(),
            "TMPDIR": env.get("TMPDIR") or "/tmp",  # where ezpz-launch writes
            "the folder of records": _existing(records),
        }
    except LaunchError as error:
        return CheckResult.of(error)
    except OSError as error:
        return CheckResult.error(
            f"the working directory is gone ({error.strerror})", "change to a folder that is there"
        )
    facts: dict[str, object] = {}
    little = ""
    for what, folder in places.items():
        if why := _why_not_written(folder):
            return CheckResult.error(
                f"{folder} ({what}) cannot be written: {why}", _remedy(what), folder=folder
            )
        free = _free(folder)
        facts[what] = {"folder": folder, "free_bytes": free}
        if free < _LITTLE and not little:
            little = f"{folder} ({what}) has {_size(free)} free"
    if little:
        return CheckResult.warning(little, "remove what is old there, or go elsewhere", **facts)
    free = min(_free(folder) for folder in places.values())
    return CheckResult.ok(
        f"{_size(free)} free or more in the working directory, TMPDIR and the folder of records",
        **facts,
    )


def shared_memory(_seconds: float, *, folder: str = SHARED_MEMORY) -> CheckResult:
    """Write into the shared memory that data loaders' workers and NCCL use, and see what is free.

    Args:
        _seconds: How long it may take.
        folder: Where it is; for tests.
    """
    if not os.path.isdir(folder):
        system = os.uname().sysname
        if system == "Linux":
            return CheckResult.error(
                f"there is no {folder}: data loaders' workers and NCCL cannot share memory",
                f"mount it: mount -t tmpfs none {folder}, or ask who made this container",
            )
        return CheckResult.ok(f"{system} has no {folder}, and needs none")
    remedy = (
        f"remove what ended runs left in {folder} (ls -l {folder}); in a container: "
        "docker run --shm-size=8g, or --ipc=host"
    )
    if why := _why_not_written(folder):
        return CheckResult.error(f"{folder} cannot be written: {why}", remedy, folder=folder)
    free = _free(folder)
    facts = {"folder": folder, "free_bytes": free}
    if free < _LITTLE:
        return CheckResult.warning(
            f"{_size(free)} free in {folder}: batches of data loaders' workers, and NCCL's "
            "buffers, may not fit: a bus error then",
            remedy, **facts,
        )  # fmt: skip
    return CheckResult.ok(f"{_size(free)} free in {folder}", **facts)


def _existing(folder: str) -> str:
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def _why_not_written(folder: str) -> str:
    """Write a nameless file; return what is wrong, empty where nothing is."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_TRIED))
            file.flush()
            # What a file system over the network or a quota thinks of it, it may tell only now.
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _free(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _remedy(what: str) -> str:
    own = {
        "TMPDIR": "set TMPDIR to a folder that you may write to",
        "the folder of records": "set EZPZ_STATE_DIR to a folder that you may write to",
    }
    return f"remove what is old there; or {own.get(what, 'change to a folder that you may write')}"


def _size(count: int) -> str:
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count >> 10} KiB"
