"""What the ranks' shims report: which rank started as which process, and how it ended."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


def make_status_file(directory: str) -> str:
    """Make an empty file, readable by this user only, and return its path.

    Raises:
        OSError: The directory cannot be written.
    """
    path = os.path.join(directory, f"ezpz-launch-{os.getpid()}-{os.urandom(6).hex()}")
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    return path


@dataclass(slots=True)
class Status:
    """The reports read so far; `update` reads what is new."""

    path: str
    pids: dict[int, int] = field(default_factory=dict)
    """Rank to process id of its shim, for ranks that have not ended."""
    ended: dict[int, int] = field(default_factory=dict)
    """Rank to exit status, in the order in which they ended."""
    _offset: int = 0

    def update(self) -> None:
        """Read the reports that have come since the last call; an unfinished line waits."""
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(complete + newline)
        for line in complete.decode("ascii").splitlines():
            what, rank, value = line.split()
            if what == "start":
                self.pids[int(rank)] = int(value)
            else:
                self.ended[int(rank)] = int(value)
                self.pids.pop(int(rank), None)

    @property
    def first_failure(self) -> tuple[int, int] | None:
        """Rank and exit status of the rank that failed first, if one did."""
        return next(((rank, status) for rank, status in self.ended.items() if status), None)
