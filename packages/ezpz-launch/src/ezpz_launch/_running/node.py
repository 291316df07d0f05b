"""The ranks of one node: signal them, end them, and ask them where they hang.

ezpz-launch uses it for ranks on its own host. For those of other hosts it is a program as well,
``python -I -S node.py NODE``, that the first rank's shim of each node starts in the background:
it connects to ezpz-launch, takes its orders, and when the connection ends without a farewell,
because ezpz-launch was killed or its host is gone, it kills the ranks. It knows the standard
library alone. Launchers signal by themselves, but srun and Open MPI kill within half a second of
SIGTERM, and torchrun dies of SIGUSR1.
"""

from __future__ import annotations

import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from . import proc
else:
    # As a program it knows no package, only its neighbours.
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import proc

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from types import ModuleType

PROTOCOL_LINE = 4096
"""Longest line of the protocol, in bytes."""

_CONNECT_TIMEOUT = 5.0
LOOK = 0.5
"""Seconds between two looks for ranks that are lost."""

_FIRST_LOOK = 0.05
"""The same while the command of a rank is still to be found."""

_SETTLED = 0.2
"""Seconds before it connects: a launch of `true` needs none, and pays nothing."""


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
            _kill(self._target(pid), self._ending)
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
                _kill(self._target(pid), self._ending)
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
                _kill(target, number)
        for pid in shims:
            for each in meant.get(pid, proc.descendants(pid) if meant else ()):
                _kill(each, number)

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
            _kill(pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL every process of the launch on this node."""
        self.signal(signal.SIGKILL)
        # What left its process group is found by its environment, where /proc shows it.
        for pid in (*proc.marked(self._mark), *proc.inside(self._launch_id)):
            _kill(pid, signal.SIGKILL)

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


def _kill(target: int, number: int) -> None:
    try:
        os.kill(target, number)
    except (ProcessLookupError, PermissionError):
        # Gone, or no longer ours: a rank may have changed its user.
        return


def main() -> int:
    """Serve ezpz-launch on this node until it says farewell."""
    # What started the shim that started us, and this node's other shims.
    launcher = proc.parent(os.getppid())
    if os.fork():
        # No child of the shim: it is none of the rank's processes.
        return 0
    os.setsid()
    # The launcher's own pipes and sockets among them: it would wait for their end.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    for number in (*ending, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    fields = os.environ["EZPZ_CONTROL"].split("\n")
    launch_id, addresses, token, answer = fields[0], fields[4], fields[5], fields[6]
    time.sleep(_SETTLED)
    connection = _connect(addresses.split())
    if connection is None:
        # The launch is over, or its host cannot be reached; ezpz-launch says so if it matters.
        return 0
    ranks = NodeRanks(launch_id, launcher)
    try:
        connection.sendall(f"hello {token} {sys.argv[1]}\n".encode())
        lines = _lines(connection, ranks)
        if next(lines, "") != f"welcome {answer}":
            return 1
        for line in lines:
            reply = obey(ranks, line.split())
            if reply is None:
                return 0
            connection.sendall(reply)
    except OSError:
        pass  # reset instead of closed: the same
    ranks.kill()
    return 1


def _lines(connection: socket.socket, ranks: NodeRanks) -> Iterator[str]:
    """Return ezpz-launch's orders; while there are none, tell it of ranks that are lost."""
    received = b""
    while True:
        connection.settimeout(ranks.next_look())
        line, newline, rest = received.partition(b"\n")
        if newline:
            received = rest
            yield line.decode("ascii")
            continue
        try:
            chunk = connection.recv(1 << 16)
        except TimeoutError:
            for rank in ranks.lost():
                connection.sendall(f"lost {rank}\n".encode())
            continue
        if not chunk:
            return
        received += chunk


def obey(ranks: NodeRanks, words: list[str]) -> bytes | None:
    """Carry out one order and return what is to be answered; None for a farewell."""
    numbers = [int(word) for word in words[1:]]
    match words[0]:
        case "start":
            ranks.started(*numbers)
        case "end":
            ranks.ended(*numbers)
        case "signal":
            ranks.signal(*numbers)
        case "release":
            ranks.release(*numbers)
        case "kill":
            ranks.kill()
        case "stacks":
            text = stacks(ranks, numbers)
            return b"stacks %d\n%s" % (len(text), text)
        case "farewell":
            return None
    return b""


def stacks(ranks: NodeRanks, which: list[int]) -> bytes:
    """Return the Python stacks of these ranks; those that cannot be read print their own."""
    tool = _stacks_module()
    py_spy = tool.find_py_spy(os.environ.get("PATH", ""), os.path.dirname(sys.executable))
    texts = []
    for rank in which:
        pid = ranks.pid(rank)
        if pid is None:
            continue
        # All of them within the run loop's patience.
        text = tool.dump(pid, py_spy, bound=max(1.0, 10.0 / len(which)))
        if text is not None:
            texts.append(f"rank {rank}:\n{text.rstrip()}\n")
            continue
        # faulthandler prints it on the rank's own standard error.
        for process in tool.python_processes(pid):
            _kill(process, signal.SIGABRT)
    return "".join(texts).encode(errors="replace")


def _stacks_module() -> ModuleType:
    return __import__(f"{__package__}.stacks" if __package__ else "stacks", fromlist=["dump"])


def _connect(addresses: list[str]) -> socket.socket | None:
    import socket  # noqa: PLC0415  # ezpz-launch itself loads this module, and needs none

    # Of thousands that come at once some find no room.
    for attempt, address in enumerate(addresses * 3):
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT)
        except ConnectionRefusedError:
            continue  # the launch is over
        except OSError:
            time.sleep(attempt + int.from_bytes(os.urandom(1), "little") / 256)
            continue
        connection.settimeout(None)
        keep_alive(connection)
        return connection
    return None


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel find out within about a minute that the other host is gone."""
    import socket  # noqa: PLC0415

    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


if __name__ == "__main__":
    sys.exit(main())
