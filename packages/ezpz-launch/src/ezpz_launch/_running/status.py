"""Which ranks have started, which have ended, and how."""

from __future__ import annotations

from .reports import Report


class Status:
    """What the reports say so far.

    Attributes:
        nproc: Number of ranks.
        pids: Rank to process id of its shim, for ranks that have started.
        ended: Rank to exit status, in the order in which they ended.
    """

    def __init__(self, nproc: int) -> None:
        self.nproc = nproc
        self.pids: dict[int, int] = {}
        self.ended: dict[int, int] = {}

    def take(self, report: Report) -> bool:
        """Take a report in; return whether it is new (each comes twice)."""
        what, rank, value = report
        table = self.pids if what == "start" else self.ended
        if rank in table or rank >= self.nproc:
            return False
        table[rank] = value
        return True

    @property
    def first_failure(self) -> tuple[int, int] | None:
        """Rank and exit status of the rank that failed first, if one did."""
        return next(((rank, status) for rank, status in self.ended.items() if status), None)

    @property
    def running(self) -> list[int]:
        """Ranks that have started and not ended."""
        return [rank for rank in sorted(self.pids) if rank not in self.ended]

    @property
    def held(self) -> list[int]:
        """Ranks that failed, and whose shims wait to be released."""
        return [rank for rank, status in self.ended.items() if status]

    @property
    def all_ended(self) -> bool:
        """Whether every rank has ended."""
        return len(self.ended) == self.nproc
