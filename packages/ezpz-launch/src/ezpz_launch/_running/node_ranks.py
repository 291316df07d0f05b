"""The ranks of one node: who has started, who is lost, and signals that reach them.

`node` is the program that has them on another host, and imports this one by its path: it knows
the standard library alone.
"""

from __future__ import annotations

import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from . import proc
else:
    import proc  # a neighbour, whose folder `node` has put on the path

LOOK = 0.5
"""Seconds between two looks for ranks that are lost."""

_FIRST_LOOK = 0.05
"""The same while the command of a rank is still to be found."""

_MOMENT = 1.0
"""Seconds that what a rank left behind has to end."""

_NAMED = 8
"""So many of these are named."""


class NodeRanks:
    """The ranks of one node that have started and not ended.

    Args:
        launch_id: What every process of the launch has in its environment.
        launcher: The process that starts the shims of this node; 0 where that is not known.
    """

    def __init__(self, launch_id: str, launcher: int = 0) -> None:
        self._launch_id = launch_id.encode()
        self._mark = b"EZPZ_LAUNCH_ID=" + self._launch_id
        self._pids: dict[int, int] = {}
        self._leaders: set[int] = set()
        self._groups: dict[int, int] = {}
        self._born: dict[int, str] = {}
        self._ending = 0
        self._left: dict[int, int] = {}
        self._launcher = launcher
        self._parents: dict[int, int] = {}
        self._commands: dict[int, tuple[int, str]] = {}
        self._late: list[int] = []
        self._lost: set[int] = set()
        self._suspects: set[int] = set()

    def started(self, rank: int, pid: int) -> None:
        """Take note of a rank's shim."""
        self._pids[rank] = pid
        self._leaders.add(pid)
        self._born[pid] = proc.birth(pid)
        try:
            self._groups[pid] = os.getpgid(pid)
        except ProcessLookupError:
            self._groups[pid] = 0
        self._parents[pid] = proc.parent(pid)
        if self._ending:
            # It comes late: all were told to end.
            proc.send(self._target(pid), self._ending)
            self._late.append(pid)

    def ended(self, rank: int) -> None:
        """Take note of the end of a rank's command; its shim may still wait."""
        self._pids.pop(rank, None)

    def lost(self) -> list[int]:
        """Return the ranks, once each, whose end nobody would report.

        Their shim was killed while the command goes on, or the launcher's process that started the
        shim, and brings its reports, is gone. Launchers see neither by themselves (Hydra, srun).
        """
        # A shell that is just starting its command may swallow a signal: they have it again.
        while self._late:
            pid = self._late.pop()
            if pid in self._pids.values() and self._is_same(pid):
                proc.send(self._target(pid), self._ending)
        found = []
        for rank, pid in self._pids.items():
            if rank in self._lost:
                continue
            if proc.is_running(pid):
                parent = proc.parent(pid)
                is_lost = bool(parent) and parent != self._parents[pid]
                if self._launcher and parent != self._launcher:
                    # It died before we had heard of this rank.
                    is_lost = is_lost or not proc.is_running(self._launcher)
                if not self._commands.get(rank) or not proc.is_running(self._commands[rank][0]):
                    # None yet, or something that the shim ran before it.
                    self._remember_the_command(rank, pid)
            else:
                # Where the command has ended as well, its end is on the way to us.
                is_lost = self._goes_on(rank)
            if is_lost:
                self._lost.add(rank)
                found.append(rank)
        return found

    def _goes_on(self, rank: int) -> bool:
        """Whether a rank's command has outlived its shim."""
        command, born = self._commands.get(rank, (0, ""))
        if command:
            return proc.is_running(command) and proc.birth(command) == born
        # The shim died before we had seen its command. Twice: it may just be ending.
        orphans = proc.marked(self._mark, b"EZPZ_RANK=%d" % rank)
        is_suspect, self._suspects = rank in self._suspects, self._suspects | {rank}
        return is_suspect and bool(orphans)

    def next_look(self) -> float:
        """Return after how many seconds to look for lost ranks again."""
        return LOOK if self._commands.keys() >= self._pids.keys() else _FIRST_LOOK

    def _remember_the_command(self, rank: int, pid: int) -> None:
        for child in proc.children(pid):
            self._commands[rank] = (child, proc.birth(child))
            return

    def pid(self, rank: int) -> int | None:
        """Return the process id of the shim of a rank that has not ended."""
        return self._pids.get(rank)

    def signal(self, number: int) -> None:
        """Signal every rank that has not ended: its process group, where it has one.

        One that ends processes is for ranks, too, that have yet to start.
        """
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            self._ending = number
        shims = [pid for pid in self._pids.values() if self._is_same(pid)]
        meant = {} if number == signal.SIGKILL else self._meant(shims, number)
        for target in {self._target(pid) for pid in shims if pid not in meant}:
            # A group of several ranks (srun's) holds those that are told by themselves.
            if target > 0 or not meant:
                proc.send(target, number)
        for pid in shims:
            for each in meant.get(pid, proc.descendants(pid) if meant else ()):
                proc.send(each, number)

    def _meant(self, shims: list[int], number: int) -> dict[int, list[int]]:
        """Return, for each rank that has a handler for a signal, the processes that have it.

        A shell that waits for the training would die of the signal, and so would a data loader's
        worker: those with a handler are told, and decide about the others. Where there is none, all
        of the rank is to end.
        """
        found = {pid: proc.catchers(pid, number) for pid in shims}
        return {pid: catchers for pid, catchers in found.items() if catchers}

    def release(self, pid: int) -> None:
        """Let the shim of a rank that failed go."""
        if self._is_same(pid):
            proc.send(pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL every process of the launch on this node."""
        self.signal(signal.SIGKILL)
        for pid in self._all():
            proc.send(pid, signal.SIGKILL)

    def name_left(self) -> str:
        """Return the names of what ranks that have all ended left running, of each once."""
        new = [pid for pid in self._all() if pid not in self._left]
        self._left |= dict.fromkeys(new, signal.SIGTERM)
        names = [f"pid {pid} ({proc.command(pid)})" for pid in new[:_NAMED]]
        more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
        return f"{', '.join(names)}{more} on {os.uname().nodename}" if names else ""

    def end_left(self) -> None:
        """End what has been named: it has SIGTERM, and the next time SIGKILL."""
        for pid in self._all():
            if pid in self._left:
                proc.send(pid, self._left[pid])
                self._left[pid] = signal.SIGKILL

    def end_all_left(self) -> str:
        """Give all that is left a moment, end it, see that it ends, and return its names."""
        names = ""
        for _ in ("by itself", "by SIGTERM", "by SIGKILL"):
            until = time.monotonic() + _MOMENT
            while self._all():
                if time.monotonic() > until:
                    break
                time.sleep(_MOMENT / 20)
            else:
                break
            new = self.name_left()
            names = names or new
            self.end_left()
        return names

    def _all(self) -> list[int]:
        # What left its process group is found by its environment, where /proc shows it.
        return proc.of_launch(self._launch_id)

    def _target(self, pid: int) -> int:
        # Only a group that the launcher made for its ranks (srun: one for all of a node), never
        # one that we are in.
        group = self._groups[pid]
        return -group if group in self._leaders and group != os.getpgrp() else pid

    def _is_same(self, pid: int) -> bool:
        """Whether it is still the process that was reported, and not another of its number."""
        born = proc.birth(pid)
        # Where it is gone its group may still be there, and then nobody else has the number.
        return not born or born == self._born.get(pid, born)
