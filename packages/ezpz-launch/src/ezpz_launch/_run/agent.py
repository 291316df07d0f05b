"""Program: a node's agent, which signals, ends and looks at its ranks as ezpz-launch orders.

On ezpz-launch's own host it is a child of it, by `fork`, and ends everything if ezpz-launch is
killed. On other hosts the first rank's shim starts it: ``python -I -S agent.py NODE``. Where it is
gone, a small launch ends what it left: ``agent.py --end LAUNCH_ID``.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

# Processes, as /proc shows them; where there is none, as ps does.

_WAITING = ("sh", "bash", "dash", "zsh", "ksh", "busybox", "time", "timeout", "env", "nice")
"""Programs that only wait for another one."""


def is_running(pid: int) -> bool:
    """Return whether a process is there, and not only waited for."""
    fields = _stat(pid)
    if fields:
        return fields[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return not os.path.exists("/proc/self/stat")


def parent_of(pid: int) -> int:
    """Return the process that a process is a child of now; 0 where /proc does not tell."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def birth_of(pid: int) -> str:
    """Return when a process started, in ticks; empty where it is gone, or /proc is absent."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def _stat(pid: int) -> list[str]:
    """Return the fields of proc(5)'s stat from the state on; none where there are none."""
    # The name may hold anything, so count from its end.
    return _read(pid, "stat").rpartition(b")")[2].decode().split()


def _read(pid: int, name: str) -> bytes:
    """Return what /proc has there; nothing for a process that has gone or is not ours."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
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


def _children_of(pid: int) -> list[int]:
    if not os.path.exists("/proc/thread-self/children"):
        rows = (line.split() for line in _ps("-axo", "pid=,ppid=").splitlines())
        return [int(child) for child, parent in rows if int(parent) == pid]
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    texts = [_read(pid, f"task/{thread}/children") for thread in threads]
    return [int(word) for text in texts for word in text.split()]


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        found += _children_of(each)
    return found


def _words(pid: int) -> list[str]:
    line = _read(pid, "cmdline")
    if line:
        return os.fsdecode(line).rstrip("\0").split("\0")
    return _ps("-wwo", "command=", "-p", str(pid)).split()


def _program(pid: int) -> str:
    """Return the path of what runs in it; its name says nothing, training renames itself."""
    if not os.path.isdir("/proc/self"):
        return _ps("-wwo", "comm=", "-p", str(pid)).strip()
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def _is_pump(pid: int) -> bool:
    """Return whether it is ours, between the shim and the command; it acts on no signal."""
    words = _words(pid)
    return words[1:3] == ["-I", "-S"] and any("rank_output" in word for word in words[3:5])


def _printable(words: list[str], length: int) -> str:
    line = " ".join(" ".join(words).split())
    line = "".join(letter if letter.isprintable() else "?" for letter in line)
    return line if len(line) <= length else f"{line[: length - 3]}..."


def _name(pid: int) -> str:
    """Return what a process is known by: no options, whose values may be secrets."""
    words = _words(pid)
    named = words[:1]
    for word in words[1:3]:
        if word.startswith("-") or set(word) & set("=:@"):
            break
        named.append(word)
    return f"pid {pid} ({_printable([os.path.basename(word) for word in named], 80)})"


def _environments() -> Iterator[tuple[int, dict[bytes, bytes]]]:
    """Return each other process that we may look into, with what it was started with."""
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdecimal() and int(name) != os.getpid():
            pairs = _environment(int(name)).split(b"\0")
            yield int(name), dict(pair.partition(b"=")[::2] for pair in pairs)


def _environment(pid: int) -> bytes:
    """Return what a process was started with; it seems to be nothing while an exec goes on."""
    until = time.monotonic() + _MOMENT
    while not (found := _read(pid, "environ")) and _program(pid) and time.monotonic() < until:
        bounds = _stat(pid)[47:49]  # proc(5): env_start and env_end; the latter is set last
        if bounds[:1] == bounds[1:] != ["0"]:
            break
        time.sleep(0.001)
    return found


def _catchers(shim: int, number: int) -> list[int]:
    """Return the processes of a rank that have a handler for a signal, and that it is meant for."""
    found, looked_at = [], _children_of(shim)
    for pid in looked_at:
        pumps = _is_pump(pid)
        if not pumps and _has(pid, b"SigCgt:", number):
            found.append(pid)
        elif pumps or os.path.basename(_program(pid)) in _WAITING:
            looked_at += _children_of(pid)
    return found


def _would_end(shim: int, number: int) -> bool:
    """Return whether a signal would end a rank: nothing of it handles, ignores or blocks it."""
    told = [
        pid
        for pid in _descendants(shim)
        if not _is_pump(pid) and os.path.basename(_program(pid)) not in _WAITING
    ]
    masks = (b"SigCgt:", b"SigIgn:", b"SigBlk:")
    return os.path.isdir("/proc/self") and not any(_has(p, m, number) for p in told for m in masks)


def _has(pid: int, mask: bytes, number: int) -> bool:
    """Return whether a signal is in this mask of proc(5)'s status; False where that is absent."""
    _, found, rest = _read(pid, "status").partition(mask)
    return bool(found) and bool(int(rest.split()[0], 16) >> (number - 1) & 1)


_EXITING = 4  # PF_EXITING of Linux's sched.h, in the field "flags" of proc(5)'s stat


def _is_killed(pid: int) -> bool:
    """Return whether a process is ending just now, or SIGKILL is on its way to it."""
    fields = _stat(pid)
    is_exiting = bool(fields) and bool(int(fields[6]) & _EXITING)
    return is_exiting or any(_has(pid, m, signal.SIGKILL) for m in (b"SigPnd:", b"ShdPnd:"))


def _goes_away(is_there: Callable[[], object], seconds: float) -> bool:
    """Wait so long; return whether it has gone."""
    until = time.monotonic() + seconds
    while is_there():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def send(target: int, number: int) -> None:
    # Gone, or no longer ours: a rank may have changed its user.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(target, number)


# The launcher: its own processes have its launch's EZPZ_CONTROL, which a rank's command has not.

_PROGRAMS = ("rank_shim.sh", "agent.py")
"""Programs of ours that have it, too, and are ended otherwise."""


def kill_launcher(launcher: int, launch_id: str) -> None:
    """Kill a launcher's process group, and what it started outside of it: Hydra's ssh, say."""
    send(-launcher, signal.SIGKILL)
    _goes_away(lambda: is_running(launcher), _MOMENT)  # or it may start another
    for pid, its in _environments():
        if its.get(b"EZPZ_CONTROL", b"").partition(b"\n")[0] == launch_id.encode():
            words = _words(pid)
            is_ours = any(os.path.basename(word) in _PROGRAMS for word in words[:4])
            # A connection that the user's ssh shares and keeps (ControlPersist) stays.
            is_shared = bool(words) and words[0].endswith(" [mux]")
            if not is_ours and not is_shared and _is_same_job(its):
                send(pid, signal.SIGKILL)


def _is_same_job(environment: dict[bytes, bytes]) -> bool:
    jobs = (b"PBS_JOBID", b"SLURM_JOB_ID")
    return all(os.environb.get(job) == environment[job] for job in jobs if job in environment)


# The ranks of one node: who has started, who is lost, and signals that reach them.

_LOOK = 0.5  # seconds between two looks for ranks that are lost
_FIRST_LOOK = 0.05  # the same while the command of a rank is still to be found
_UNREPORTED = 30.0  # seconds after a shim's end in which its report of the command's end arrives
_MOMENT = 1.0  # seconds that what a rank left behind has to end, or an exec to be done
_NAMED = 8  # so many of these are named


class Ranks:
    """The ranks of one node that have started and not ended."""

    def __init__(self, launch_id: str, launcher: int = 0) -> None:
        self._launch_id, self._launcher = launch_id.encode(), launcher
        # What is readable when it ends: its ranks may be done before the next look.
        self.launcher_ends: list[int] = []
        with contextlib.suppress(OSError):
            if launcher and hasattr(os, "pidfd_open"):
                self.launcher_ends = [os.pidfd_open(launcher)]
        self._pids: dict[int, int] = {}
        # Of each shim that has ever started: its group, its start, and what started it.
        self._groups: dict[int, int] = {}
        self._born: dict[int, str] = {}
        self._parents: dict[int, int] = {}
        # Of each rank: its command's process and start.
        self._commands: dict[int, tuple[int, str]] = {}
        self._ending = 0
        self._late: list[int] = []
        self._early: dict[int, set[int]] = {}
        self._lost: set[int] = set()
        self._dead: dict[int, float] = {}  # ranks whose shim has ended, and since when

    def start(self, rank: int, pid: int) -> None:
        self._pids[rank] = pid
        self._born[pid], self._parents[pid] = birth_of(pid), parent_of(pid)
        self._groups[pid] = 0
        with contextlib.suppress(ProcessLookupError):
            self._groups[pid] = os.getpgid(pid)
        if self._ending:
            # It comes late: all were told to end.
            send(self._target(pid), self._ending)
            self._late.append(pid)

    def end(self, rank: int) -> None:
        """Take note of the end of a rank's command; its shim may still wait."""
        self._pids.pop(rank, None)

    def next_look(self) -> float | None:
        """Return after how many seconds to look for lost ranks; None while there are no ranks."""
        if not self._pids:
            return None
        return _LOOK if self._commands.keys() >= self._pids.keys() else _FIRST_LOOK

    def lost(self) -> list[int]:
        """Return the ranks, once each, whose end no one would report."""
        # A shell that is just starting its command may swallow a signal: they have it again.
        while self._late:
            pid = self._late.pop()
            if pid in self._pids.values() and self._is_same(pid):
                send(self._target(pid), self._ending)
        early, self._early = self._early, {}
        for number, pids in early.items():
            self.signal(number, pids)
        return self._lose(rank for rank, pid in self._pids.items() if self._is_lost(rank, pid))

    def unreported(self) -> list[int]:
        """Return the ranks, once each, that have ended without a report: both were killed."""
        late = time.monotonic() - _UNREPORTED
        missed = {rank for rank, since in self._dead.items() if since < late}
        return self._lose(missed & self._pids.keys() - self._lost)

    def _lose(self, ranks: Iterable[int]) -> list[int]:
        found = sorted(ranks)
        self._lost.update(found)
        return found

    def _is_lost(self, rank: int, pid: int) -> bool:
        if rank in self._lost:
            return False
        if not is_running(pid):
            # Where the command has ended as well, its end is on the way to us.
            return self._goes_on(rank)
        if rank not in self._commands or not is_running(self._commands[rank][0]):
            # None yet, or something that the shim ran before it.
            for child in _children_of(pid)[:1]:
                self._commands[rank] = (child, birth_of(child))
        parent = parent_of(pid)
        is_orphan = bool(parent) and parent != self._parents[pid]
        # Or it died before we had heard of this rank.
        is_orphan = is_orphan or (
            self._launcher not in (0, parent) and not is_running(self._launcher)
        )
        # A launcher that ends kills its ranks first.
        return is_orphan and not _is_killed(pid)

    def _goes_on(self, rank: int) -> bool:
        is_suspect = rank in self._dead
        self._dead.setdefault(rank, time.monotonic())
        command, born = self._commands.get(rank, (0, ""))
        if command:
            return is_running(command) and birth_of(command) == born and not _is_killed(command)
        # The shim died before we had seen its command. Twice: it may just be ending.
        marks = {b"EZPZ_LAUNCH_ID": self._launch_id, b"EZPZ_RANK": b"%d" % rank}
        return is_suspect and any(
            marks.items() <= its.items() and not _is_killed(pid) for pid, its in _environments()
        )

    def signal(self, number: int, those: Iterable[int] = ()) -> None:
        """Signal every rank that has not ended: its process group, where it has one."""
        early = set[int]()
        shims = [pid for pid in those or self._pids.values() if self._is_same(pid)]
        meant = {} if number == signal.SIGKILL else {p: _catchers(p, number) for p in shims}
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            self._ending = number
        else:  # they ask for a checkpoint: a rank that still imports torch gets them afterwards
            early = {p for p in shims if not meant[p] and _would_end(p, number)}
            if early:
                self._early[number] = self._early.get(number, set()) | early
        meant = {pid: catchers for pid, catchers in meant.items() if catchers or pid in early}
        for target in {self._target(pid) for pid in shims if pid not in meant}:
            # A group of several ranks (srun's) holds those that are told by themselves.
            if target > 0 or not meant:
                send(target, number)
        for pid in shims:
            for each in meant.get(pid, _descendants(pid) if meant else ()):
                send(each, number)

    def release(self, pid: int) -> None:
        if self._is_same(pid):
            send(pid, signal.SIGTERM)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        # What left its process group is found by its environment, where /proc shows it.
        for pid in self._left():
            send(pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        """Return the processes of a launch, and of launches inside its ranks; not of other jobs."""
        found = []
        for pid, its in _environments():
            launches = [its.get(b"EZPZ_LAUNCH_ID"), *its.get(b"EZPZ_INSIDE", b"").split(b":")]
            if self._launch_id in launches and _is_same_job(its):
                found.append(pid)
        return found

    def end_left(self, tell: Callable[[str], None]) -> None:
        """Name what ranks that have all ended left running, of each once, and end it."""
        named: set[int] = set()
        for number in (0, signal.SIGTERM, signal.SIGKILL):  # first it may end by itself
            left = self._left()
            if number and (new := [pid for pid in left if pid not in named]):
                more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
                tell(f"{', '.join(map(_name, new[:_NAMED]))}{more} on {os.uname().nodename}")
                named.update(new)
            for pid in left if number else ():
                send(pid, number)
            if _goes_away(self._left, _MOMENT):
                return

    def stacks(self, which: list[int]) -> str:
        """Return the Python stacks of these ranks; those that cannot be read print their own."""
        py_spy = find_py_spy(os.environ.get("PATH", ""), os.path.dirname(sys.executable))
        texts = []
        for rank, pid in [(rank, self._pids[rank]) for rank in which if rank in self._pids]:
            # All of them within the run loop's patience.
            text = dump(pid, py_spy, bound=max(1.0, 10.0 / len(which)))
            if text is not None:
                texts.append(f"rank {rank}:\n{text.rstrip()}\n")
                continue
            # faulthandler prints it on the rank's own standard error.
            training, deeper = python_processes(pid)
            for process in training + deeper:
                send(process, signal.SIGABRT)
        return "".join(texts)

    def _target(self, pid: int) -> int:
        # A group only that the launcher made for its ranks (srun: one for all of a node).
        group = self._groups[pid]
        return -group if group in self._groups else pid

    def _is_same(self, pid: int) -> bool:
        """Return whether it is the process that was reported, and not another of its number."""
        born = birth_of(pid)
        # Where it is gone its group may still be there, and then no one else has the number.
        return not born or born == self._born.get(pid, born)


# Where a rank hangs: py-spy is asked for the stacks of its Python processes.

_DEEPER = 4  # children of the training processes that are dumped: a few workers say it all
_BYSTANDERS = ("multiprocessing.resource_tracker", "torch/_inductor/compile_worker")
"""Python processes that libraries start beside the training, and that only ever wait."""


def find_py_spy(path: str, beside: str) -> str | None:
    """Return py-spy on a PATH, or beside Python, for an environment that is not activated."""
    import shutil  # noqa: PLC0415 - few ranks hang

    folders = [folder for folder in (*path.split(os.pathsep), beside) if folder]
    return shutil.which("py-spy", path=os.pathsep.join(folders))


def python_processes(shim: int) -> tuple[list[int], list[int]]:
    """Return the first Python process in each branch below a shim, and some of those below them."""
    training, deeper = list[int](), list[int]()
    level = [(child, False) for child in _children_of(shim)]
    for process, below in level:
        counts = _is_training(process)
        if counts:
            (deeper if below else training).append(process)
        level += [(child, below or counts) for child in _children_of(process)]
    return training, deeper[:_DEEPER]


def _is_training(pid: int) -> bool:
    program = os.path.basename(_program(pid)).lower()
    # The second: a program with an interpreter inside.
    is_python = program.startswith(("python", "pypy")) or b"/libpython" in _read(pid, "maps")
    bystands = any(name in word for name in _BYSTANDERS for word in _words(pid))
    return is_python and not bystands and not _is_pump(pid)


def dump(shim: int, py_spy: str | None, *, bound: float) -> str | None:
    """Return the Python stacks of a rank's processes, under a line for each process."""
    training, deeper = python_processes(shim)
    if py_spy is None or not training:
        return None
    asked: list[tuple[int, subprocess.Popen[bytes]]] = []
    parts: list[str] = []
    end = time.monotonic() + bound
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    try:
        for process in training + deeper:  # all at once: each waits for a process of its own
            words = [py_spy, "dump", "--pid", str(process)]
            asked.append((process, subprocess.Popen(words, stdin=null, stdout=pipe, stderr=null)))
        for process, answer in asked:
            text = _stack(answer, end)
            if not text and process in training:
                return None
            title = _printable(_words(process), 200)
            text = text or "py-spy got no stack of it"
            parts.append(f"rank's process {process}: {title}\n{text}\n")
    except OSError:
        return None  # py-spy itself cannot be started
    finally:
        for _, answer in asked:
            answer.kill()
            answer.communicate()
    return "\n".join(parts)


def _stack(answer: subprocess.Popen[bytes], end: float) -> str:
    try:
        out, _ = answer.communicate(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return ""
    # Its first lines tell the command, which our own line does in one.
    head, version, stacks = out.decode(errors="replace").strip().partition("\nPython v")
    text = f"Python {stacks}" if version else head
    return text if answer.returncode == 0 else ""


# The agent: it obeys lines of a connection, and kills the ranks when that ends without a farewell.

PROTOCOL_LINE = 4096  # longest line of the protocol, in bytes
_CONNECT_TIMEOUT = 5.0
_SETTLED = 0.2  # seconds before it connects: a launch of `true` needs none, and pays nothing
_TERMINATED = 1.0  # seconds that a launcher has to end its ranks by itself (srun does, on SIGTERM)


class Agent:
    def __init__(self, connection: socket.socket, ranks: Ranks) -> None:
        self._connection, self._ranks = connection, ranks
        self._lines = self._read_lines()
        self._speaks = threading.Lock()

    def serve(self) -> bool:
        """Obey; return whether the end was a farewell."""
        # Reset instead of closed, or no orders of ezpz-launch: the same.
        with contextlib.suppress(OSError, ValueError, TypeError):
            for line in self._lines:
                order, *words = line.split()
                if order == "farewell":
                    return True
                self._obey(order, [int(word) for word in words])
        self._ranks.kill()
        return False

    def is_welcome(self, secret: str, node: int) -> bool:
        """Show ezpz-launch that we know the node's secret; return whether it knows it, too."""
        challenge, own = next(self._lines, "").partition(" ")[2], os.urandom(16).hex()
        self._say(f"hello {node} {own} {proof(secret, node, 'agent', challenge, own)}\n".encode())
        word, _, shown = next(self._lines, "").partition(" ")
        return word == "welcome" and is_proof(
            shown.encode(), secret, node, "launch", own, challenge
        )

    def _obey(self, order: str, numbers: list[int]) -> None:
        ranks = self._ranks
        match order:
            case "start" | "end" | "signal" | "release" | "kill":
                getattr(ranks, order)(*numbers)
            case "stacks":
                # py-spy may take its time; signals are heard meanwhile.
                thread = threading.Thread(
                    target=lambda: self._answer("stacks", ranks.stacks(numbers)), daemon=True
                )
                thread.start()
            case "end-left":
                ranks.end_left(lambda names: self._answer("left", names))

    def _answer(self, what: str, text: str) -> None:
        data = text.encode(errors="replace")
        self._say(b"%s %d\n%s" % (what.encode(), len(data), data))

    def _say(self, data: bytes) -> None:
        # Where no one listens any more, reading tells.
        with self._speaks, contextlib.suppress(OSError):
            self._connection.sendall(data)

    def _read_lines(self) -> Iterator[str]:
        """Return the lines that come; while there are none, tell of ranks that are lost."""
        received = b""
        while True:
            line, newline, rest = received.partition(b"\n")
            if newline:
                received = rest
                yield line.decode("ascii")
                continue
            ends = self._ranks.launcher_ends
            watched: list[socket.socket | int] = [self._connection, *ends]
            come, *_ = select.select(watched, [], [], self._ranks.next_look())
            if self._connection not in come:
                ends[:] = [end for end in ends if end not in come]
                for rank in self._ranks.lost():
                    self._say(b"lost %d\n" % rank)
                for rank in self._ranks.unreported():
                    self._say(b"unreported %d\n" % rank)
                continue
            chunk = self._connection.recv(1 << 16)
            if not chunk:
                return
            received += chunk


def proof(secret: str, node: int, *words: str) -> str:
    """Return what only one can say to these words who knows a node's secret."""
    import hmac  # noqa: PLC0415 - a launch on one host needs none

    of_node = hmac.digest(secret.encode(), b"node %d" % node, "sha256")
    return hmac.digest(of_node, " ".join(words).encode(), "sha256").hex()


def is_proof(shown: bytes, secret: str, node: int, *words: str) -> bool:
    import hmac  # noqa: PLC0415 - as above

    return hmac.compare_digest(shown, proof(secret, node, *words).encode())


def fork(launch_id: str, launcher: int, scratch: str) -> tuple[int, socket.socket]:
    """Start the agent of this host as a child; return its process id and our connection to it."""
    ours, its = socket.socketpair()
    pid = os.fork()
    if pid:
        its.close()
        return pid, ours
    try:
        os.dup2(its.fileno(), 3)
        _detach(4)
        if not Agent(socket.socket(fileno=3), Ranks(launch_id)).serve():
            send(-launcher, signal.SIGTERM)
            _goes_away(lambda: is_running(launcher), _TERMINATED)
            kill_launcher(launcher, launch_id)
            if scratch:  # a file, or torchrun's folder
                subprocess.run(["rm", "-rf", scratch], check=False)
    finally:
        os._exit(0)


def _detach(first: int) -> None:
    """Leave the session, hear no signal, and close what is open from a descriptor on."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2"):
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
    # The launcher's own pipes and sockets among them: their reader would wait for our end.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def main() -> int:
    """Serve ezpz-launch, which is on another host, until it says farewell."""
    if sys.argv[1] == "--end":  # what an agent that is gone was to end
        Ranks(sys.argv[2]).kill()
        return 0
    # What started the shim that started us, and this node's other shims.
    launcher = parent_of(os.getppid())
    if launcher == 1:
        launcher = 0  # it has gone already, and init never goes
    if os.fork():
        # No child of the shim, and gone at once: no look may take it for the rank's command.
        os._exit(0)
    _detach(3)
    fields = os.environ["EZPZ_CONTROL"].split("\n")
    launch_id, addresses, secret, timeout = fields[0], *fields[4:6], int(fields[6])
    time.sleep(_SETTLED)
    ranks = Ranks(launch_id, launcher)
    # ezpz-launch is to say first that we are lost: our ranks' end is no failure of theirs.
    connection = _connect(addresses.split(), 2 * timeout)
    if connection is None:
        # The launch is over, or its host cannot be reached; ezpz-launch says so if it matters.
        while launcher and is_running(launcher):
            time.sleep(1)
        if launcher:
            ranks.end_left(lambda _: None)
        return 0
    agent = Agent(connection, ranks)
    try:
        if not agent.is_welcome(secret, int(sys.argv[1])):
            return 1
    except (OSError, ValueError):
        ranks.kill()
        return 1
    return 0 if agent.serve() else 1


def _connect(addresses: list[str], timeout: int) -> socket.socket | None:
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
    """Let the kernel end a connection to a host that has not answered for so many seconds."""
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
