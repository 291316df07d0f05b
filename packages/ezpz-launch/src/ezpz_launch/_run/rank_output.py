"""Run one rank's command, or several ranks of this host, and pass their output on by lines.

usage: python -I -S rank_output.py RANK HOST [OPTION...] -- COMMAND [ARG...]
       python -I -S rank_output.py -n RANKS COMMAND [ARG...]
  --prefix     begin each line on the terminal with [RANK@HOST]
  --files DIR  write the exact bytes to DIR/rank-RANK.out and DIR/rank-RANK.err as well
  -n RANKS     the smallest launcher, without any MPI: each rank has a process group of its own, to
               which signals are passed on, and finds EZPZ_SPAWN_RANK and EZPZ_SPAWN_SIZE
exit status: the command's own, 128 + signal; 127 or 126 when it is not there or cannot be executed;
             the largest of several; 2 when the files cannot be opened

The rank shim starts the first on every rank, so it stands alone and imports next to nothing. A
complete line is one write, so that ranks which share a pipe do not cut each other's lines.
What has no end yet (a prompt, a progress bar) is shown after a second. It shares the command's
process group: it outlives the signals that are meant for the command, to report its end.

With EZPZ_TERMINAL set all ranks' lines are shown on one terminal. A bar's carriage return comes
last, and every line erases what lies to its right, so that no line tears the bar of rank 0. Bars of
other ranks are left out, as are tracebacks of a KeyboardInterrupt unless EZPZ_DEBUG is set.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # C: the enums of signal cost 5 ms
import errno
import os
import select
import sys
import time

_HELD = 1.0  # seconds after which the beginning of a line is shown without its end
_HELD_FROM_A_TERMINAL = 0.1
_AFTER = 0.5  # seconds for what still writes when the commands have ended (a child that one left)
_PIECE = 1 << 16  # bytes read at once, and of a line that are held at most

_MOST_AFTER = 1 << 20
"""Bytes still taken when those seconds are over: all that a pipe of Linux can hold."""

_PASSED_ON = {
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
}  # fmt: skip
_PR_SET_PDEATHSIG = 1
_ERASE = b"\x1b[K"  # to the end of the line
_DEBUG = bool(os.environ.get("EZPZ_DEBUG"))


def main(words: list[str]) -> int:
    """Run what the usage above says, and return the exit status to end with."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback
    if words[:1] != ["-n"]:
        return _run_rank(words)
    if len(words) < 3 or not words[1].isdigit():
        _say(f"rank_output.py: got {words}; expected -n RANKS COMMAND; see its head")
        return 2
    return _spawn(int(words[1]), words[2:])


def _run_rank(words: list[str]) -> int:
    try:
        rank, host, *options = words[: words.index("--")]
        command = words[words.index("--") + 1 :]
        folder = options.pop(options.index("--files") + 1) if "--files" in options else ""
        prefix = "--prefix" in options
        if not command or not rank.isdigit() or not {"--files", "--prefix"}.issuperset(options):
            raise ValueError(words)
    except (ValueError, IndexError):
        _say(f"rank_output.py: got {words}; expected RANK HOST OPTIONS -- COMMAND; see its head")
        return 2
    head = os.fsencode(f"[{rank}@{host}] ") if prefix else b""
    shown_as = None
    if os.environ.get("EZPZ_TERMINAL"):
        shown_as = "bar" if rank == "0" else "lines"
    files: list[_Sink | None] = [None, None]
    for index, name in enumerate((f"rank-{rank}.out", f"rank-{rank}.err") if folder else ()):
        try:
            files[index] = _open(folder, name)
        except OSError as error:
            _say(
                f"{folder}/{name}: cannot be opened on {host} ({error.strerror}); "
                "expected a directory for the ranks' output; give another --log-dir"
            )
            return 2
    signals = _Signals()
    streams, ends = _pipes(files, head, shown_as)
    child = _start(command, ends, f"rank {rank} on {host}", signals)
    for number in signal.sigpending() & _PASSED_ON:
        os.kill(child, number)  # it may have come before the child was there
    signals.handle(lambda *_: None)
    return _pump({child}, streams, signals.wake)


def _open(folder: str, name: str) -> _Sink:
    """Open a file to go on in: a second attempt writes where the first one ended."""
    if not os.path.exists(folder):
        os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, name)
    return _Sink(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666), path)


def _spawn(size: int, command: list[str]) -> int:
    signals = _Signals()
    streams: list[_Stream] = []
    pids: list[int] = []
    # For a terminal the pump of each rank has seen to it.
    shown_as = "bytes" if os.environ.get("EZPZ_TERMINAL") else None
    for rank in range(size):
        its, ends = _pipes([None, None], b"", shown_as)
        place = {b"EZPZ_SPAWN_RANK": b"%d" % rank, b"EZPZ_SPAWN_SIZE": b"%d" % size}
        pids.append(_start(command, ends, f"rank {rank}", signals, place))
        streams += its

    def pass_on(number: int, _frame: object) -> None:
        for pid in pids:
            try:
                os.kill(-pid, number)
            except (ProcessLookupError, PermissionError):
                continue

    signals.handle(pass_on)
    return _pump(set(pids), streams, signals.wake)


# Starting a command: its pipes, its signals, its program.


class _Signals:
    """What we hear; `wake` becomes readable by it, and by the end of a child."""

    def __init__(self) -> None:
        # What we were started to ignore (nohup) stays ignored, by the commands too.
        heard = (*_PASSED_ON, signal.SIGCHLD)
        self._ignored = [each for each in heard if signal.getsignal(each) == signal.SIG_IGN]
        self.wake, write = os.pipe()
        for end in (self.wake, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Up to here a signal ends us, and no command is there to miss it. From here on one waits.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)

    def handle(self, handler: object) -> None:
        """Handle what has come, and comes; unlike one that is ignored, it is not inherited."""
        for number in _PASSED_ON.difference(self._ignored):
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def restore(self) -> None:
        """Leave a command what we were given; Python itself has set the first two to be ignored."""
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, *_PASSED_ON):
            ignored = number in self._ignored
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def _pipes(
    files: list[_Sink | None], head: bytes, shown_as: str | None
) -> tuple[list[_Stream], list[int]]:
    streams, ends = [], []
    for file, (descriptor, name) in zip(files, ((1, "out"), (2, "err")), strict=True):
        source, drain = os.pipe()
        terminal = _Sink(descriptor, f"the terminal's std{name}")
        streams.append(_Stream(source, terminal, file, head, shown_as))
        ends.append(drain)
    return streams, ends


def _start(
    command: list[str], ends: list[int], place: str, signals: _Signals,
    more: dict[bytes, bytes] | None = None,
) -> int:  # fmt: skip
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(ends[0], 1)
            os.dup2(ends[1], 2)
            if more:
                os.setpgid(0, 0)
            signals.restore()
            if not more:
                _die_with(parent)
            os._exit(_execute(command, place, _environment() | (more or {})))
        finally:
            os._exit(126)
    for end in ends:
        os.close(end)
    return child


def _die_with(parent: int) -> None:
    """Have Linux kill this process when its parent dies: no one would read its output."""
    if sys.platform != "linux":
        return
    try:
        import ctypes  # noqa: PLC0415 - only the child needs it, and may do without

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (ImportError, AttributeError, OSError):
        return
    if os.getppid() != parent:
        os._exit(137)


def _execute(command: list[str], place: str, environment: dict[bytes, bytes]) -> int:
    """Become the command, found as a shell would; return the exit status if that fails."""
    folders = environment.get(b"PATH", b"/usr/bin:/bin").split(b":")
    program = os.fsencode(command[0])
    paths = [program] if b"/" in program else [os.path.join(folder, program) for folder in folders]
    refused = ""
    for path in paths:
        try:
            os.execve(path, command, environment)  # noqa: S606 - no shell is wanted
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            refused = refused or str(error.strerror)
            if error.errno == errno.ENOEXEC:  # a script without "#!"
                words = [b"sh", path, *map(os.fsencode, command[1:])]
                os.execve("/bin/sh", words, environment)  # noqa: S606 - as execvp does
    if refused:
        _say(f"{place}: {command[0]!r}: {refused}; expected a program that can be executed")
        return 126
    where = "no such file" if b"/" in program else "not found on PATH"
    _say(f"{place}: {command[0]!r}: {where}; expected it on every host; give a path that is")
    return 127


def _environment() -> dict[bytes, bytes]:
    """Return the environment we were given: in the C locale Python adds LC_CTYPE (PEP 538)."""
    environment = dict(os.environb)
    if environment.get(b"LC_CTYPE") in (b"C.UTF-8", b"C.utf8", b"UTF-8"):
        try:
            with open("/proc/self/environ", "rb") as file:
                given = file.read()
        except OSError:
            return environment
        if b"\0LC_CTYPE=" not in b"\0" + given:
            del environment[b"LC_CTYPE"]
    return environment


# The pump.


def write(descriptor: int, data: bytes) -> None:
    """Write all of it, in one call where the system takes it so."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            # Someone who shares it has made it so.
            select.select([], [descriptor], [])


class _Sink:
    """A descriptor to write to; trouble with it is said once and stops no one."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor, self._name = descriptor, name
        self._gone = self._said = False

    def write(self, data: bytes) -> None:
        if self._gone:
            return
        try:
            write(self._descriptor, data)
        except OSError as error:
            # No one reads any more: the command goes on regardless.
            self._gone = error.errno in (errno.EPIPE, errno.EIO, errno.EBADF)
            if not (self._gone or self._said):
                self._said = True
                _say(
                    f"{self._name}: got {error.strerror} on writing; expected room for this "
                    "rank's output; make some, what comes until then is lost"
                )


class _Stream:
    """A command's stdout or stderr, on its way to the terminal, and to a file if there is one."""

    # For a terminal it is shown as "bar" (rank 0's), "lines" (others') or "bytes", as they come.

    def __init__(
        self, source: int, terminal: _Sink, file: _Sink | None, prefix: bytes,
        shown_as: str | None,
    ) -> None:  # fmt: skip
        self.source, self._terminal, self._file = source, terminal, file
        self._shown_as, self._on_terminal = shown_as, shown_as in ("bar", "lines")
        self._prefix = _ERASE + prefix if self._on_terminal else prefix
        self._held = b""
        self._since = 0.0
        self._inside = self._returned = False
        self._trace: list[bytes] = []  # a traceback whose end is still to come

    @property
    def due(self) -> float:
        """When the held beginning of a line is to be shown, on the monotonic clock."""
        if not self._held or (self._shown_as == "lines" and self._returned):
            return float("inf")
        return self._since + (_HELD_FROM_A_TERMINAL if self._on_terminal else _HELD)

    def take(self, data: bytes, now: float) -> None:
        if self._file:
            self._file.write(data)
        if self._shown_as == "bytes":
            self._terminal.write(data)
            return
        if not self._held:
            self._since = now
        data = self._held + data
        # A "\r" ends a line too: a progress bar draws over its prefix. Whether the last
        # byte is one, or half of "\r\n", the next one tells.
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
        if end:
            lines = data[:end].splitlines(keepends=True)
            self._show(self._fit(lines) if self._on_terminal else lines)
            self._since = now
        self._held = data[end:]
        if len(self._held) >= _PIECE:
            self.flush()

    def flush(self) -> None:
        if self._held:
            bar = b"\r" if self._on_terminal and self._returned else b""
            self._terminal.write(self._headed(self._held + bar))
        self._held = b""

    def close(self) -> None:
        """Show what is left; with a prefix, the next rank's line must not continue ours."""
        self._show(self._trace)
        self.flush()
        if self._prefix and self._inside:
            self._terminal.write(b"\n")
        os.close(self.source)

    def _fit(self, lines: list[bytes]) -> list[bytes]:
        """Return what of these lines is for a terminal that several ranks share."""
        shown: list[bytes] = []
        for line in lines:
            # torch puts this before each line.
            text = line.partition(b"]: ")[2] if line.startswith(b"[rank") else line
            if line.endswith(b"\r") and self._shown_as == "lines":
                self._returned = True
            elif text.startswith(b"Traceback (most recent call last)") and not _DEBUG:
                shown += self._trace
                self._trace = [line]
            elif self._trace and not text[:1].isspace():
                # Who pressed Ctrl-C knows.
                shown += [] if b"KeyboardInterrupt" in line else [*self._trace, line]
                self._trace = []
            else:
                (self._trace or shown).append(line)
        return shown

    def _show(self, lines: list[bytes]) -> None:
        # Several lines may share a write as long as a pipe takes them unmixed.
        batch: list[bytes] = []
        room = select.PIPE_BUF
        for line in map(self._headed, lines):
            if batch and len(line) > room:
                self._terminal.write(b"".join(batch))
                batch, room = [], select.PIPE_BUF
            batch.append(line)
            room -= len(line)
        self._terminal.write(b"".join(batch))

    def _headed(self, line: bytes) -> bytes:
        bare = self._inside or line == b"\r" or (self._returned and line == b"\n")
        self._returned = line.endswith(b"\r")
        self._inside = not (self._returned or line.endswith(b"\n"))
        return line if bare else self._prefix + line


def _pump(running: set[int], streams: list[_Stream], wake: int) -> int:
    """Pass everything on until all commands have ended; return the largest exit status."""
    poller = select.poll()
    for source in (wake, *(stream.source for stream in streams)):
        poller.register(source, select.POLLIN)
    going = {stream.source: stream for stream in streams}
    status, over, left = 0, float("inf"), _MOST_AFTER
    while going:
        due = min(over, *(stream.due for stream in going.values()))
        wait = None if due == float("inf") else max(0.0, due - time.monotonic()) * 1000
        ready = [source for source, _ in poller.poll(wait)]
        now = time.monotonic()
        taken = _take(ready, going, poller, now)
        if running:
            status = max(status, _reap(running, os.WNOHANG))
            over = over if running else now + _AFTER
        elif now >= over:
            left -= taken
            if not taken or left <= 0:
                break
    for stream in going.values():
        stream.close()
    return max(status, _reap(running, 0))


def _take(ready: list[int], going: dict[int, _Stream], poller: select.poll, now: float) -> int:
    """Read once from each that is ready and show what is due; return how many bytes came."""
    taken = 0
    for source in ready:
        data = os.read(source, _PIECE)
        if source not in going:  # the wake-up
            continue
        taken += len(data)
        if data:
            going[source].take(data, now)
        else:
            poller.unregister(source)
            going.pop(source).close()
    for stream in going.values():
        if now >= stream.due:
            stream.flush()
    return taken


def _reap(running: set[int], options: int) -> int:
    """Take those that have ended out, and return the largest of their exit statuses."""
    status = 0
    while running:
        pid, ended = os.waitpid(-1, options)
        if not pid:
            break
        if pid in running:
            running.remove(pid)
            code = os.waitstatus_to_exitcode(ended)
            status = max(status, code if code >= 0 else 128 - code)
    return status


def _say(message: str) -> None:
    try:
        os.write(2, os.fsencode(f"ezpz-launch: {message}\n"))
    except OSError:
        return


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # without the 2 ms of the interpreter's own tidying
