"""The ranks of one node: signals that reach them, ranks that are lost, processes they left.

A rank is known by the process that its launcher started (rank_main.py); its command runs below.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ezpz_launch._run.processes import (
    children_of,
    descendants_of,
    describe,
    is_dying,
    is_running,
    parent_of,
    processes_handling,
    processes_of_launch,
    send,
    signal_is_fatal,
    start_time_of,
    wait_until_gone,
)

LOOK_SECONDS = 0.5
"""Between two looks for ranks that are lost."""

FIRST_LOOK_SECONDS = 0.05
"""The same while the process of a rank's command is still to be found."""

LEFTOVER_SECONDS = 1.0
"""That a process which a rank left behind has to end, after each signal."""

CHECKPOINT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask for a checkpoint, and end nothing."""

MAX_WATCHED = 256
"""Processes whose end is seen at once: each takes a file descriptor, of 1,024 as a rule."""

MAX_NAMED = 8
"""Processes that are named in one line."""


class MissingRanks(NamedTuple):
    """Ranks whose process has died, or what started it."""

    lost: list[int]  # nobody will report their end: their command goes on, or their launcher died
    gone: list[int]  # their command has ended as well, so a report may be on the way


class NodeRanks:
    """The ranks of a node that have started and not ended."""

    def __init__(self, launch_id: str, launcher: int = 0) -> None:
        """``launcher`` is the process that started this node's ranks; 0 if unknown."""
        self._launch_id = launch_id
        self._launcher = launcher
        self._pids: dict[int, int] = {}  # of each rank that runs
        # Of each process that was ever a rank's: its group, its start and its parent then.
        self._groups: dict[int, int] = {}
        self._births: dict[int, str] = {}
        self._parents: dict[int, int] = {}
        self._commands: dict[int, tuple[int, str]] = {}  # of each rank: process and its start
        self._reported: set[int] = set()  # ranks that were returned as lost or gone
        self._end_signal = 0
        self._started_during_shutdown: list[int] = []
        # Readable when a process ends: a rank's, or the launcher's. So a loss is seen at once.
        self._exit_fds: dict[int, int] = {}  # by process id
        self._watch_exit_of(launcher)
        # Of each checkpoint signal: the ranks' processes that cannot handle it yet.
        self._pending_signals: dict[int, set[int]] = {}

    def start(self, rank: int, pid: int) -> None:
        self._pids[rank] = pid
        self._watch_exit_of(pid)
        self._births[pid] = start_time_of(pid)
        self._parents[pid] = parent_of(pid)
        try:
            self._groups[pid] = os.getpgid(pid)
        except ProcessLookupError:
            self._groups[pid] = 0
        if self._end_signal:
            send(self._target_of(pid), self._end_signal)
            self._started_during_shutdown.append(pid)

    def end(self, rank: int) -> None:
        """Record the end of a rank's command; the rank's process may still wait for release."""
        pid = self._pids.pop(rank, 0)
        self._forget_exit_of(pid)

    def seconds_to_look(self) -> float | None:
        """Return after how many seconds to look; None while no rank runs."""
        if not self._pids:
            return None
        if self._commands.keys() >= self._pids.keys():
            return LOOK_SECONDS
        return FIRST_LOOK_SECONDS

    @property
    def exit_fds(self) -> list[int]:
        """File descriptors that become readable when a process ends that matters here."""
        return list(self._exit_fds.values())

    def _watch_exit_of(self, pid: int) -> None:
        # What is not watched is seen at the next look.
        if not pid or not hasattr(os, "pidfd_open") or len(self._exit_fds) >= MAX_WATCHED:
            return
        try:
            self._exit_fds[pid] = os.pidfd_open(pid)
        except OSError:
            return  # it is gone already, or there are too many files

    def _forget_exit_of(self, pid: int) -> None:
        fd = self._exit_fds.pop(pid, None)
        if fd is not None:
            os.close(fd)

    def find_missing(self) -> MissingRanks:
        """Return the ranks whose process, or what started it, has died: each of them once."""
        for pid in list(self._exit_fds):
            if not is_running(pid):
                self._forget_exit_of(pid)
        lost = []
        gone = []
        for rank, pid in self._pids.items():
            if rank in self._reported:
                continue
            if is_running(pid):
                self._find_command(rank, pid)
                # A launcher that ends kills its ranks first.
                if self._is_orphan(pid) and not is_dying(pid):
                    lost.append(rank)
            elif self._command_runs(rank):
                lost.append(rank)
            else:
                gone.append(rank)
        self._reported.update(lost, gone)
        return MissingRanks(sorted(lost), sorted(gone))

    def _find_command(self, rank: int, pid: int) -> None:
        """Remember the process of a rank's command, the first child that stays."""
        command, _ = self._commands.get(rank, (0, ""))
        if command and is_running(command):
            return
        for child in children_of(pid)[:1]:
            self._commands[rank] = (child, start_time_of(child))

    def _command_runs(self, rank: int) -> bool:
        command, birth = self._commands.get(rank, (0, ""))
        if not command or not is_running(command) or start_time_of(command) != birth:
            return False
        return not is_dying(command)

    def _is_orphan(self, pid: int) -> bool:
        parent = parent_of(pid)
        if parent and parent != self._parents[pid]:
            return True
        # It may have lost its parent before we were told of it.
        return self._launcher not in (0, parent) and not is_running(self._launcher)

    def signal_again(self) -> None:
        """Repeat a signal for processes that may have missed it while they started."""
        while self._started_during_shutdown:
            pid = self._started_during_shutdown.pop()
            if pid in self._pids.values() and self._is_same_process(pid):
                send(self._target_of(pid), self._end_signal)
        pending = self._pending_signals
        self._pending_signals = {}
        for number, pids in pending.items():
            self.signal(number, pids)

    def signal(self, number: int, pids: Iterable[int] = ()) -> None:
        """Signal every rank that runs: what handles the signal, else the whole process group."""
        pids = [pid for pid in pids or self._pids.values() if self._is_same_process(pid)]
        if number not in CHECKPOINT_SIGNALS:
            self._end_signal = number
        receivers: dict[int, list[int]] = {}
        for pid in pids:
            found = self._find_signal_targets(pid, number)
            if found is not None:
                receivers[pid] = found
        if not receivers:
            for target in {self._target_of(pid) for pid in pids}:
                send(target, number)
            return
        # The group of several ranks (srun's) contains ranks that are signalled singly.
        for pid in pids:
            for receiver in receivers.get(pid, descendants_of(pid)):
                send(receiver, number)

    def _find_signal_targets(self, pid: int, number: int) -> list[int] | None:
        """Return the processes of a rank that are to get a signal; None for all of them."""
        if number == signal.SIGKILL:
            return None
        handling = processes_handling(pid, number)
        if not handling and number in CHECKPOINT_SIGNALS and signal_is_fatal(pid, number):
            # The rank still imports torch: it gets the signal when it can handle it.
            self._pending_signals.setdefault(number, set()).add(pid)
            return []
        return handling or None

    def release_failed_rank(self, pid: int) -> None:
        """Let a failed rank's process end."""
        if self._is_same_process(pid):
            send(pid, signal.SIGTERM)

    def kill_ranks(self) -> None:
        """Kill the ranks, and everything that has the launch's id in its environment."""
        self.signal(signal.SIGKILL)
        for pid in processes_of_launch(self._launch_id):
            send(pid, signal.SIGKILL)

    def end_leftover_processes(self, report: Callable[[str], None]) -> None:
        """End what the ranks left running after they have all ended; report each process once."""
        reported: set[int] = set()
        for number in (0, signal.SIGTERM, signal.SIGKILL):  # at first it may end by itself
            leftovers = processes_of_launch(self._launch_id)
            if number:
                new = [pid for pid in leftovers if pid not in reported]
                reported.update(new)
                if new:
                    report(_names_of(new))
                for pid in leftovers:
                    send(pid, number)
            if wait_until_gone(lambda: processes_of_launch(self._launch_id), LEFTOVER_SECONDS):
                return

    def process_of(self, rank: int) -> int | None:
        return self._pids.get(rank)

    def _target_of(self, pid: int) -> int:
        """Return a rank's process group, negative, if the launcher made one; else its process."""
        group = self._groups[pid]
        if group in self._groups:
            return -group
        return pid

    def _is_same_process(self, pid: int) -> bool:
        """False if another process has the number now."""
        birth = start_time_of(pid)
        # If it is gone its group may still exist, and then no other process has the number.
        return not birth or birth == self._births.get(pid, birth)


def _names_of(pids: list[int]) -> str:
    names = ", ".join(map(describe, pids[:MAX_NAMED]))
    more = f" and {len(pids) - MAX_NAMED} more" if len(pids) > MAX_NAMED else ""
    return f"{names}{more} on {os.uname().nodename}"
