"""Program: run one rank's command under ezpz-launch, pass its output on, report how it ended.

usage: python -I -S rank_main.py COMMAND [ARG...]
environment: EZPZ_CONTROL (ezpz_launch._run.launch.RankSettings), and what rank_shim.sh exports
exit status: the command's own, 128 + signal; 127 or 126 if it is not there or cannot be executed;
             2 if the rank's files cannot be opened

Every rank starts with it, so it imports next to nothing, and nothing of ours.

It stays between the launcher and the command: mpiexec ORs the ranks' exit statuses (1 and 6 give 7)
and waits for the others, so only this process can tell which rank failed first, and how. It shares
the command's process group, and outlives the signals that are meant for the command.

A complete line is one write, so that ranks which share a pipe do not cut each other's lines. What
has no end yet (a prompt, a progress bar) is shown after a second. With EZPZ_TERMINAL set all ranks'
lines are shown on one terminal: a bar's carriage return comes last, and every line erases what lies
to its right, so that no line tears the bar of rank 0. Bars of other ranks are left out, as are
tracebacks of a KeyboardInterrupt unless EZPZ_DEBUG is set.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # C: the enums of signal cost 5 ms
import errno
import os
import select
import sys
import time

LINE_SECONDS = 1.0
"""After which the beginning of a line is shown without its end."""

BAR_SECONDS = 0.1
"""The same on a terminal, where progress bars are drawn."""

CHILD_SECONDS = 0.5
"""For what still writes when the command has ended: a child that it left."""

MAX_CHILD_BYTES = 1 << 20
"""Bytes still taken after those seconds: all that a pipe of Linux can hold."""

CHUNK = 1 << 16
"""Bytes read at once, and of a line that are held at most."""

PASSED_ON = {
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
}  # fmt: skip
"""Signals that are meant for the command."""

ERASE_LINE = b"\x1b[K"


def main(command: list[str]) -> int:
    """Run the command as this rank; return the exit status to end with."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback
    settings = parse_settings(os.environ["EZPZ_CONTROL"])
    if os.environ["LOCAL_RANK"] == "0" and "addresses" in settings:
        start_agent(settings)
    # Ours alone: a launch inside the command would report to the wrong place.
    del os.environ["EZPZ_CONTROL"]
    rank = int(os.environ["RANK"])
    set_variables(settings, os.environ)
    if rank == 0 and "port" in settings and port_is_taken(int(settings["port"])):
        report(settings, "t", 0, int(settings["port"]))
    signals = Signals()
    status = run_command(command, rank, settings, signals)
    report_cause(settings, rank)
    signals.received.clear()
    report(settings, "e", rank, status)
    if status:
        wait_for_release(signals, float(settings.get("hold_seconds", "0")))
    keep_pmi_open(os.environ)
    return status


def parse_settings(text: str) -> dict[str, str]:
    """Return the fields of EZPZ_CONTROL; those that are empty or zero are missing."""
    return dict(line.split("=", 1) for line in text.split("\n"))


def start_agent(settings: dict[str, str]) -> None:
    """Start this node's agent, which connects to ezpz-launch on another host."""
    program = os.path.join(settings["programs"], "agent.py")
    words = [settings["python"], "-I", "-S", program, os.environ["NODE_RANK"]]
    no_files = [(os.POSIX_SPAWN_OPEN, each, os.devnull, os.O_RDWR, 0) for each in (0, 1, 2)]
    try:
        os.posix_spawn(settings["python"], words, os.environ, file_actions=no_files)
    except OSError:
        return  # without an agent ezpz-launch says so when it matters


# What the command finds in its environment.


def set_variables(settings: dict[str, str], env: dict[str, str] | os._Environ[str]) -> None:
    """Set the variables of this attempt, and those that choose this rank's device."""
    env["EZPZ_ATTEMPT"] = settings.get("attempt", "0")
    # torchrun's word for it, which scripts read.
    env["TORCHELASTIC_RESTART_COUNT"] = env["EZPZ_ATTEMPT"]
    for name, variable in (
        ("progress_file", "EZPZ_PROGRESS_FILE"),
        ("job_id", "EZPZ_JOB_ID"),
        ("run_file", "EZPZ_RUN_FILE"),
        ("last_fault", "EZPZ_LAST_FAULT"),
    ):
        if name in settings:
            env[variable] = settings[name]
    if env.get("EZPZ_LAUNCH_ID"):
        # By it a launch finds what launches inside its ranks have started.
        outer = [env["EZPZ_INSIDE"]] if env.get("EZPZ_INSIDE") else []
        env["EZPZ_INSIDE"] = ":".join([*outer, env["EZPZ_LAUNCH_ID"]])
    env["EZPZ_LAUNCH_ID"] = settings["launch_id"]
    # A rank that leaves because of another writes that one's number there.
    folder = env.get("TMPDIR") or "/tmp"
    env["EZPZ_CAUSE_FILE"] = f"{folder}/ezpz-{settings['launch_id']}-{env['RANK']}"
    if "device_type" in settings:
        choose_device(settings, env)
    env["EZPZ_LOCAL_DEVICE"] = env["LOCAL_RANK"]


def choose_device(settings: dict[str, str], env: dict[str, str] | os._Environ[str]) -> None:
    """Make LOCAL_RANK the index of a device that this rank sees, or show it that one only."""
    local_rank = int(env["LOCAL_RANK"])
    count = int(settings.get("devices", "0"))
    variable = "CUDA_VISIBLE_DEVICES"
    if settings["device_type"] == "xpu":
        variable = "ZE_AFFINITY_MASK"
    elif env.get("HIP_VISIBLE_DEVICES"):
        # HIP reads CUDA's only where its own is not set, and counts within what ROCR left.
        variable = "HIP_VISIBLE_DEVICES"
    elif not env.get(variable) and env.get("ROCR_VISIBLE_DEVICES"):
        count = len(env["ROCR_VISIBLE_DEVICES"].rstrip(",").split(","))
    visible = env.get(variable)
    if visible == "":
        return  # the user hides every device
    if visible:
        devices = visible.rstrip(",").split(",")
        count = len(devices)
        device = devices[local_rank % count]
    else:
        device = str(local_rank % max(1, count))
    if count:
        env["LOCAL_RANK"] = str(local_rank % count)
    if "one_device" in settings:
        env[variable] = device
        env["LOCAL_RANK"] = "0"


# What ezpz-launch is told.


def report(settings: dict[str, str], kind: str, rank: int, value: int) -> bool:
    """Write a report to standard error, where ezpz-launch takes it out; False if nobody reads.

    Twice, because a launcher may cut a stream and put another rank's piece between; and each word
    again, to notice that. `ezpz_launch._run.output` has the letters.
    """
    words = f"{kind} {rank} {value}"
    attempt = settings["launch_id"].rpartition("-")[2]
    line = f"\x1e{attempt} {words}|{words}\x1f\n".encode()
    try:
        write(2, line * 2)
    except OSError:
        return False
    return True


def report_cause(settings: dict[str, str], rank: int) -> None:
    """Report because of which other rank this one left, if it said so."""
    path = os.environ["EZPZ_CAUSE_FILE"]
    try:
        with open(path, "rb") as file:
            text = file.read(100).strip()
        os.unlink(path)
    except OSError:
        return
    if text.isdigit():
        report(settings, "c", rank, int(text))


def port_is_taken(port: int) -> bool:
    """True if another program holds this port on any address of this host."""
    import socket  # noqa: PLC0415  # rank 0 of another host needs it, and no other rank

    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family) as probe:
                # Else a port would be taken for a minute after its last connection.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True  # anything else: a host without that family
    return False


def wait_for_release(signals: Signals, seconds: float) -> None:
    """Wait for SIGTERM.

    Some launchers kill the others as soon as they see a failure: ezpz-launch gives them the time
    that it promises, and then releases us.
    """
    deadline = time.monotonic() + seconds
    while signal.SIGTERM not in signals.received and time.monotonic() < deadline:
        seconds_left = max(0.0, deadline - time.monotonic())
        ready, *_ = select.select([signals.wake_fd], [], [], seconds_left)
        if ready:
            os.read(signals.wake_fd, CHUNK)


def keep_pmi_open(env: dict[str, str] | os._Environ[str]) -> None:
    """Keep this rank's PMI socket open in a process of its own, which ends as Hydra's proxy does.

    Else the proxy uses a whole core from when one rank's socket closes until its last rank ends.
    """
    is_hydra = env["EZPZ_LAUNCHER"] == "pmi" and env.get("PMI_FD", "").isdigit()
    if not is_hydra or env["LOCAL_WORLD_SIZE"] == "1":
        return
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    # A grandchild: an agent would take a child for this rank's command, which goes on without it.
    try:
        if os.fork() == 0:
            hold_until_proxy_ends(int(env["PMI_FD"]))
    finally:
        os._exit(0)


def hold_until_proxy_ends(pmi_fd: int) -> None:
    """Hold the PMI socket until the proxy closes it, and nothing else."""
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    # Hydra waits for the ends of the descriptors that it has leaked.
    os.closerange(3, pmi_fd)
    os.closerange(pmi_fd + 1, os.sysconf("SC_OPEN_MAX"))
    os.read(pmi_fd, 1)


# The command: its pipes, its signals, its program.


class Signals:
    """Signals that arrive; ``wake_fd`` becomes readable by them, and by the end of a child."""

    def __init__(self) -> None:
        # What we were started to ignore (nohup) stays ignored, by the command too.
        self._ignored = [
            each
            for each in (*PASSED_ON, signal.SIGCHLD)
            if signal.getsignal(each) == signal.SIG_IGN
        ]
        self.received: list[int] = []
        self.wake_fd, write_fd = os.pipe()
        os.set_blocking(self.wake_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, self._record)
        # Before this a signal ends us, and no command is there to miss it. From here one waits.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)

    def _record(self, number: int, _frame: object) -> None:
        self.received.append(number)

    def accept(self) -> None:
        """Record signals from now on; unlike an ignored one, a handler is not inherited."""
        for number in PASSED_ON.difference(self._ignored):
            signal.signal(number, self._record)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def restore(self) -> None:
        """Leave the command what we were given; Python itself ignores the first two."""
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, *PASSED_ON):
            ignored = number in self._ignored
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def run_command(command: list[str], rank: int, settings: dict[str, str], signals: Signals) -> int:
    """Run the command to its end, and return its exit status."""
    host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    try:
        files = open_files(settings["log_dir"], rank) if "log_dir" in settings else []
    except OSError as error:
        say(
            f"{error.filename}: cannot be opened on {host} ({error.strerror}); "
            "expected a directory for the ranks' output; give another --log-dir"
        )
        report(settings, "s", rank, os.getpid())
        signals.accept()
        return 2
    is_shown = not files or "tee" in settings
    is_pumped = "tee" in settings or (
        is_shown and ("prefix" in settings or "whole_lines" in settings)
    )
    streams: list[OutputStream] = []
    outputs: list[int] = files  # the command's standard output and error; ours if there are none
    if is_pumped:
        prefix = f"[{rank}@{host}] ".encode() if "prefix" in settings else b""
        streams, outputs = make_streams(rank, prefix, files)
    if not report(settings, "s", rank, os.getpid()):
        return 128 + int(signal.SIGPIPE)  # ezpz-launch is gone, and nobody would end the command
    child = start_command(command, outputs, f"rank {rank} on {host}", signals)
    for number in signal.sigpending() & PASSED_ON:
        os.kill(child, number)  # it may have come before the child was there
    signals.accept()
    return pump(child, streams, signals.wake_fd)


def open_files(folder: str, rank: int) -> list[int]:
    """Open the rank's two files to append to: a second attempt writes where the first ended."""
    # This node may not have the folder, if it is not shared.
    os.makedirs(folder, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    return [os.open(f"{folder}/rank-{rank}.{end}", flags, 0o666) for end in ("out", "err")]


def make_streams(
    rank: int, prefix: bytes, files: list[int]
) -> tuple[list[OutputStream], list[int]]:
    """Return the streams that pass the output on, and the ends of their pipes to write to."""
    view = ""
    if os.environ.get("EZPZ_TERMINAL"):
        view = "bar" if rank == 0 else "lines"
    streams = []
    outputs = []
    for index, name in enumerate(("out", "err")):
        source, output = os.pipe()
        terminal = Sink(index + 1, f"the terminal's std{name}")
        file = Sink(files[index], f"rank-{rank}.{name}") if files else None
        streams.append(OutputStream(source, terminal, file, prefix, view))
        outputs.append(output)
    return streams, outputs


def start_command(command: list[str], outputs: list[int], rank_label: str, signals: Signals) -> int:
    """Fork the command; return its process id."""
    child = os.fork()
    if child == 0:
        try:
            for descriptor, output in enumerate(outputs, start=1):
                os.dup2(output, descriptor)
            signals.restore()
            os._exit(exec_command(command, rank_label, initial_environment()))
        finally:
            os._exit(126)
    for output in outputs:
        os.close(output)
    return child


def exec_command(command: list[str], rank_label: str, environment: dict[bytes, bytes]) -> int:
    """Become the command, found as a shell would; return the exit status if that fails."""
    program = os.fsencode(command[0])
    paths = [program]
    if b"/" not in program:
        folders = environment.get(b"PATH", b"/usr/bin:/bin").split(b":")
        paths = [os.path.join(folder, program) for folder in folders]
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
        say(f"{rank_label}: {command[0]!r}: {refused}; expected a program that can be executed")
        return 126
    where = "no such file" if b"/" in program else "not found on PATH"
    say(f"{rank_label}: {command[0]!r}: {where}; expected it on every host; give a path that is")
    return 127


def initial_environment() -> dict[bytes, bytes]:
    """Return our environment less LC_CTYPE, if Python added it (in the C locale: PEP 538)."""
    environment = dict(os.environb)
    if environment.get(b"LC_CTYPE") in (b"C.UTF-8", b"C.utf8", b"UTF-8"):
        try:
            with open("/proc/self/environ", "rb") as file:
                initial = file.read()
        except OSError:
            return environment
        if b"\0LC_CTYPE=" not in b"\0" + initial:
            del environment[b"LC_CTYPE"]
    return environment


# Output.


def write(descriptor: int, data: bytes) -> None:
    """Write all of it, in one call where the system takes it so."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            # Another process that shares it has made it so.
            select.select([], [descriptor], [])


class Sink:
    """A descriptor to write to; an error there is reported once and stops nobody."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name
        self._is_closed = False
        self._has_reported = False

    def write(self, data: bytes) -> None:
        if self._is_closed:
            return
        try:
            write(self._descriptor, data)
        except OSError as error:
            # If nobody reads any more, the command goes on regardless.
            self._is_closed = error.errno in (errno.EPIPE, errno.EIO, errno.EBADF)
            if not self._is_closed and not self._has_reported:
                self._has_reported = True
                say(
                    f"{self._name}: got {error.strerror} on writing; expected room for this "
                    "rank's output; make some, what comes until then is lost"
                )


class OutputStream:
    """The command's stdout or stderr, on its way to the terminal, and to a file if there is one."""

    def __init__(
        self, source: int, terminal: Sink, file: Sink | None, prefix: bytes, view: str
    ) -> None:
        # How a terminal shows it: "bar" for rank 0, "lines" for others; "" where there is none.
        self.source = source
        self._terminal = terminal
        self._file = file
        self._view = view
        self._prefix = ERASE_LINE + prefix if view else prefix
        self._held = b""  # the beginning of a line
        self._held_since = 0.0
        self._is_inside_line = False  # whether what was shown last has no end
        self._has_returned = False  # whether it ended with a carriage return
        self._traceback: list[bytes] = []  # lines of a traceback whose end is still to come

    @property
    def due(self) -> float:
        """When the held beginning of a line is to be shown, on the monotonic clock."""
        if not self._held or (self._view == "lines" and self._has_returned):
            return float("inf")
        return self._held_since + (BAR_SECONDS if self._view else LINE_SECONDS)

    def take(self, data: bytes, now: float) -> None:
        if self._file:
            self._file.write(data)
        if not self._held:
            self._held_since = now
        data = self._held + data
        # A "\r" ends a line too: a progress bar draws over its prefix. Whether the last byte is
        # one, or half of "\r\n", the next byte tells.
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
        if end:
            lines = data[:end].splitlines(keepends=True)
            self._show(self._filter_for_terminal(lines) if self._view else lines)
            self._held_since = now
        self._held = data[end:]
        if len(self._held) >= CHUNK:
            self.flush()

    def flush(self) -> None:
        """Show the held beginning of a line."""
        if self._held:
            bar_end = b"\r" if self._view and self._has_returned else b""
            self._terminal.write(self._with_prefix(self._held + bar_end))
        self._held = b""

    def close(self) -> None:
        """Show what is left; with a prefix, the next rank's line must not continue ours."""
        self._show(self._traceback)
        self.flush()
        if self._prefix and self._is_inside_line:
            self._terminal.write(b"\n")
        os.close(self.source)

    def _filter_for_terminal(self, lines: list[bytes]) -> list[bytes]:
        """Return those of these lines that a terminal which several ranks share shows."""
        shown: list[bytes] = []
        for line in lines:
            # torch puts this before each line.
            text = line.partition(b"]: ")[2] if line.startswith(b"[rank") else line
            if line.endswith(b"\r") and self._view == "lines":
                self._has_returned = True
            elif text.startswith(b"Traceback (most recent call last)") and not is_debugging():
                shown += self._traceback
                self._traceback = [line]
            elif self._traceback and text[:1].isspace():
                self._traceback.append(line)
            elif self._traceback:
                # Who pressed Ctrl-C knows why it ended.
                if b"KeyboardInterrupt" not in line:
                    shown += [*self._traceback, line]
                self._traceback = []
            else:
                shown.append(line)
        return shown

    def _show(self, lines: list[bytes]) -> None:
        # Several lines may share a write as long as a pipe takes them unmixed.
        batch: list[bytes] = []
        room = select.PIPE_BUF
        for line in map(self._with_prefix, lines):
            if batch and len(line) > room:
                self._terminal.write(b"".join(batch))
                batch = []
                room = select.PIPE_BUF
            batch.append(line)
            room -= len(line)
        self._terminal.write(b"".join(batch))

    def _with_prefix(self, line: bytes) -> bytes:
        is_continued = self._is_inside_line or line == b"\r"
        is_continued = is_continued or (self._has_returned and line == b"\n")
        self._has_returned = line.endswith(b"\r")
        self._is_inside_line = not (self._has_returned or line.endswith(b"\n"))
        if is_continued:
            return line
        return self._prefix + line


def is_debugging() -> bool:
    return bool(os.environ.get("EZPZ_DEBUG"))


def pump(child: int, streams: list[OutputStream], wake_fd: int) -> int:
    """Pass the output on until the command has ended; return its exit status."""
    poller = select.poll()
    for source in (wake_fd, *(stream.source for stream in streams)):
        poller.register(source, select.POLLIN)
    open_streams = {stream.source: stream for stream in streams}
    status: int | None = None
    ends_at = float("inf")
    bytes_left = MAX_CHILD_BYTES
    while open_streams:
        due = min(ends_at, *(stream.due for stream in open_streams.values()))
        timeout = None
        if due != float("inf"):
            timeout = max(0.0, due - time.monotonic()) * 1000
        ready = [source for source, _ in poller.poll(timeout)]
        now = time.monotonic()
        taken = read_ready(ready, open_streams, poller, now)
        if status is None:
            status = reap(child, os.WNOHANG)
            if status is not None:
                ends_at = now + CHILD_SECONDS
        elif now >= ends_at:
            bytes_left -= taken
            if not taken or bytes_left <= 0:
                break
    for stream in open_streams.values():
        stream.close()
    while status is None:
        status = reap(child, 0)
    return status


def read_ready(
    ready: list[int], streams: dict[int, OutputStream], poller: select.poll, now: float
) -> int:
    """Read once from each that is ready and show what is due; return how many bytes came."""
    taken = 0
    for source in ready:
        data = os.read(source, CHUNK)
        if source not in streams:  # a signal
            continue
        taken += len(data)
        if data:
            streams[source].take(data, now)
        else:
            poller.unregister(source)
            streams.pop(source).close()
    for stream in streams.values():
        if now >= stream.due:
            stream.flush()
    return taken


def reap(child: int, options: int) -> int | None:
    """Reap processes that have ended; return the child's exit status if it is one of them."""
    while True:
        pid, ended = os.waitpid(-1, options)
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(ended)
            return code if code >= 0 else 128 - code


def say(message: str) -> None:
    try:
        os.write(2, os.fsencode(f"ezpz-launch: {message}\n"))
    except OSError:
        return


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # without the 2 ms of the interpreter's own tidying
