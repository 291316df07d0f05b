"""Program: the agent of a node, which signals, ends and looks at its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator


# Processes as /proc shows them; where there is none, little is known.

_WAITING = ("sh", "bash", "dash", "zsh", "ksh", "busybox", "time", "timeout", "env", "nice")
"""Programs that only wait for another one."""


def is_running(pid: int) -> bool:
    """Whether a process is there, and not only waited for."""
    fields = _stat(pid)
    if fields:
        return fields[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not os.path.exists("/proc/self/stat")


def parent_of(pid: int) -> int:
    """Return the process that a process is a child of now; 0 where /proc does not tell."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def children_of(pid: int) -> list[int]:
    """Return the children of a process; none where the kernel does not list them."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except (OSError, ValueError):
        return []


def birth_of(pid: int) -> str:
    """Return when a process started, in ticks; empty where it is gone, or /proc is absent."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def _stat(pid: int) -> list[str]:
    """Return the fields of proc(5)'s stat from the state on; none where there are none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name may hold anything, so count from its end.
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def command_of(pid: int) -> str:
    """Return what a process is known by: no options, whose values may be secrets."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            words = file.read().split("\0")
    except OSError:
        return ""
    named = words[:1]
    for word in words[1:3]:
        if word.startswith("-") or set(word) & set("=:@"):
            break
        named.append(word)
    text = " ".join(map(os.path.basename, named)).strip()[:80]
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def marked(*marks: bytes) -> list[int]:
    """Return the processes that were started with these variables; none where /proc is absent."""
    return [pid for pid, environment in _environments() if set(marks) <= set(environment)]


def of_launch(launch_id: bytes) -> list[int]:
    """Return the processes of a launch, and of launches inside its ranks.

    Not of another job: one that a rank has submitted has that rank's environment.
    """
    found, job = [], _job([b"%s=%s" % pair for pair in os.environb.items()])
    for pid, environment in _environments():
        for variable in environment if _job(environment) <= job else ():
            name, _, value = variable.partition(b"=")
            if name in (b"EZPZ_LAUNCH_ID", b"EZPZ_INSIDE") and launch_id in value.split(b":"):
                found.append(pid)
                break
    return found


def _job(environment: list[bytes]) -> set[bytes]:
    return {each for each in environment if each.startswith((b"PBS_JOBID=", b"SLURM_JOB_ID="))}


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    """Return each other process that we may look into, with what it was started with."""
    try:
        names = os.listdir("/proc")
    except FileNotFoundError:
        return
    for name in names:
        if name.isdecimal() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    environment = file.read().split(b"\0")
            except OSError:
                continue  # gone, or another user's
            yield int(name), environment


def catchers(shim: int, number: int) -> list[int]:
    """Return the processes of a rank that have a handler for a signal, and that it is meant for.

    That is what the shells and the like below a shim wait for, if it has one; not what it started
    itself: a data loader's worker has a handler of torch's, and would die of its own.
    """
    found, looked_at = [], children_of(shim)
    for pid in looked_at:
        pumps = _is_pump(pid)
        if catches(pid, number) and not pumps:
            found.append(pid)
        elif pumps or _only_waits(pid):
            looked_at += children_of(pid)
    return found


def descendants(pid: int) -> list[int]:
    """Return a process and all that descends from it."""
    found = [pid]
    for each in found:
        found += children_of(each)
    return found


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False where /proc does not tell."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError):
        pass  # gone, or no Linux
    return False


def _only_waits(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in _WAITING
    except OSError:
        return False


def _is_pump(pid: int) -> bool:
    """Whether it is our own, which hears every signal and acts on none."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    return words[1:3] == [b"-I", b"-S"] and any(b"rank_output" in word for word in words[3:5])


def send(target: int, number: int) -> None:
    """Signal a process, or the group of a negative number, if it is there."""
    try:
        os.kill(target, number)
    except (ProcessLookupError, PermissionError):
        # Gone, or no longer ours: a rank may have changed its user.
        return


# Where does a rank hang: find its Python processes and ask py-spy for their stacks.

BOUND = 10.0
"""Seconds for all of a rank's dumps together."""

_DEEPER = 4
"""How many children of the training processes are dumped: a few data loader workers say it all."""

_BYSTANDERS = ("multiprocessing.resource_tracker", "torch/_inductor/compile_worker")
"""Python processes that libraries start beside the training, and that only ever wait."""


def find_py_spy(path: str, beside: str = "") -> str | None:
    """Find py-spy.

    Args:
        path: The rank's PATH.
        beside: Directory of this environment's commands, for a venv that is not activated.
    """
    for directory in (*path.split(os.pathsep), beside):
        program = os.path.join(directory, "py-spy")
        if directory and os.path.isfile(program) and os.access(program, os.X_OK):
            return program
    return None


def python_processes(pid: int) -> list[int]:
    """Return a rank's Python processes: the training's own first, then a few of their children.

    Args:
        pid: The rank's shim.
    """
    training, deeper = _family(pid)
    return training + deeper


def dump(pid: int, py_spy: str | None, *, bound: float = BOUND) -> str | None:
    """Return the Python stacks of a rank's processes, under a line for each process.

    Args:
        pid: The rank's shim.
        py_spy: Where py-spy is, if it is.
        bound: Seconds after which a process that does not answer is given up.

    Returns:
        None where a training process could not be asked, or there is none: without py-spy, or
        where it may not trace (Yama's ptrace_scope, a container), or does not know this Python.
    """
    training, deeper = _family(pid)
    if py_spy is None or not training:
        return None
    asked: list[tuple[int, subprocess.Popen[bytes]]] = []
    parts: list[str] = []
    end = time.monotonic() + bound
    try:
        # All at once: each waits for a process of its own.
        asked.extend((process, _ask(py_spy, process)) for process in training + deeper)
        for process, answer in asked:
            text = _answer(answer, end)
            if text is None and process in training:
                return None
            if text is None:
                text = "py-spy got no stack of it"
            parts.append(f"rank's process {process}: {_title(process)}\n{text}\n")
    except OSError:
        return None  # py-spy itself cannot be started
    finally:
        for _, answer in asked:
            answer.kill()
            answer.communicate()
    return "\n".join(parts)


def _ask(py_spy: str, process: int) -> subprocess.Popen[bytes]:
    words = [py_spy, "dump", "--pid", str(process)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(words, stdin=null, stdout=pipe, stderr=null)


def _answer(answer: subprocess.Popen[bytes], end: float) -> str | None:
    try:
        out, _ = answer.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    text = out.decode(errors="replace").strip()
    if answer.returncode != 0 or not text:
        return None
    # Its first lines tell the command, which our own line does in one.
    _, version, stacks = text.partition("\nPython v")
    return f"Python {stacks}" if version else text


def _family(pid: int) -> tuple[list[int], list[int]]:
    """Return the first Python process in each branch below PID, and some of those below them."""
    parents = _by_proc() or _by_ps()
    children: dict[int, list[int]] = {}
    for process, parent in sorted(parents.items()):
        children.setdefault(parent, []).append(process)
    training: list[int] = []
    deeper: list[int] = []
    level = [(child, False) for child in children.get(pid, [])]
    while level:
        following: list[tuple[int, bool]] = []
        for process, below in level:
            counts = _is_python(process) and not _is_ours_or_bystander(process)
            if counts:
                (deeper if below else training).append(process)
            following.extend((child, below or counts) for child in children.get(process, []))
        level = following
    return training, deeper[:_DEEPER]


def _by_proc() -> dict[int, int]:
    """Return each process's parent as Linux lists them; nothing where there is no /proc."""
    parents: dict[int, int] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return parents
    for name in names:
        if not name.isdigit():
            continue
        # "PID (COMMAND) STATE PPID ...": a command may hold spaces and brackets.
        facts = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
        if facts and facts[0] != b"Z":
            parents[int(name)] = int(facts[1])
    return parents


def _by_ps() -> dict[int, int]:
    """Return each process's parent as ps lists them."""
    parents: dict[int, int] = {}
    for line in _ps("-axo", "pid=,ppid=,stat=").splitlines():
        process, parent, state = line.split()[:3]
        if not state.startswith("Z"):
            parents[int(process)] = int(parent)
    return parents


def _is_python(process: int) -> bool:
    """Whether a Python interpreter runs in it; its name says nothing, training renames itself."""
    if not os.path.isdir("/proc/self"):
        program = _ps("-wwo", "comm=", "-p", str(process)).strip()
    else:
        try:
            program = os.readlink(f"/proc/{process}/exe")
        except OSError:
            return False
    name = os.path.basename(program).lower()
    # The second: a program with an interpreter inside.
    return name.startswith(("python", "pypy")) or b"/libpython" in _read(f"/proc/{process}/maps")


def _is_ours_or_bystander(process: int) -> bool:
    words = _words(process)
    # The pump of the rank's output stands between the shim and the command.
    ours = words[1:3] == ["-I", "-S"] and any("rank_output" in word for word in words[3:5])
    return ours or any(name in word for name in _BYSTANDERS for word in words)


def _words(process: int) -> list[str]:
    line = _read(f"/proc/{process}/cmdline")
    if line:
        return os.fsdecode(line).rstrip("\0").split("\0")
    return _ps("-wwo", "command=", "-p", str(process)).split()


def _title(process: int) -> str:
    """Return its command on one line, as text that can be written anywhere."""
    line = " ".join(" ".join(_words(process)).split())
    line = "".join(letter if letter.isprintable() else "?" for letter in line)
    return line if len(line) <= 200 else f"{line[:197]}..."


def _read(path: str) -> bytes:
    """Return what /proc has there; nothing for a process that has gone or is not ours."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _ps(*options: str) -> str:
    try:
        done = subprocess.run(
            ["ps", *options], capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


# The ranks of one node: who has started, who is lost, and signals that reach them.


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
        self._born[pid] = birth_of(pid)
        try:
            self._groups[pid] = os.getpgid(pid)
        except ProcessLookupError:
            self._groups[pid] = 0
        self._parents[pid] = parent_of(pid)
        if self._ending:
            # It comes late: all were told to end.
            send(self._target(pid), self._ending)
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
                send(self._target(pid), self._ending)
        found = []
        for rank, pid in self._pids.items():
            if rank in self._lost:
                continue
            if is_running(pid):
                parent = parent_of(pid)
                is_lost = bool(parent) and parent != self._parents[pid]
                if self._launcher and parent != self._launcher:
                    # It died before we had heard of this rank.
                    is_lost = is_lost or not is_running(self._launcher)
                if not self._commands.get(rank) or not is_running(self._commands[rank][0]):
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
            return is_running(command) and birth_of(command) == born
        # The shim died before we had seen its command. Twice: it may just be ending.
        orphans = marked(self._mark, b"EZPZ_RANK=%d" % rank)
        is_suspect, self._suspects = rank in self._suspects, self._suspects | {rank}
        return is_suspect and bool(orphans)

    def next_look(self) -> float:
        """Return after how many seconds to look for lost ranks again."""
        return LOOK if self._commands.keys() >= self._pids.keys() else _FIRST_LOOK

    def _remember_the_command(self, rank: int, pid: int) -> None:
        for child in children_of(pid):
            self._commands[rank] = (child, birth_of(child))
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
                send(target, number)
        for pid in shims:
            for each in meant.get(pid, descendants(pid) if meant else ()):
                send(each, number)

    def _meant(self, shims: list[int], number: int) -> dict[int, list[int]]:
        """Return, for each rank that has a handler for a signal, the processes that have it.

        A shell that waits for the training would die of the signal, and so would a data loader's
        worker: those with a handler are told, and decide about the others. Where there is none, all
        of the rank is to end.
        """
        found = {pid: catchers(pid, number) for pid in shims}
        return {pid: catchers for pid, catchers in found.items() if catchers}

    def release(self, pid: int) -> None:
        """Let the shim of a rank that failed go."""
        if self._is_same(pid):
            send(pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL every process of the launch on this node."""
        self.signal(signal.SIGKILL)
        for pid in self._all():
            send(pid, signal.SIGKILL)

    def name_left(self) -> str:
        """Return the names of what ranks that have all ended left running, of each once."""
        new = [pid for pid in self._all() if pid not in self._left]
        self._left |= dict.fromkeys(new, signal.SIGTERM)
        names = [f"pid {pid} ({command_of(pid)})" for pid in new[:_NAMED]]
        more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
        return f"{', '.join(names)}{more} on {os.uname().nodename}" if names else ""

    def end_left(self) -> None:
        """End what has been named: it has SIGTERM, and the next time SIGKILL."""
        for pid in self._all():
            if pid in self._left:
                send(pid, self._left[pid])
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
        return of_launch(self._launch_id)

    def _target(self, pid: int) -> int:
        # Only a group that the launcher made for its ranks (srun: one for all of a node), never
        # one that we are in.
        group = self._groups[pid]
        return -group if group in self._leaders and group != os.getpgrp() else pid

    def _is_same(self, pid: int) -> bool:
        """Whether it is still the process that was reported, and not another of its number."""
        born = birth_of(pid)
        # Where it is gone its group may still be there, and then nobody else has the number.
        return not born or born == self._born.get(pid, born)


# One node's agent: it signals the node's ranks, ends them, and asks them where they hang.


PROTOCOL_LINE = 4096
"""Longest line of the protocol, in bytes."""

_CONNECT_TIMEOUT = 5.0

_SETTLED = 0.2
"""Seconds before it connects: a launch of `true` needs none, and pays nothing."""


def main() -> int:
    """Serve ezpz-launch on this node until it says farewell."""
    # What started the shim that started us, and this node's other shims.
    launcher = parent_of(os.getppid())
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
    launch_id, addresses, secret = fields[0], fields[4], fields[5]
    time.sleep(_SETTLED)
    # ezpz-launch is to say first that we are lost: our ranks' end is no failure of theirs.
    connection = _connect(addresses.split(), 2 * int(fields[6]))
    ranks = NodeRanks(launch_id, launcher)
    if connection is None:
        # The launch is over, or its host cannot be reached; ezpz-launch says so if it matters.
        while launcher and is_running(launcher):
            time.sleep(1)
        if launcher:
            ranks.end_all_left()
        return 0
    try:
        lines = _lines(connection, ranks)
        if not _is_welcome(connection, lines, secret, int(sys.argv[1])):
            return 1
        for line in lines:
            reply = obey(ranks, line.split())
            if reply is None:
                return 0
            connection.sendall(reply)
    except (OSError, ValueError, TypeError, LookupError):
        pass  # reset instead of closed, or no orders of ezpz-launch: the same
    ranks.kill()
    return 1


def _is_welcome(connection: socket.socket, lines: Iterator[str], secret: str, node: int) -> bool:
    """Show ezpz-launch that we know the node's secret; return whether it knows it, too."""
    import hmac  # noqa: PLC0415  # as socket

    challenge, own = next(lines, "").partition(" ")[2], os.urandom(16).hex()
    shown = proof(secret, node, "agent", challenge, own)
    connection.sendall(f"hello {node} {own} {shown}\n".encode())
    expected = f"welcome {proof(secret, node, 'launch', own, challenge)}"
    return hmac.compare_digest(next(lines, ""), expected)


def proof(secret: str, node: int, *words: str) -> str:
    """Return what only one can say to these words who knows a node's secret.

    Each node's is made of the launch's; neither goes over the network.
    """
    import hmac  # noqa: PLC0415

    of_node = hmac.digest(secret.encode(), b"node %d" % node, "sha256")
    return hmac.digest(of_node, " ".join(words).encode(), "sha256").hex()


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
        case "farewell":
            return None
        case "stacks":
            text = stacks(ranks, numbers)
        case "left":
            text = ranks.name_left().encode()
        case order:
            _obey_silently(ranks, order, numbers)
            return b""
    return b"stacks %d\n%s" % (len(text), text)


def _obey_silently(ranks: NodeRanks, order: str, numbers: list[int]) -> None:
    match order:
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
        case "end-left":
            ranks.end_left()
        case "end-all-left":
            ranks.end_all_left()


def stacks(ranks: NodeRanks, which: list[int]) -> bytes:
    """Return the Python stacks of these ranks; those that cannot be read print their own."""
    py_spy = find_py_spy(os.environ.get("PATH", ""), os.path.dirname(sys.executable))
    texts = []
    for rank in which:
        pid = ranks.pid(rank)
        if pid is None:
            continue
        # All of them within the run loop's patience.
        text = dump(pid, py_spy, bound=max(1.0, 10.0 / len(which)))
        if text is not None:
            texts.append(f"rank {rank}:\n{text.rstrip()}\n")
            continue
        # faulthandler prints it on the rank's own standard error.
        for process in python_processes(pid):
            send(process, signal.SIGABRT)
    return "".join(texts).encode(errors="replace")


def _connect(addresses: list[str], timeout: int) -> socket.socket | None:
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
        keep_alive(connection, timeout)
        return connection
    return None


def keep_alive(connection: socket.socket, timeout: int) -> None:
    """Let the kernel end a connection to a host that has not answered for so many seconds.

    Kernels ask and answer by themselves: a host that is busy or suspended is not lost.
    """
    import socket  # noqa: PLC0415

    often = max(1, timeout // 7)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", often),
        ("TCP_KEEPINTVL", often),
        ("TCP_KEEPCNT", timeout // often - 1),
        # In milliseconds: what was sent and is not taken, which no other of these bounds.
        ("TCP_USER_TIMEOUT", 1000 * (timeout - often)),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


if __name__ == "__main__":
    sys.exit(main())
