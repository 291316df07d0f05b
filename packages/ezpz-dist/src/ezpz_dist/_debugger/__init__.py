"""A breakpoint on one rank, while the others wait."""

from __future__ import annotations

import atexit
import bdb
import logging
import os
import pdb  # noqa: T100  # it is what this is about
import queue
import re
import shlex
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType
from typing import IO, Any, NamedTuple, cast

from ezpz_dist._diagnosis import call_roll, find_responder, flush, held, stat_of
from ezpz_dist._errors import DistError, HangError, LostRankError
from ezpz_dist._watch import waiting
from ezpz_dist._world import World, current_world
from ezpz_topo import RankInfo, get_hostname, get_rank_info

from . import __main__ as _attach

# A terminal at which a person can be asked, if there is one.

STDIN = "stdin"  # where the process's own standard input and output will do
# Launchers that do not read their terminal's input, as mpiexec and srun do.
_QUIET = frozenset({"none", "ezpz", "torchrun"})
_READ = "the terminal's input is read by the launcher ({})"
_PTS_MAJORS = range(136, 144)  # Linux: Documentation/admin-guide/devices.txt


# Our own, if this process is in its foreground (a background process would be stopped by SIGTTIN).
# Else that of the launcher above us: ezpz-launch and torchrun give each rank a session of its own,
# without a terminal, and do not read theirs; job control concerns a terminal's own session only.
def find_terminal(launcher: str) -> tuple[str, str]:
    """Return a terminal that can be read here: `STDIN` or its path; else "", and the reason."""
    try:
        own = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return _find_above(launcher)
    try:
        if os.tcgetpgrp(own) != os.getpgrp():
            return "", "this process runs in the background of its terminal"
    finally:
        os.close(own)
    if os.isatty(0) and os.isatty(1):
        return STDIN, ""
    return ("/dev/tty", "") if launcher in _QUIET else ("", _READ.format(launcher))


def _find_above(launcher: str) -> tuple[str, str]:
    above, terminal = os.getppid(), 0  # the device number of a controlling terminal; 0: none
    while not terminal:
        pid = above
        try:  # what proc_pid_stat(5) has on job control; foreground: whom the terminal listens to
            above, group, _, terminal, foreground = map(int, stat_of(pid)[1:6])
        except (OSError, ValueError):  # it ended meanwhile, or there is no /proc (macOS)
            plain = os.isatty(0) and os.isatty(1)
            return (STDIN, "") if plain else ("", "no process above this one has a terminal")
    if launcher not in _QUIET:
        return "", _READ.format(launcher)
    if group != foreground:
        return "", f"process {pid} above it runs in the background of its terminal"
    path = _path(pid, terminal)
    return path, "" if path else f"the terminal of process {pid} cannot be opened here"


def has_input() -> bool:
    """Return whether standard input holds commands: a file or pipe, not closed nor a device."""
    with suppress(OSError):
        return not stat.S_ISCHR(os.fstat(0).st_mode)
    return False


def _path(pid: int, terminal: int) -> str:
    """Return a path by which the process's terminal can be opened; empty where there is none."""
    paths = [f"/proc/{pid}/fd/{number}" for number in (0, 2, 1)]
    major, minor = os.major(terminal), os.minor(terminal)
    if major in _PTS_MAJORS:
        # As devpts numbers them, 256 a major number.
        paths.insert(0, f"/dev/pts/{(major - _PTS_MAJORS[0]) * 256 + minor}")
    for path in paths:
        with suppress(OSError):  # closed, another user's, or another container's
            if os.stat(path).st_rdev == terminal:
                os.close(os.open(path, os.O_RDWR | os.O_NOCTTY))
                return path
    return ""


# Where the debugger reads and writes, wherever the rank was started.

_DRAINED = 0.3  # seconds for pipes to reach the terminal; ezpz-launch holds unfinished lines 0.2


class Console(NamedTuple):
    """A way to the person; None: standard input (with line editing), standard output."""

    stdin: IO[str] | None
    stdout: IO[str] | None
    where: str  # in words, for those who wait
    close: Callable[[], object]


def open_console(info: RankInfo, host: str, line: str) -> Console:
    """Return a terminal, or a socket for one, and say on standard error how to get there."""
    flush()
    path, why_not = find_terminal(info.launcher)
    if path == STDIN or (not path and info.launcher == "none" and has_input()):
        return Console(None, None, "its standard input", lambda: None)
    if path:
        time.sleep(_DRAINED)
        # Left in its cooked mode: a rank that is killed must not leave it in another.
        files = ExitStack()
        commands, answers = (
            files.enter_context(open(path, mode, encoding="utf-8", errors="replace"))  # noqa: SIM115
            for mode in "rw"
        )
        return Console(commands, answers, f"the terminal {path}", files.close)
    remote = RemoteTerminal()
    command = f"on {shlex.quote(host)}: {remote.command}"
    who = f"rank {info.rank} of {info.world_size}" if info.world_size > 1 else "this process"
    text = f"ezpz: {who} stops at {line} and waits for you; {why_not}. Type in a shell {command}"
    print(text, file=sys.stderr, flush=True)
    file = cast("IO[str]", remote)
    return Console(file, file, f"a socket; type in a shell {command}", remote.close)


_KEPT = 1 << 16  # characters of output that are kept for whoever connects


class RemoteTerminal:
    """A terminal by another way: a socket at which a person connects with our `__main__`."""

    # While no one is connected output is kept, and reading waits. The socket lies in a folder that
    # only this user can enter, so it needs no secret.

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        self._kept = ""
        self._awaits = False
        self._closed = False
        self._folder, self._listener = _listen()
        words = [sys.executable, os.path.dirname(__file__), self._listener.getsockname()]
        self.command = shlex.join(words)
        # The program may end in a step, without a word to us.
        atexit.register(self.close)
        threading.Thread(target=self._serve, name="ezpz-attach", daemon=True).start()

    def readline(self, _limit: int = -1) -> str:
        with self._lock:
            self._awaits = True
            self._send(_attach.TURN)
        line = self._lines.get()
        with self._lock:
            self._awaits = False
        return line

    def write(self, text: str) -> int:
        with self._lock:
            self._kept = (self._kept + text)[-_KEPT:]
            self._send(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: what is written is sent."""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            atexit.unregister(self.close)
            link, self._link = self._link, None
        for each in filter(None, (self._listener, link)):
            with suppress(OSError):  # no one is connected, or not any more
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, text: str) -> None:
        if self._link is not None:
            # Who has gone meanwhile is noticed by the thread that reads.
            with suppress(OSError):
                self._link.sendall(text.encode("utf-8", "replace"))

    def _serve(self) -> None:
        # One person at a time: the next one waits in the listener's queue.
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                if self._closed:
                    link.close()
                    return
                self._link = link
                self._send(self._kept + _attach.TURN * self._awaits)
            self._listen_to(link)
            with self._lock:
                self._link = None
            link.close()

    def _listen_to(self, link: socket.socket) -> None:
        typed = b""
        while True:
            data = b""
            with suppress(OSError):
                data = link.recv(65536)
            if not data:
                return
            if _attach.INTERRUPT in data:
                # As Ctrl-C at a terminal would: the main thread is interrupted, even in a wait.
                main = threading.main_thread().ident
                signal.pthread_kill(main or 0, signal.SIGINT)
            *lines, typed = (typed + data.replace(_attach.INTERRUPT, b"")).split(b"\n")
            for line in lines:
                self._lines.put(line.decode("utf-8", "replace") + "\n")


def _listen() -> tuple[str, socket.socket]:
    reasons = []
    # The second, where the first is on a file system without sockets, or its name is too long
    # (108 bytes on Linux: unix(7)).
    for place in dict.fromkeys((tempfile.gettempdir(), "/tmp")):  # noqa: S108  # mkdtemp's 0700
        folder, listener = "", socket.socket(socket.AF_UNIX)
        try:
            folder = tempfile.mkdtemp(prefix="ezpz-pdb-", dir=place)
            listener.bind(os.path.join(folder, "socket"))
            listener.listen()
        except OSError as error:
            reasons.append(f"{folder or place}: {error.strerror or error}")
            listener.close()
            shutil.rmtree(folder, ignore_errors=True)
        else:
            return folder, listener
    raise DistError(
        f"breakpoint() finds no terminal and no place for a socket ({'; '.join(reasons)}); "
        "expected a folder on a local disk; set TMPDIR to one"
    )


class RankPdb(pdb.Pdb):
    """pdb for one rank of several, with the commands ``release`` and ``pm`` beside its own."""

    # It stops at the call itself, inside the `except` block that it stands in, as `breakpoint` does
    # from Python 3.13 on; earlier ones stop a line later, where an exception's name may be gone.

    def __init__(
        self, console: Console, prompt: str, release: Callable[[], None],
        exception: BaseException | None,
    ) -> None:  # fmt: skip
        # SIGINT stays whose it is.
        super().__init__(stdin=console.stdin, stdout=console.stdout, nosigint=True)
        self.prompt = prompt
        self.traces = False
        self._console = console
        self._release: Callable[[], None] | None = release
        self._exception = exception

    def begin(self, frame: FrameType) -> None:
        """Take commands at a frame; then, if `traces`, the caller sets `trace_dispatch` last."""
        self.reset()
        outer: FrameType | None = frame
        while outer is not None:
            outer.f_trace = self.trace_dispatch
            self.botframe = outer
            outer = outer.f_back
        self.traces = True
        self.interaction(frame, None)

    def interaction(self, *place: Any) -> None:
        with held():
            super().interaction(*place)

    def set_continue(self) -> None:
        super().set_continue()
        self.traces = bool(self.breaks)
        self._let_go()
        if not self.traces:
            self._console.close()

    def set_quit(self) -> None:
        super().set_quit()
        self._console.close()

    # The docstrings of commands are their help.

    def do_release(self, _arg: str) -> None:
        """Let the other ranks go on while this one stays in the debugger.

        Needed before a step over a collective. From then on their collectives wait for this
        rank, and time out.
        """
        self._let_go()
        self.message("the other ranks go on; their collectives wait for this one, and time out")

    def do_pm(self, _arg: str) -> None:
        """Look at the frames of the exception that is being handled, to where it was raised.

        ``q`` leads back.
        """
        error = self._exception
        if error is None or error.__traceback__ is None:
            self.error("no exception was being handled where breakpoint() was called")
            return
        inner = pdb.Pdb(stdin=self.stdin, stdout=self.stdout, nosigint=True, readrc=False)
        inner.use_rawinput = self.use_rawinput
        inner.prompt = "(pm) "
        # Going on in there would switch the outer one's tracing off.
        tracing = sys.gettrace()
        inner.reset()
        inner.interaction(None, error.__traceback__)
        sys.settrace(tracing)

    def _let_go(self) -> None:
        # Once: released, the others may have ended, and the store with them.
        release, self._release = self._release, None
        if release is not None:
            release()


# A breakpoint on one rank, while the others wait.

logger = logging.getLogger(__name__)

EVERY = 60.0  # seconds after which a rank that waits says so, again and again
UNANSWERED = 10  # calls without an answer until the debugged rank counts as lost

_FASTEST, _SLOWEST = 0.05, 5.0  # seconds between two looks whether it is over
_REQUESTS = 2000  # looks a second, of all ranks together, that the store's server is given
_ENDED = re.compile(r"has (ended|left)")  # said of a rank that comes no more, unlike a stopped one

# How often each line has called: the ranks' n-th calls at one line belong together.
_calls: Counter[tuple[str, int]] = Counter()


def breakpoint(rank: int = 0) -> None:  # noqa: A001  # the name that was promised
    """Stop one rank in pdb, at this line; the others wait for it, however long that takes.

    Collective: every rank calls this, at the same line. Works in an ``except`` block; the
    command ``pm`` then shows the frames of the exception. The commands are pdb's, and

    - ``c`` lets all ranks continue; ``q`` raises `bdb.BdbQuit`, which ends the job;
    - ``n``, ``s``, ``r`` run this rank alone, and the others still wait: type ``release``
      before you step over a collective;
    - ``pm`` looks at the exception that is being handled.

    The terminal is this process's own, or, under ezpz-launch and torchrun on this host, the
    launcher's. Ctrl-C ends the launch as always. Without a terminal (another host, a batch
    job), a command is printed that connects to the debugger from any shell on the rank's host.
    Leaving that with Ctrl-D keeps the rank waiting, Ctrl-C interrupts what it computes.

    If one rank alone calls this, because of an exception that the others do not have, they
    continue to their next collective. There they wait for ``setup_torch(timeout=...)``, so give
    enough time to look around. ``PYTHONBREAKPOINT=0`` switches it off, as it does Python's own.

    Args:
        rank: The rank to stop.

    Raises:
        ValueError: There is no such rank; on every rank.
        HangError: The rank to stop did not come here within the time-out.
        LostRankError: It ended while the others waited.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        bdb.BdbQuit: On the stopped rank: ``q``.
    """
    world = current_world("breakpoint()")
    size = 1 if world is None else world.info.world_size
    if not 0 <= rank < size:
        raise ValueError(f"breakpoint(rank={rank}); expected a rank from 0 to {size - 1}")
    if os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    frame = sys._getframe(1)  # noqa: SLF001  # the caller's, as pdb itself finds it
    line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    place = frame.f_code.co_filename, frame.f_lineno
    key = f"breakpoint/{rank}/{line}/{_calls[place]}"
    _calls[place] += 1
    if world is not None and world.info.rank != rank:
        with waiting(f"breakpoint(rank={rank})", world), held():
            _wait(world, rank, key, line)
        return
    exception = sys.exception()
    with waiting(f"pdb, breakpoint(rank={rank})", world if size > 1 else None):
        debugger = _debug(world if size > 1 else None, key, line, frame, exception)
    if debugger.quitting:
        raise bdb.BdbQuit
    if debugger.traces:
        # The last thing: from here on every call is traced.
        sys.settrace(debugger.trace_dispatch)


def _debug(
    world: World | None, key: str, line: str, frame: FrameType, exception: BaseException | None
) -> RankPdb:
    info = get_rank_info() if world is None else world.info
    host = get_hostname() if world is None else world.hosts[info.rank]
    console = open_console(info, host, line)

    def release() -> None:
        if world is not None:
            world.store.set(f"{key}/over", "")

    prompt = "(Pdb) " if world is None else f"(Pdb rank {info.rank}) "
    debugger = RankPdb(console, prompt, release, exception)
    if world is not None:
        world.store.set(f"{key}/here", console.where)
        debugger.message(
            f"rank {info.rank} on {host}; the others wait: c lets all go on, release the others, "
            "q ends the job"
        )
    if exception is not None:
        debugger.message(f"in handling {exception!r}; pm shows where it was raised")
    debugger.begin(frame)
    return debugger


def _wait(world: World, rank: int, key: str, line: str) -> None:
    """Wait on another rank until the debugged one releases it, or cannot any more."""
    store, size = world.store, world.info.world_size
    # One of those that wait speaks and looks for all.
    speaks = store.add(f"{key}/others", 1) == 1
    # Often enough for a person, and few enough requests for one server.
    pause = min(_SLOWEST, max(_FASTEST, size / _REQUESTS))
    began = said = time.monotonic()
    is_here, unanswered = False, 0
    while not store.check([f"{key}/over"]):
        # Not a wait at the store: signals are served meanwhile.
        time.sleep(pause)
        now = time.monotonic()
        is_here = is_here or store.check([f"{key}/here"])
        if not is_here and now - began > world.timeout:
            raise HangError(
                f"breakpoint(rank={rank}) at {line} on rank {world.info.rank} "
                f"({world.hosts[world.info.rank]}): rank {rank} on {world.hosts[rank]} did not "
                f"come within {world.timeout:g} s; expected every rank to call it at that line; "
                f"{_locate(rank)[0]}",
                [rank],
            )
        if speaks and now - said >= EVERY:
            said = now
            where, answers = _locate(rank)
            unanswered = 0 if answers else unanswered + 1
            if unanswered >= UNANSWERED or (not answers and _ENDED.search(where)):
                store.set(f"{key}/over", f"{where}; the ranks at breakpoint(rank={rank}) waited")
            how = f"debugged at {store.get(f'{key}/here').decode()}" if is_here else "awaited"
            logger.warning(
                "breakpoint(rank=%d) at %s: the other ranks wait for %.0f s; %s, %s",
                rank, line, now - began, where, how,
            )  # fmt: skip
    if lost := store.get(f"{key}/over").decode():
        raise LostRankError(f"breakpoint(rank={rank}) at {line}: {lost}", [rank])


def _locate(rank: int) -> tuple[str, bool]:
    """Return where a rank stands, or what became of it, and whether it answered itself."""
    responder = find_responder()
    if responder is None:
        return f"rank {rank} cannot be asked", True
    call = call_roll(responder)
    if rank in call.locations:
        return str(call.locations[rank]), True
    fate = call.silent.get(rank, "is not known of")
    return f"rank {rank} on {call.hosts.get(rank, '?')} {fate}", False
