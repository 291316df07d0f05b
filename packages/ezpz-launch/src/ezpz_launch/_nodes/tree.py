"""The root of a tree of nodes that are staged to: who is there, who asks whom, who has failed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import count
from typing import Any

from ezpz_launch._nodes.archive import Source
from ezpz_launch._nodes.stage_node import is_introduced, say, serve
from ezpz_launch._run.agents import accept, find_own_address, listen
from ezpz_launch._run.channel import new_challenge

_PATIENCE = 60.0
"""Seconds without a sign of a node, or behind the others, after which it is left out."""

NOT_OURS = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError,
)  # fmt: skip
"""What a message that no node of ours sends leads to."""

_TURN = 5  # times that, without a sign of any node, before all are left out
_ROOT = -1  # ezpz-launch itself, as a parent
_PARENTS = 8  # so many parents are tried before a node is the one that fails


class _Peer:
    """A node's connection, and how far the node is."""

    def __init__(self, connection: socket.socket) -> None:
        # A node that reads no more must not hold us up for ever.
        connection.settimeout(10)
        self.socket = connection
        self.fd = connection.fileno()
        self.node: int | None = None  # until it has proved which one it is
        self.challenge = new_challenge()
        self.since = time.monotonic()
        self.received = b""
        self.state = ""  # "lacking", "whole", "failed"
        self.has_order = False
        self.place = 0  # in the order of arrival; 0 of one that has all already
        self.assigned = 0.0
        self.address = ""
        self.parent: int | None = None
        self.tried = set[int]()
        self.bytes = 0


class Tree:
    """The nodes of one staging, or of one question; it works in a thread until all have answered.

    ``here``: all nodes are on this host.
    """

    def __init__(self, hosts: Sequence[str], *, here: bool, patience: float = _PATIENCE) -> None:
        self._hosts, self._patience = hosts, patience
        self._order: tuple[object, ...] = ()  # while it is not known yet
        self.source: Source | None = None
        # Unpacking is slower than sending: at scale a flat tree costs less than it saves.
        self._fan_out = 2 if len(hosts) <= 64 else 4  # children of a node
        self.secret = os.urandom(32).hex()
        family, address = (socket.AF_INET, "127.0.0.1") if here else find_own_address(hosts)
        self._server, self._data = listen(family, address), listen(family, address)
        self._data.setblocking(True)
        host = f"[{address}]" if ":" in address else address
        self.where = f"{host}:{self._server.getsockname()[1]}"
        self._data_address = f"{host}:{self._data.getsockname()[1]}"
        self._is_stopped, self._refused = False, ""
        self._connections, self._peers = dict[int, _Peer](), dict[int, _Peer]()
        self._open = deque([_ROOT])  # who may have room for a child
        self._children = defaultdict[int, set[int]](set)
        self._places = count(1)
        self.bad = dict[int, str]()
        self.had = set[int]()
        self.whole = set[int]()
        self.answers = dict[int, Any]()
        self.began = time.monotonic()
        self.arrived = 0.0  # when the first node had its order
        self.half = self.seconds = 0.0  # until half the nodes had it; until all
        self._poll = select.poll()
        self._woken, self._wakes = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def order(self, *order: object, source: Source | None = None) -> None:
        """Say once what each node is told, also one that comes later."""
        # ``"stage"``, a name, seconds between reports; ``"status"``; ``"clean"``; ``"bye"``.
        if source:
            words = (self._data, self.secret, source.chunks)
            threading.Thread(target=serve, args=words, daemon=True).start()
        self.source, self._order = source, order
        with contextlib.suppress(OSError):  # it was stopped
            self._wakes.send(b"!")

    def stop(self) -> None:
        """Wait for no node any more."""
        self._is_stopped = True
        self._thread.join()
        for each in (self._server, self._data, self._woken, self._wakes):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes who accepts
            each.close()

    def join(self, timeout: float | None = None) -> bool:
        """Return whether all nodes have answered, or failed, within so many seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def bytes(self) -> int:
        """Bytes that the nodes have got, in sum."""
        return sum(peer.bytes for peer in list(self._peers.values()))

    def failed(self) -> dict[str, str]:
        return {self._hosts[node]: why for node, why in sorted(self.bad.items())}

    def _run(self) -> None:
        self._poll.register(self._server, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        while not (self._is_stopped or self._is_over()):
            for fd, _ in self._poll.poll(250):
                self._handle(fd)
            self._look()
        self.seconds = time.monotonic() - self.began
        for peer in list(self._connections.values()):
            with contextlib.suppress(OSError):
                say(peer.socket, "bye")
            peer.socket.close()

    def _is_over(self) -> bool:
        return len(self.answers) + len(self.whole) + len(self.bad) >= len(self._hosts)

    def _handle(self, fd: int) -> None:
        if fd == self._woken.fileno():
            self._woken.recv(1)
            for each in self._peers.values():
                self._command(each)
        elif fd == self._server.fileno():
            self._greet()
        elif peer := self._connections.get(fd):
            try:
                received = peer.socket.recv(1 << 16)
            except OSError as error:
                self._drop(peer, error.strerror or str(error))
                return
            *lines, peer.received = (peer.received + received).split(b"\n")
            for line in lines:
                try:
                    self._take(peer, json.loads(line))
                except NOT_OURS:
                    self._drop(peer, "it says what no node of ours would")
            if not received or len(peer.received) > 1 << 24:
                self._drop(peer, "its process has ended")

    def _greet(self) -> None:
        try:
            while (connection := accept(self._server)) is not None:
                new = _Peer(connection)
                self._connections[new.fd] = new
                self._poll.register(new.fd, select.POLLIN)
                self._say(new, "challenge", new.challenge)
        except OSError as error:
            self._refused = f" ({error.strerror} here)"
            self._poll.unregister(self._server)

    def _take(self, peer: _Peer, words: list[Any]) -> None:
        if peer.node is None:
            answer = is_introduced(words, self.secret, peer.challenge)
            node = words[1]
            if not answer or not 0 <= node < len(self._hosts) or node in self._peers:
                self._drop(peer, "")
                return
            peer.node = node
            self._peers[node] = peer
            self._say(peer, "welcome", answer)
            self._command(peer)
        elif peer.state != "failed":
            peer.since = time.monotonic()
            self._hear(peer, peer.node, words)

    def _command(self, peer: _Peer) -> None:
        if not self._order or peer.has_order:
            return
        peer.has_order, peer.since = True, time.monotonic()
        self.arrived = self.arrived or peer.since
        if self._order == ("bye",) and peer.node is not None:
            # That it ends now is no failure.
            self.answers[peer.node], peer.state = None, "failed"
        self._say(peer, *self._order)

    def _hear(self, peer: _Peer, node: int, words: list[Any]) -> None:
        match words:
            case ["at", port, is_whole]:
                self._place(peer, node, port, is_whole=is_whole)
            case ["got", size]:
                peer.bytes = size
            case ["whole", size]:
                peer.bytes = size
                self._keep(peer, node)
                if 2 * len(self.whole) >= len(self._hosts):
                    self.half = self.half or time.monotonic() - self.arrived
            case ["orphan" | "corrupt" as what, parent, why]:
                self._leave(peer, parent, why, is_corrupt=what == "corrupt")
            case ["failed", why]:
                self._fail(peer, why)
            case ["status", trees, removed]:
                self.answers[node] = trees, removed
            case _:
                self._drop(peer, f"it says {words[0]!r}")

    def _place(self, peer: _Peer, node: int, port: int, *, is_whole: bool) -> None:
        host = peer.socket.getpeername()[0]
        peer.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if is_whole:
            self.had.add(node)
            self._keep(peer, node)
        else:
            peer.state, peer.place = "lacking", next(self._places)
            self._assign(peer)
        self._open.append(node)

    def _leave(self, peer: _Peer, parent: int, why: str, *, is_corrupt: bool) -> None:
        """Give a node another parent, where it has not been given one meanwhile."""
        if peer.parent != parent or peer.state != "lacking":
            return
        if not is_corrupt:
            peer.tried.add(parent)
            self._assign(peer, why)
        elif parent == _ROOT:
            self._fail(peer, f"what ezpz-launch sends arrives damaged: {why}")
        else:
            self._fail(self._peers[parent], f"it sent on what was damaged: {why}")

    def _keep(self, peer: _Peer, node: int) -> None:
        peer.state = "whole"
        self.whole.add(node)

    def _assign(self, peer: _Peer, why: str = "") -> None:
        """Tell a node whom to ask."""
        assert peer.node is not None
        if self.source is None:
            return
        if len(peer.tried) >= _PARENTS:
            self._fail(peer, f"it gets nothing from {len(peer.tried)} other nodes: {why}")
            return
        if peer.parent is not None:
            self._children[peer.parent].discard(peer.node)
        while self._open and not self._has_room(self._open[0]):
            self._open.popleft()
        root = [_ROOT] * self._has_room(_ROOT)
        candidates = (*list(self._open)[:64], *root, *self._peers)
        chosen = next((each for each in candidates if self._serves(each, peer)), _ROOT)
        peer.parent, peer.assigned = chosen, time.monotonic()
        self._children[chosen].add(peer.node)
        address = self._data_address if chosen == _ROOT else self._peers[chosen].address
        try:
            digest = self.source.manifest().data[:32].hex()
        except OSError as error:
            self.source.error = f"{error.filename}: {error.strerror}"
        else:
            self._say(peer, "from", address, chosen, digest)

    def _has_room(self, node: int) -> bool:
        # The shared file system is read for one node, and once.
        return len(self._children[node]) < (1 if node == _ROOT else self._fan_out)

    def _serves(self, node: int, peer: _Peer) -> bool:
        """Return whether a node can be a parent: it is well, and asks not this one in the end."""
        if node in peer.tried or node == _ROOT:
            return node not in peer.tried
        other = self._peers[node]
        earlier = other.state == "lacking" and other.place < peer.place
        return earlier or other.state == "whole"

    def _fail(self, peer: _Peer, why: str) -> None:
        if peer.node is None or peer.state == "failed":
            return
        peer.state = "failed"
        self.bad[peer.node] = why
        self.whole.discard(peer.node)
        for child in sorted(self._children[peer.node]):
            if self._peers[child].state == "lacking":
                self._peers[child].tried.add(peer.node)
                self._assign(self._peers[child], why)

    def _say(self, peer: _Peer, *words: object) -> None:
        try:
            say(peer.socket, *words)
        except OSError as error:
            self._drop(peer, error.strerror or str(error))

    def _drop(self, peer: _Peer, why: str) -> None:
        if self._connections.pop(peer.fd, None) is not None:
            self._poll.unregister(peer.fd)
            peer.socket.close()
            self._fail(peer, why)

    def _look(self) -> None:
        """Leave out nodes that are not there, do not go on, or are far behind the others."""
        now, source = time.monotonic(), self.source
        if source and source.error:
            for node in range(len(self._hosts)):
                self.bad.setdefault(node, source.error)
        begun, patience = self.arrived, self._patience
        if not self._peers:  # a launcher may wait for its turn, as srun does for an earlier step
            begun, patience = self.began, _TURN * self._patience
        if not begun or now - begun < patience:
            return
        for node in set(range(len(self._hosts))) - self._peers.keys() - self.bad.keys():
            self.bad[node] = f"no sign of it within {patience:g} s{self._refused}"
        for peer in list(self._peers.values()):
            parent = self._peers.get(peer.parent) if peer.parent not in (None, _ROOT) else None
            # Who waits for a slow one is not slow.
            if peer.state in ("whole", "failed") or (parent and parent.state == "lacking"):
                continue
            quiet, took = now - max(peer.since, peer.assigned), now - self.arrived
            if quiet > self._patience and not (source and source.busy):
                self._fail(peer, f"nothing new from it for {quiet:.0f} s")
            elif self.half and took > 3 * self.half + self._patience < now - peer.assigned:
                self._fail(
                    peer, f"too slow: not done in {took:.0f} s, half were in {self.half:.0f} s"
                )
