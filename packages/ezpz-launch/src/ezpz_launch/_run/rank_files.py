"""The ranks' files in --log-dir."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ezpz_launch._errors import LaunchError
from ezpz_launch._run.record import why_not_written

TAIL_BYTES = 1 << 13
TAIL_LINES = 20
"""Lines of a rank's file that are shown when it has failed."""


def make_log_dir(option: str, folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        why = why_not_written(folder)
    except OSError as error:
        why = str(error.strerror)
    if why:
        raise LaunchError(f"{option} {folder}: {why}; expected a folder that can be written")


def file_sizes(folder: str) -> dict[str, int]:
    """Return the sizes of existing log files, so that only new output is read."""
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def read_tail(folder: str, rank: int, before: Mapping[str, int]) -> bytes:
    name = f"rank-{rank}.err"
    try:
        with open(os.path.join(folder, name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(before.get(name, 0), size - TAIL_BYTES))
            return file.read()
    except OSError:
        return b""  # on a disk of another host
