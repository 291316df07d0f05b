"""ezpz-launch's side of its node agents: where they connect to, and what they are ordered."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import time
from collections.abc import Collection, Iterable, Sequence

from ezpz_launch._run.agent import start_local_agent
from ezpz_launch._run.channel import (
    MAX_MESSAGE_BYTES,
    Decoder,
    Message,
    ProtocolError,
    encode,
    is_signed,
    keep_alive,
    new_challenge,
    sign,
)
from ezpz_launch._run.launch import Launch
from ezpz_launch._run.node_ranks import NodeRanks

HELLO_SECONDS = 10.0
"""In which whoever connects has to prove that it is an agent."""

SEND_SECONDS = 10.0
"""After which an agent that reads no more is given up."""

FAREWELL_SECONDS = 30.0
"""That this host's agent has to end what is left here: the host may be busy."""

OTHER_FILES = 64
"""Files that may be open beside the connections to the nodes."""

_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
"""What the kernel says of a host that no longer answers; one whose agent is dead does answer."""

_NO_NODE = -1
"""The node of this host's agent where this host has no ranks, or its ranks have another agent."""


class _Connection:
    """A connection to an agent; its node is None until it has proved which one it is."""

    def __init__(self, connection: socket.socket, node: int | None) -> None:
        connection.settimeout(SEND_SECONDS)
        self.socket = connection
        self.fd = connection.fileno()
        self.node = node
        self.challenge = new_challenge()
        self.opened_at = time.monotonic()
        self.decoder = Decoder()


class NodeAgents:
    """Orders one agent a node, wherever it runs, and collects what the agents report."""

    def __init__(self, launch: Launch, poll: select.poll) -> None:
        self._launch = launch
        self._poll = poll
        self._connections: dict[int, _Connection] = {}  # by file descriptor
        self._agents: dict[int, _Connection] = {}  # by node
        self._local: _Connection | None = None
        self._local_pid = 0
        self._server: socket.socket | None = None
        self._expected = set(range(len(launch.hosts)))  # nodes whose agent has not connected yet
        # For agents that connect late.
        self._pids: dict[int, dict[int, int]] = {}
        self._signals: list[int] = []
        self._leftovers_ended = False
        self.addresses: tuple[str, ...] = ()  # host:port that agents of other hosts connect to
        self.secret = ""
        self.why_none = ""  # why agents of other hosts cannot connect
        # What agents have reported; the run takes it.
        self.lost_ranks: list[int] = []  # whose end nobody will report
        self.gone_ranks: list[int] = []  # whose report may be on the way
        self.unreachable_nodes: list[int] = []
        self.dead_nodes: list[int] = []  # nodes whose agent has ended
        self.stacks: list[str] = []
        self.nodes_with_stacks: set[int] = set()
        self.leftovers: list[str] = []
        if not launch.on_this_host:
            self._open_listener()

    def _open_listener(self) -> None:
        try:
            self._server = listen(*find_own_address(self._launch.hosts))
        except OSError as error:
            first = self._launch.hosts[0]
            self.why_none = f"no address of ours that {first} could reach ({error})"
            return
        host, port = self._server.getsockname()[:2]
        self.addresses = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}",)
        self.secret = os.urandom(32).hex()
        self._poll.register(self._server, select.POLLIN)

    def start_local(self) -> None:
        """Start this host's agent: if we are killed, it ends everything that we started."""
        launch = self._launch
        pid, connection = start_local_agent(launch.settings.launch_id, launch.scratch)
        self._local_pid = pid
        self._local = self._add(connection, _NO_NODE)
        if launch.on_this_host:
            self._register(self._local, 0)

    # Orders.

    def set_launcher(self, pid: int) -> None:
        """Let this host's agent know the process that starts the ranks."""
        if self._local is not None:
            self._send(self._local, {"type": "launcher", "pid": pid})

    def start(self, rank: int, pid: int) -> None:
        node = rank // self._launch.ppn
        self._pids.setdefault(node, {})[rank] = pid
        self._send_to_node(node, {"type": "start", "rank": rank, "pid": pid})

    def end(self, rank: int) -> None:
        node = rank // self._launch.ppn
        self._pids.get(node, {}).pop(rank, None)
        self._send_to_node(node, {"type": "end", "rank": rank})

    def signal(self, number: int) -> None:
        """Signal every rank that runs, and those on nodes whose agent connects later."""
        self._signals.append(int(number))
        self._broadcast({"type": "signal", "number": int(number)})

    def release_failed_rank(self, rank: int, pid: int) -> None:
        self._send_to_node(rank // self._launch.ppn, {"type": "release", "pid": pid})

    def kill_ranks(self) -> None:
        self._broadcast({"type": "kill"})

    def end_leftover_processes(self) -> None:
        """Have each agent end what ranks left running after they have all ended."""
        if not self._leftovers_ended:
            self._broadcast({"type": "end_leftover_processes"})
        self._leftovers_ended = True

    def request_stacks(self, ranks: Sequence[int]) -> None:
        """Request the stacks of these ranks; each node sends one reply for all of its own."""
        ranks_of_node: dict[int, list[int]] = {}
        for rank in ranks:
            ranks_of_node.setdefault(rank // self._launch.ppn, []).append(rank)
        for node, of_node in ranks_of_node.items():
            self._send_to_node(node, {"type": "stacks", "ranks": of_node})

    def without_agent(self, ranks: Iterable[int]) -> list[int]:
        """Return those of these ranks that no agent reaches."""
        return [rank for rank in ranks if rank // self._launch.ppn not in self._agents]

    def close(self, *, farewell: bool) -> None:
        """End the agents and what ranks left running; without farewell, kill the ranks as well."""
        if farewell:
            self.end_leftover_processes()
        else:
            self.kill_ranks()
        for connection in list(self._connections.values()):
            is_local = connection is self._local
            if is_local or (farewell and connection.node is not None):
                self._send(connection, {"type": "farewell"})
            # Nobody waits for thousands of nodes: without a farewell their agents kill again.
            if not is_local:
                self._drop(connection)
        if self._server is not None:
            self._unregister(self._server)
            self._server.close()
        if self._local is None:
            return
        if not farewell and self._local.fd not in self._connections:
            # This host's agent was killed: what it was to end is ours to end.
            NodeRanks(self._launch.settings.launch_id).kill_ranks()
        deadline = time.monotonic() + FAREWELL_SECONDS
        while self._local.fd in self._connections and time.monotonic() < deadline:
            ready, *_ = select.select([self._local.fd], [], [], FAREWELL_SECONDS)
            if ready:
                self.handle(self._local.fd)
        self._drop(self._local)
        # If it still runs, our own end reaps it.
        os.waitpid(self._local_pid, os.WNOHANG)

    # What arrives.

    def handle(self, fd: int) -> None:
        """Read from a descriptor that is ready."""
        if self._server is not None and fd == self._server.fileno():
            self._accept_all(self._server)
        elif fd in self._connections:
            self._read(self._connections[fd])

    def _accept_all(self, server: socket.socket) -> None:
        try:
            connection = accept(server)
            while connection is not None:  # of 10,000 nodes many connect at once
                keep_alive(connection, self._launch.settings.node_timeout)
                stranger = self._add(connection, None)
                self._send(stranger, {"type": "challenge", "challenge": stranger.challenge})
                connection = accept(server)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            # The other nodes are not reached; the run says so when it matters.
            self._unregister(server)
        oldest = time.monotonic() - HELLO_SECONDS
        for each in list(self._connections.values()):
            if each.node is None and each.opened_at < oldest:
                self._drop(each)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(1 << 16)
        except OSError as error:
            self._fail(connection, error)
            return
        if not data:
            self._drop(connection)
            if connection.node not in (None, _NO_NODE):
                self.dead_nodes.append(connection.node)
            return
        connection.decoder.feed(data)
        try:
            while connection.fd in self._connections:
                message = connection.decoder.next_message()
                if message is None:
                    return
                self._take(connection, message)
        except (ProtocolError, KeyError, TypeError, ValueError, OverflowError):
            self._drop(connection)  # not an agent

    def _take(self, connection: _Connection, message: Message) -> None:
        if connection.node is None:
            self._welcome(connection, message)
            return
        match message["type"]:
            case "lost":
                self._take_rank(connection, message, self.lost_ranks)
            case "gone":
                self._take_rank(connection, message, self.gone_ranks)
            case "stacks":
                self.stacks.append(str(message["text"]))
                self.nodes_with_stacks.add(connection.node)
            case "leftovers":
                self.leftovers.append(str(message["text"]))
            case other:
                raise ProtocolError(f"a message of type {other!r}")

    def _take_rank(self, connection: _Connection, message: Message, ranks: list[int]) -> None:
        """Take a rank that an agent reports; it reports those of its own node only."""
        rank = int(message["rank"])
        if rank // self._launch.ppn == connection.node:
            ranks.append(rank)

    def _welcome(self, connection: _Connection, message: Message) -> None:
        """Accept the agent of a node that has none yet, if it knows the secret."""
        if message["type"] != "hello":
            raise ProtocolError("expected hello")
        node = int(message["node"])
        its = str(message["challenge"])
        signed = is_signed(
            message["signature"], self.secret, node, "agent", connection.challenge, its
        )
        if node not in self._expected or not signed:
            raise ProtocolError("not the agent of a node that is expected")
        self._expected.remove(node)
        signature = sign(self.secret, node, "launch", its, connection.challenge)
        self._send(connection, {"type": "welcome", "signature": signature})
        self._register(connection, node)

    def _register(self, connection: _Connection, node: int) -> None:
        """Make a connection a node's agent, and send it the orders that it has missed."""
        connection.node = node
        connection.decoder.max_bytes = MAX_MESSAGE_BYTES
        self._agents[node] = connection
        for rank, pid in self._pids.get(node, {}).items():
            self._send_to_node(node, {"type": "start", "rank": rank, "pid": pid})
        for number in self._signals:
            self._send_to_node(node, {"type": "signal", "number": number})
        if self._leftovers_ended:
            self._send_to_node(node, {"type": "end_leftover_processes"})

    # Connections.

    def _send_to_node(self, node: int, message: Message) -> None:
        if node in self._agents:
            self._send(self._agents[node], message)

    def _broadcast(self, message: Message) -> None:
        for agent in list(self._agents.values()):
            self._send(agent, message)

    def _send(self, connection: _Connection, message: Message) -> None:
        try:
            connection.socket.sendall(encode(message))
        except OSError as error:
            self._fail(connection, error)

    def _fail(self, connection: _Connection, error: OSError) -> None:
        """Drop a broken connection, and record what that says of its node."""
        if connection.fd in self._connections and connection.node not in (None, _NO_NODE):
            if error.errno in _UNREACHABLE:
                self.unreachable_nodes.append(connection.node)
            else:
                self.dead_nodes.append(connection.node)
        self._drop(connection)

    def _add(self, connection: socket.socket, node: int | None) -> _Connection:
        added = _Connection(connection, node)
        self._connections[added.fd] = added
        self._poll.register(added.fd, select.POLLIN)
        return added

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.fd, None) is None:
            return
        if connection.node is not None:
            self._agents.pop(connection.node, None)
        self._poll.unregister(connection.fd)
        connection.socket.close()

    def _unregister(self, server: socket.socket) -> None:
        try:
            self._poll.unregister(server)
        except KeyError:
            return  # there were too many connections, and it was before


def listen(family: socket.AddressFamily, host: str) -> socket.socket:
    """Return a socket at which all agents may connect at once."""
    server = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
    server.setblocking(False)
    return server


def accept(server: socket.socket) -> socket.socket | None:
    """Return the next connection, or None.

    Raises:
        OSError: No more files can be open.
    """
    try:
        connection = server.accept()[0]
    except (BlockingIOError, ConnectionError):
        return None  # that was the last one, or it has ended already
    # One a node: the usual limit of 1,024 open files is soon too low. Only now, after the launcher
    # was started: its ranks keep the limit that the user gave them.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if connection.fileno() >= soft - OTHER_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return connection


def find_own_address(hosts: Collection[str]) -> tuple[socket.AddressFamily, str]:
    """Return the address of ours from which the first other host is reached."""
    own = os.uname().nodename
    names = [host for host in hosts if host.partition(".")[0] != own.partition(".")[0]]
    error = OSError("no host to look up")
    for name in [*names[:4], own]:
        try:
            addresses = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
            for family, kind, protocol, _, address in addresses:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    return family, str(probe.getsockname()[0])
        except OSError as failed:
            error = failed
    raise error
