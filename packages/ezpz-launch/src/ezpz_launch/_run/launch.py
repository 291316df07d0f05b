"""One launch: what runs, the signals it hears, and its nodes, each with an agent."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

from ezpz_launch._errors import UsageError
from ezpz_launch._plan.options import GRACE
from ezpz_launch._run.agent import PROTOCOL_LINE, fork, is_proof, keep_alive, proof
from ezpz_topo import same_host

NEVER = float("inf")

# What the run loop tells the ranks' shims: one variable, one field a line.

VARIABLE = "EZPZ_CONTROL"

NODE_TIMEOUT = 15
"""Seconds without a sign of a node after which it is lost, unless requested otherwise."""

_HERE = os.path.dirname(os.path.abspath(__file__))


class Control(NamedTuple):
    """One launch's orders to its shims; `rank_shim.sh` lists the fields."""

    launch_id: str  # by which the launch's reports and processes are told
    hold: float  # seconds for which a rank that failed waits to be released
    where: tuple[str, ...] = ()  # host:port of the run loop, for the nodes' agents
    secret: str = ""  # what agents know, and do not say
    node_timeout: int = NODE_TIMEOUT  # seconds without a sign of a node after which it is lost
    files: str = ""  # a folder for the output of each rank
    prefix: bool = False  # whether each line begins with its rank and host
    whole_lines: bool = False  # whether no rank's line may be cut by another's
    tee: bool = False  # whether output goes to the files and to the terminal
    port: int = 0  # to be found free on rank 0's host; 0 where it has been
    device_type: str = ""  # torch's word for the devices, cuda or xpu; empty where there are none
    devices: int = 0  # of a node
    one_device: bool = False  # whether each rank is to see one device only
    attempt: int = 0  # from 0
    progress_file: str = ""  # where scripts report their progress
    job_id: str = ""  # the scheduler's; empty outside of a job
    run_file: str = ""  # where a History writes where its own file is
    fault: str = ""  # whose fault the end of the attempt before was, as people read it
    python: str = sys.executable  # that runs our programs beside the ranks
    programs: str = _HERE  # the folder of these

    def value(self) -> str:
        # Into files alone, sh's own redirection is enough.
        pumped = self.tee or ((self.prefix or self.whole_lines) and not self.files)
        program = os.path.join(self.programs, "rank_output.py")
        fields = [
            self.launch_id, f"{self.hold:.0f}", self.python,
            os.path.join(self.programs, "agent.py") if self.where else "", " ".join(self.where),
            self.secret, str(self.node_timeout), self.files,
            program if pumped else "", "--prefix" if self.prefix else "", str(self.port or ""),
            self.device_type, str(self.devices), str(int(self.one_device)), str(self.attempt),
            self.progress_file, self.job_id, self.run_file, self.fault,
        ]  # fmt: skip
        for each in fields:
            if "\n" in each:
                raise UsageError(f"{each!r} holds a line break; expected a path without one")
        # sh would drop an empty line.
        return "\n".join(each or "-" for each in fields)


class Launch(NamedTuple):
    argv: tuple[str, ...]  # the launcher's command line
    nproc: int  # how many ranks it starts
    hosts: tuple[str, ...]  # that get ranks, in the order of their nodes
    ppn: int  # ranks of a full host
    on_this_host: bool  # whether this host alone has ranks
    environment: Mapping[str, str]  # of the launcher and its ranks, complete
    control: Control  # what the ranks' shims are told
    grace: float = GRACE  # seconds from SIGTERM to SIGKILL
    idle_timeout: float = 0.0  # seconds without any output after which ranks hang; 0 for never
    signal_at: Callable[[], float] = lambda: NEVER  # when SIGUSR1 is due, since the epoch
    scratch: str = ""  # a file or folder of the launch, to be removed also if we are killed
    end_file: str = ""  # where another host asks us to end the launch
    is_over: Callable[[], bool] | None = None  # ranks end by themselves: whether they should have

    def host_of(self, rank: int) -> str:
        host = self.hosts[rank // self.ppn]
        return os.uname().nodename if same_host(host, "localhost") else host


@dataclass
class Facts:
    """What is known of how a launch ended; nodes are indices of its hosts."""

    hosts: tuple[str, ...]
    ppn: int
    own: Mapping[int, int]  # ranks that had ended when we told the others to, by status
    silent: set[int] = field(default_factory=set)  # nodes that answer no more
    gone: set[int] = field(default_factory=set)  # nodes whose agent ended without a farewell
    orphans: set[int] = field(default_factory=set)  # ranks that go on without what started them
    unstarted: Sequence[int] = ()  # ranks
    hangs: bool = False  # whether it was silent for too long
    deaf: Collection[int] = ()  # nodes that do not say where their ranks hang
    seen: float = 0.0  # when it was known that it fails, in seconds since the epoch


class Outcome(NamedTuple):
    exit_status: int  # that of ezpz-launch
    failure: tuple[int, str, int] | None = None  # rank, host and status of the first that failed
    told: signal.Signals | None = None  # the signal that ended it, if one did
    port_taken: bool = False  # whether another program holds the port on rank 0's host
    tail: bytes = b""  # the last bytes of standard error
    goes_with_job: bool = False  # whether it was ended because its job is going to be
    facts: Facts | None = None  # of one that failed; None where it was told to end


def how(status: int) -> str:
    if status > 128 and status - 128 in {s.value for s in signal.Signals}:
        return f"was killed by {signal.Signals(status - 128).name} (exit status {status})"
    return f"exited with status {status}"


# Signals that people and schedulers send to ezpz-launch, kept for the run loop.

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Those that end a launch; SIGUSR1 and SIGUSR2 reach the ranks and end nothing."""

Heard = tuple[list[signal.Signals], int]
"""What has arrived and was not yet looked at, and a file descriptor that wakes who sleeps on it."""


@contextmanager
def signals() -> Iterator[Heard]:
    """Collect the signals to pass on; each, and SIGCHLD, makes the file descriptor readable."""
    arrived: list[signal.Signals] = []

    def note(number: int, _frame: FrameType | None) -> None:
        arrived.append(signal.Signals(number))

    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    # What we were started to ignore (nohup) stays ignored, by the ranks too.
    passed_on = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
    heard = [s for s in passed_on if signal.getsignal(s) is not signal.SIG_IGN]
    previous = {s: signal.signal(s, note) for s in heard}
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    previous_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield arrived, read
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)


def pause(seconds: float, heard: Heard) -> int:
    """Wait, and return the number of a signal that told us to end meanwhile; 0 if none did."""
    arrived, wake = heard
    until = time.monotonic() + seconds
    while True:
        told = next((number for number in arrived if number in ENDING), None)
        left = until - time.monotonic()
        if told or left <= 0:
            return told or 0
        if select.select([wake], [], [], left)[0]:
            os.read(wake, 4096)


# The nodes of a launch: where their agents connect to, and how orders reach the ranks.

_HELLO = 10.0  # seconds in which an agent says who it is

_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
"""What the kernel says of a host that answers no more; one where the agent is dead does answer."""

_OTHER_FILES = 64  # files that may be open beside the connections to the nodes
_LONGEST_ANSWER = 1 << 24  # bytes of one node's stacks: more is no answer
_LAST_WORDS = 30.0  # seconds that this host's agent has to end what is left here: it may be busy
_GUARD = -1  # the node of this host's agent where its ranks have one of their own, or it has none


class _Connection:
    """A connection to an agent, whose node is None until it has proved that it is the node's."""

    def __init__(self, its: socket.socket, node: int | None = None) -> None:
        # An agent that reads no more must not hold us up for ever.
        its.settimeout(10)
        self.socket, self.fd, self.node = its, its.fileno(), node
        self.challenge, self.since = os.urandom(16).hex(), time.monotonic()
        self.received = b""


class Nodes:
    """Passes orders on to one agent a node, wherever it is, and keeps what they answer."""

    def __init__(self, launch: Launch, poll: select.poll) -> None:
        self._launch, self._poll = launch, poll
        self._connections: dict[int, _Connection] = {}
        self._agents: dict[int, _Connection] = {}
        self._here: tuple[int, _Connection] | None = None
        self._server: socket.socket | None = None
        self._awaited = set(range(len(launch.hosts)))  # a node says hello once
        # For agents that come late.
        self._pids: dict[int, dict[int, int]] = {}
        self._signals: list[int] = []
        self._ends_left = False
        self.where: tuple[str, ...] = ()  # host:port that agents of other hosts connect to
        self.secret = ""  # what they know
        self.why_not = ""  # why there can be none
        self.lost: list[int] = []  # ranks whose end no one would report
        self.unreported: list[int] = []  # ranks that have ended without a report
        self.silent: list[int] = []  # nodes that do not answer any more
        self.gone: list[int] = []  # nodes whose agent has ended
        self.answered: set[int] = set()  # nodes that said where their ranks are
        self.stacks: list[str] = []  # what nodes answer that are asked where their ranks are
        self.left: list[str] = []  # what ranks left running, by name
        if not launch.on_this_host:
            try:
                self._server = _listen(*_own_address(launch.hosts))
            except OSError as error:
                self.why_not = f"no address of ours that {launch.hosts[0]} could reach ({error})"
                return
            host, port = self._server.getsockname()[:2]
            self.where = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}",)
            self.secret = os.urandom(32).hex()
            poll.register(self._server, select.POLLIN)

    def watch(self, launcher: int) -> None:
        """Start this host's agent; if we are killed, nothing outlives us, nor the scratch file."""
        launch = self._launch
        pid, connection = fork(launch.control.launch_id, launcher, launch.scratch)
        self._here = pid, self._add(connection, _GUARD)
        if launch.on_this_host:
            self._greet(self._here[1], 0)

    def start(self, rank: int, pid: int) -> None:
        self._pids.setdefault(rank // self._launch.ppn, {})[rank] = pid
        self._send(rank // self._launch.ppn, f"start {rank} {pid}")

    def end(self, rank: int) -> None:
        self._pids.get(rank // self._launch.ppn, {}).pop(rank, None)
        self._send(rank // self._launch.ppn, f"end {rank}")

    def signal(self, number: int) -> None:
        """Signal every rank that runs, and those that are still to be reached when they are."""
        self._signals.append(number)
        for agent in list(self._agents.values()):
            self._write(agent, f"signal {number:d}")

    def release(self, rank: int, pid: int) -> None:
        self._send(rank // self._launch.ppn, f"release {pid}")

    def kill(self) -> None:
        for agent in list(self._agents.values()):
            self._write(agent, "kill")

    def end_left(self) -> None:
        """Have each agent, also a late one, name and end what ranks that all ended left running."""
        for agent in list(self._agents.values()) if not self._ends_left else ():
            self._write(agent, "end-left")
        self._ends_left = True

    def ask_stacks(self, ranks: Sequence[int]) -> None:
        """Ask these ranks where they are; each node has one answer for all of its own."""
        nodes: dict[int, list[str]] = {}
        for rank in ranks:
            nodes.setdefault(rank // self._launch.ppn, []).append(str(rank))
        for node, its in nodes.items():
            self._send(node, f"stacks {' '.join(its)}")

    def unreached(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank // self._launch.ppn not in self._agents]

    def close(self, *, farewell: bool) -> None:
        """End the agents and what ranks left running; without farewell, kill the ranks, too."""
        (self.end_left if farewell else self.kill)()
        here = self._here[1] if self._here else None
        for agent in list(self._connections.values()):
            if agent is here or (farewell and agent.node is not None):
                self._write(agent, "farewell")
            # No one waits for thousands of nodes: without a farewell their agents kill again.
            if agent is not here:
                self._drop(agent)
        if self._server is not None:
            self._unregister(self._server)
            self._server.close()
        if self._here is None or here is None:
            return
        until = time.monotonic() + _LAST_WORDS
        while here.fd in self._connections and time.monotonic() < until:
            if select.select([here.fd], [], [], _LAST_WORDS)[0]:
                self.handle(here.fd)
        self._drop(here)
        # Where it is not gone yet, our own end reaps it.
        os.waitpid(self._here[0], os.WNOHANG)

    def handle(self, fd: int) -> None:
        if self._server is not None and fd == self._server.fileno():
            self._accept(self._server)
        elif fd in self._connections:
            agent = self._connections[fd]
            try:
                chunk = agent.socket.recv(1 << 16)
            except OSError as error:
                self._fail(agent, error)
                return
            if not chunk:
                self._drop(agent)
                if agent.node is not None and agent.node != _GUARD:
                    self.gone.append(agent.node)
            agent.received += chunk
            self._take(agent)

    def _accept(self, server: socket.socket) -> None:
        try:
            # Of 10,000 nodes many come at once.
            while (connection := _accept(server)) is not None:
                keep_alive(connection, self._launch.control.node_timeout)
                stranger = self._add(connection)
                self._write(stranger, f"challenge {stranger.challenge}")
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            # The nodes that are left are not reached; the run loop says so when it matters.
            self._unregister(server)
        late = time.monotonic() - _HELLO
        for agent in list(self._connections.values()):
            if agent.node is None and agent.since < late:
                self._drop(agent)

    def _take(self, agent: _Connection) -> None:
        """Take what has come; who says anything but what an agent says is dropped."""
        while agent.fd in self._connections:
            line, newline, rest = agent.received.partition(b"\n")
            if len(line) > PROTOCOL_LINE:
                self._drop(agent)
                return
            if not newline:
                return
            what, *words = line.split() or [b""]
            number = int(words[0]) if len(words) == 1 and words[0].isdigit() else -1
            if agent.node is None:
                agent.received = rest
                if what != b"hello" or not self._welcome(agent, words):
                    self._drop(agent)
            elif what in (b"stacks", b"left") and 0 <= number <= _LONGEST_ANSWER:
                if len(rest) < number:
                    return
                getattr(self, what.decode()).append(rest[:number].decode(errors="replace"))
                self.answered.update({agent.node} if what == b"stacks" else ())
                agent.received = rest[number:]
            elif what in (b"lost", b"unreported") and number >= 0:
                agent.received = rest
                # An agent speaks for the ranks of its node.
                if number // self._launch.ppn == agent.node:
                    getattr(self, what.decode()).append(number)
            else:
                self._drop(agent)

    def _welcome(self, agent: _Connection, words: list[bytes]) -> bool:
        """Return whether it is the agent of a node that has none yet, and knows its secret."""
        if len(words) != 3 or not words[0].isdigit():
            return False
        node, own = int(words[0]), words[1].decode(errors="replace")
        proved = is_proof(words[2], self.secret, node, "agent", agent.challenge, own)
        if node not in self._awaited or not proved:
            return False
        self._awaited.remove(node)
        shown = proof(self.secret, node, "launch", own, agent.challenge)
        self._greet(agent, node, f"welcome {shown}")
        return True

    def _greet(self, agent: _Connection, node: int, *first: str) -> None:
        """Tell an agent that has just connected what it has missed."""
        agent.node = node
        self._agents[node] = agent
        started = [f"start {rank} {pid}" for rank, pid in self._pids.get(node, {}).items()]
        heard = [f"signal {number:d}" for number in self._signals]
        for line in (*first, *started, *heard, *["end-left"] * self._ends_left):
            self._send(node, line)

    def _send(self, node: int, order: str) -> None:
        if node in self._agents:
            self._write(self._agents[node], order)

    def _write(self, agent: _Connection, line: str) -> None:
        try:
            agent.socket.sendall(f"{line}\n".encode())
        except OSError as error:
            self._fail(agent, error)

    def _fail(self, agent: _Connection, error: OSError) -> None:
        """Drop a connection; where its agent has not closed it, the node is lost."""
        if agent.fd in self._connections and agent.node is not None and agent.node != _GUARD:
            (self.silent if error.errno in _SILENT else self.gone).append(agent.node)
        self._drop(agent)

    def _add(self, connection: socket.socket, node: int | None = None) -> _Connection:
        agent = _Connection(connection, node)
        self._connections[agent.fd] = agent
        self._poll.register(agent.fd, select.POLLIN)
        return agent

    def _drop(self, agent: _Connection) -> None:
        if self._connections.pop(agent.fd, None) is None:
            return
        if agent.node is not None:
            self._agents.pop(agent.node, None)
        self._poll.unregister(agent.fd)
        agent.socket.close()

    def _unregister(self, server: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(server)


def _listen(family: socket.AddressFamily, host: str) -> socket.socket:
    # All agents may come at once.
    server = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
    server.setblocking(False)
    return server


def _accept(server: socket.socket) -> socket.socket | None:
    """Return the next connection, if there is one; OSError: no more of them can be open."""
    try:
        connection = server.accept()[0]
    except (BlockingIOError, ConnectionError):
        return None  # that was the last one, or it is gone again
    # One a node: the usual limit of 1,024 open files is soon too low. Only now, when the
    # launcher has started: its ranks keep the limit that the user gave them.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if connection.fileno() >= soft - _OTHER_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return connection


def _own_address(hosts: Iterable[str]) -> tuple[socket.AddressFamily, str]:
    """Return the address of ours from which the first other host is reached."""
    own = os.uname().nodename
    names = [host for host in hosts if host.partition(".")[0] != own.partition(".")[0]][:4]
    error: OSError | None = None
    for name in [*names, own]:
        try:
            found = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
            for family, kind, protocol, _, address in found:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    return family, str(probe.getsockname()[0])
        except OSError as failed:
            error = failed
    raise error or OSError("no host to look up")
