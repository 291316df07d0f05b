"""Which ranks have started, which have ended, and how."""

from __future__ import annotations

from .reports import Report


class Status:
    """What the reports say so far.

    Attributes:
        nproc: Number of ranks.
        pids: Rank to process id of its shim, for ranks that have started.
        ended: Rank to exit status, in the order in which they ended.
        first_failure: Rank and exit status of the rank that failed first, if one did.
    """

    def __init__(self, nproc: int) -> None:
        self.nproc = nproc
        self.pids: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.first_failure: tuple[int, int] | None = None
        self._causes: dict[int, int] = {}
        # Kept, not computed: the run loop asks many times, of up to 120,960 ranks.
        self._running: dict[int, None] = {}

    def take(self, report: Report) -> bool:
        """Take a report in; return whether it is a new start or end (each comes twice)."""
        what, rank, value = report
        if what == "cause":
            if value < self.nproc:
                self._causes[rank] = value
            return False
        table = self.pids if what == "start" else self.ended
        if rank in table or rank >= self.nproc:
            return False
        table[rank] = value
        if what != "start":
            self._running.pop(rank, None)
            if value and self.first_failure is None:
                # Who leaves because of another may be quicker, and ends with its status.
                self.first_failure = (self._causes.get(rank, rank), value)
        elif rank not in self.ended:
            self._running[rank] = None
        return True

    @property
    def has_running(self) -> bool:
        """Whether a rank has started and not ended."""
        return bool(self._running)

    @property
    def running(self) -> list[int]:
        """Ranks that have started and not ended."""
        return sorted(self._running)

    @property
    def held(self) -> list[int]:
        """Ranks that failed, and whose shims wait to be released."""
        return [rank for rank, status in self.ended.items() if status]

    @property
    def unstarted(self) -> list[int]:
        """Ranks that have neither started nor ended."""
        return [r for r in range(self.nproc) if r not in self.pids and r not in self.ended]

    @property
    def all_ended(self) -> bool:
        """Whether every rank has ended."""
        return len(self.ended) == self.nproc
