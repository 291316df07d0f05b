"""The nodes of a launch: where their agents connect to, and how orders reach the ranks."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import time
from collections.abc import Iterable, Sequence

from ._agent import PROTOCOL_LINE, fork, is_proof, keep_alive, proof
from ._launch import Launch

_HELLO = 10.0  # seconds in which an agent says who it is

_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
"""What the kernel says of a host that answers no more; one where the agent is dead does answer."""

_LONGEST_ANSWER = 1 << 24  # bytes of one node's stacks: more is no answer
_LAST_WORDS = 5.0  # seconds that this host's agent has to end what is left here
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
        self._delivered: dict[int, int] = {}
        self.where: tuple[str, ...] = ()  # host:port that agents of other hosts connect to
        self.secret = ""  # what they know
        self.why_not = ""  # why there can be none
        self.lost: list[int] = []  # ranks whose end no one would report
        self.silent: list[int] = []  # nodes that do not answer any more
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
        """Take note of a rank that has started."""
        self._pids.setdefault(rank // self._launch.ppn, {})[rank] = pid
        self._send(rank // self._launch.ppn, f"start {rank} {pid}")

    def end(self, rank: int) -> None:
        """Take note of a rank that has ended."""
        self._pids.get(rank // self._launch.ppn, {}).pop(rank, None)
        self._send(rank // self._launch.ppn, f"end {rank}")

    def signal(self, number: int) -> None:
        """Signal every rank that runs, and those that are still to be reached when they are."""
        self._signals.append(number)
        for node in list(self._agents):
            self._deliver(node)

    def release(self, rank: int, pid: int) -> None:
        """Let the shim of a rank that failed go."""
        self._send(rank // self._launch.ppn, f"release {pid}")

    def kill(self) -> None:
        """SIGKILL all that is left of the launch."""
        self._to_all("kill")

    def end_left(self) -> None:
        """End what ranks that have all ended left running."""
        self._to_all("left")  # it is named before the launcher can end
        self._to_all("end-left")

    def ask_stacks(self, ranks: Sequence[int]) -> None:
        """Ask these ranks where they are; each node has one answer for all of its own."""
        nodes: dict[int, list[str]] = {}
        for rank in ranks:
            nodes.setdefault(rank // self._launch.ppn, []).append(str(rank))
        for node, its in nodes.items():
            self._send(node, f"stacks {' '.join(its)}")

    def unreached(self, ranks: Sequence[int]) -> list[int]:
        """Return those of these ranks that nothing reaches."""
        return [rank for rank in ranks if rank // self._launch.ppn not in self._agents]

    def close(self, *, farewell: bool) -> None:
        """End the agents and what ranks left running; without farewell, kill the ranks, too."""
        self._to_all("end-all-left" if farewell else "kill")
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
        """Serve a socket that is ready."""
        if self._server is not None and fd == self._server.fileno():
            # Of 10,000 nodes many come at once.
            while (connection := self._accept()) is not None:
                keep_alive(connection, self._launch.control.node_timeout)
                stranger = self._add(connection)
                self._write(stranger, f"challenge {stranger.challenge}")
            late = time.monotonic() - _HELLO
            for agent in list(self._connections.values()):
                if agent.node is None and agent.since < late:
                    self._drop(agent)
        elif fd in self._connections:
            agent = self._connections[fd]
            try:
                chunk = agent.socket.recv(1 << 16)
            except OSError as error:
                self._fail(agent, error)
                return
            if not chunk:
                self._drop(agent)
            agent.received += chunk
            self._take(agent)

    def _take(self, agent: _Connection) -> None:
        """Take what has come; who says anything but what an agent says is dropped."""
        while agent.fd in self._connections:
            line, newline, rest = agent.received.partition(b"\n")
            if len(line) > PROTOCOL_LINE:
                self._drop(agent)
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
                text = rest[:number].decode(errors="replace")
                (self.stacks if what == b"stacks" else self.left).append(text)
                agent.received = rest[number:]
            elif what == b"lost" and number >= 0:
                agent.received = rest
                # An agent speaks for the ranks of its node.
                if number // self._launch.ppn == agent.node:
                    self.lost.append(number)
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
        missed = [f"start {rank} {pid}" for rank, pid in self._pids.get(node, {}).items()]
        for line in (*first, *missed):
            self._send(node, line)
        self._deliver(node)

    def _deliver(self, node: int) -> None:
        for number in self._signals[self._delivered.get(node, 0) :]:
            self._send(node, f"signal {number:d}")
        self._delivered[node] = len(self._signals)

    def _to_all(self, order: str) -> None:
        for node in list(self._agents):
            self._send(node, order)

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
        if agent.fd in self._connections and agent.node is not None and error.errno in _SILENT:
            self.silent.append(agent.node)
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

    def _accept(self) -> socket.socket | None:
        if self._server is None:
            return None
        try:
            return self._server.accept()[0]
        except (BlockingIOError, ConnectionError):
            return None  # that was the last one, or it is gone again
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
        # One a node: the usual limit of 1,024 open files is soon too low. Only now, when the
        # launcher has started: its ranks keep the limit that the user gave them.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return self._accept()
        # The nodes that are left are not reached; the run loop says so when it matters.
        self._unregister(self._server)
        return None

    def _unregister(self, server: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(server)


def _listen(family: socket.AddressFamily, host: str) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.bind((host, 0))
        # All agents may come at once.
        server.listen(socket.SOMAXCONN)
        server.setblocking(False)
    except OSError:
        server.close()
        raise
    return server


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
