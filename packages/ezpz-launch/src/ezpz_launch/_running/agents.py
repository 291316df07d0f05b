"""The nodes' agents: where they connect to, and how orders reach the ranks through them."""

from __future__ import annotations

import errno
import hmac
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence

from .node import PROTOCOL_LINE, keep_alive, proof

_HELLO = 10.0
"""Seconds in which an agent says who it is."""

_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
"""What the kernel says of a host that answers no more; one where the agent is dead does answer."""

_LONGEST_STACKS = 1 << 24
"""Bytes of one node's stacks: more is no answer."""


class Agents:
    """Listens for one agent a node, and passes orders on.

    Args:
        hosts: The hosts that agents will connect from, in the order of their nodes.
        poll: Where the sockets are registered; the owner hands what is ready to `handle`.
        on_hello: Called with the node of an agent that has connected.
        on_stacks: Called with what an agent answers when it is asked where its ranks hang.
        on_lost: Called with a node and a rank whose end would not be reported.
        on_silent: Called with a node that does not answer any more.
        timeout: Seconds after which it does not.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        poll: select.poll,
        *,
        on_hello: Callable[[int], None],
        on_stacks: Callable[[int, bytes], None],
        on_lost: Callable[[int, int], None],
        on_silent: Callable[[int], None],
        timeout: int,
    ) -> None:
        self._poll = poll
        self._on_hello, self._on_stacks, self._on_lost = on_hello, on_stacks, on_lost
        self._on_silent, self._timeout = on_silent, timeout
        self._server = _listen(_own_address(hosts))
        self._connections: dict[int, socket.socket] = {}
        # Who has not said hello: since when, and what each is challenged with.
        self._strangers: dict[int, tuple[float, str]] = {}
        self._nodes: dict[int, int] = {}
        self._by_node: dict[int, socket.socket] = {}
        # A node says hello once.
        self._awaited = set(range(len(hosts)))
        self._received: dict[int, bytes] = {}
        self._is_full = False
        self.secret = os.urandom(32).hex()
        poll.register(self._server, select.POLLIN)

    @property
    def where(self) -> tuple[str, ...]:
        """The addresses to connect to: ``host:port``."""
        host, port = self._server.getsockname()[:2]
        return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}",)

    def is_reached(self, node: int) -> bool:
        """Whether the node's agent has connected."""
        return node in self._by_node

    def send(self, node: int, order: str) -> None:
        """Send an order to a node's agent, if it has connected."""
        connection = self._by_node.get(node)
        if connection is not None:
            try:
                connection.sendall(f"{order}\n".encode())
            except OSError as error:
                self._fail(connection.fileno(), error)

    def handle(self, fd: int) -> bool:
        """Serve a socket that is ready; return whether it is one of these."""
        if fd == self._server.fileno():
            # Of 10,000 nodes many come at once.
            while (connection := self._accept()) is not None:
                self._take(connection)
            self._drop_strangers()
            return True
        if fd not in self._connections:
            return False
        try:
            chunk = self._connections[fd].recv(1 << 16)
        except OSError as error:
            self._fail(fd, error)
            return True
        if not chunk:
            self._drop(fd)
            return True
        self._received[fd] += chunk
        self._read(fd)
        return True

    def close(self, *, farewell: bool) -> None:
        """End the connections; agents kill what is left of their ranks unless told farewell."""
        for node in list(self._by_node):
            self.send(node, "farewell" if farewell else "kill")
        for fd in list(self._connections):
            self._drop(fd)
        if not self._is_full:
            self._poll.unregister(self._server)
        self._server.close()

    def _take(self, connection: socket.socket) -> None:
        keep_alive(connection, self._timeout)
        # An agent that reads no more must not hold us up for ever.
        connection.settimeout(10)
        fd = connection.fileno()
        self._connections[fd] = connection
        self._received[fd] = b""
        challenge = os.urandom(16).hex()
        self._strangers[fd] = time.monotonic(), challenge
        self._poll.register(connection, select.POLLIN)
        try:
            connection.sendall(f"challenge {challenge}\n".encode())
        except OSError:
            self._drop(fd)

    def _drop_strangers(self) -> None:
        """Drop who has come and does not say hello."""
        late = time.monotonic() - _HELLO
        for fd in [fd for fd, (since, _) in self._strangers.items() if since < late]:
            self._drop(fd)

    def _accept(self) -> socket.socket | None:
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
        self._poll.unregister(self._server)
        self._is_full = True
        return None

    def _read(self, fd: int) -> None:
        """Take what has come; who says anything but what an agent says is dropped."""
        while fd in self._received:
            line, newline, rest = self._received[fd].partition(b"\n")
            if len(line) > PROTOCOL_LINE:
                self._drop(fd)
            if not newline or len(line) > PROTOCOL_LINE:
                return
            words = line.split()
            number = int(words[1]) if len(words) == 2 and words[1].isdigit() else -1
            if fd in self._strangers:
                self._received[fd] = rest
                if not self._is_welcome(fd, words):
                    self._drop(fd)
            elif words[:1] == [b"stacks"] and 0 <= number <= _LONGEST_STACKS:
                if len(rest) < number:
                    return
                self._received[fd] = rest[number:]
                self._on_stacks(self._nodes[fd], rest[:number])
            elif words[:1] == [b"lost"] and number >= 0:
                self._received[fd] = rest
                self._on_lost(self._nodes[fd], number)
            else:
                self._drop(fd)

    def _is_welcome(self, fd: int, words: list[bytes]) -> bool:
        """Whether it is the agent of a node that has none yet: it knows the node's secret."""
        if len(words) != 4 or words[0] != b"hello" or not words[1].isdigit():
            return False
        node, own = int(words[1]), words[2].decode(errors="replace")
        _, challenge = self._strangers[fd]
        expected = proof(self.secret, node, "agent", challenge, own)
        if node not in self._awaited or not hmac.compare_digest(words[3], expected.encode()):
            return False
        del self._strangers[fd]
        self._awaited.remove(node)
        self._nodes[fd] = node
        self._by_node[node] = self._connections[fd]
        self.send(node, f"welcome {proof(self.secret, node, 'launch', own, challenge)}")
        self._on_hello(node)
        return True

    def _fail(self, fd: int, error: OSError) -> None:
        """Drop a connection; where its agent has not closed it, the node is lost."""
        node = self._nodes.get(fd)
        self._drop(fd)
        if node is not None and error.errno in _SILENT:
            self._on_silent(node)

    def _drop(self, fd: int) -> None:
        connection = self._connections.pop(fd, None)
        if connection is None:
            return
        self._received.pop(fd, None)
        self._strangers.pop(fd, None)
        node = self._nodes.pop(fd, None)
        if node is not None and self._by_node.get(node) is connection:
            del self._by_node[node]
        self._poll.unregister(fd)
        connection.close()


def _listen(address: tuple[socket.AddressFamily, str]) -> socket.socket:
    family, host = address
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
    """Return the address of ours from which the first other host is reached.

    Connecting a UDP socket sends nothing, but lets the kernel choose the route.

    Raises:
        OSError: No host can be looked up, nor can our own name.
    """
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
