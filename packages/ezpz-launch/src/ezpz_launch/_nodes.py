"""The nodes of a launch, and their agents."""

from __future__ import annotations

import errno
import hmac
import os
import resource
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from ._agent import LOOK, PROTOCOL_LINE, NodeRanks, is_running, keep_alive, obey, proof, stacks
from ._errors import LaunchError
from ._launch import signal_group

# The launcher as a process: in a session of its own, with pipes that are ours to read.


class LauncherProcess:
    """A launcher that runs.

    Args:
        argv: Its command line.
        environment: Its environment, complete.

    Attributes:
        pid: Its process id, and that of its session and process group.
        stdout: The end to read of its standard output; whoever reads it closes it.
        stderr: The same of its standard error.

    Raises:
        LaunchError: It cannot be started.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        # Not Popen's own pipes, which it would close a second time.
        (self.stdout, out), (self.stderr, err) = os.pipe(), os.pipe()
        try:
            self._process = subprocess.Popen(
                argv,
                env=environment,
                # mpiexec would swallow ours.
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self.stdout)
            os.close(self.stderr)
            raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}") from error
        finally:
            os.close(out)
            os.close(err)
        self.pid = self._process.pid
        self._next_signal = signal.SIGTERM

    def poll(self) -> int | None:
        """Return its exit status, -signal where one killed it; None while it runs."""
        return self._process.poll()

    def pass_on(self, number: int) -> None:
        """Send it a signal that it passes on, or takes for its own."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Send SIGTERM to all of it; the next time, SIGKILL."""
        signal_group(self.pid, self._next_signal)
        self._next_signal = signal.SIGKILL

    def kill(self) -> None:
        """SIGKILL what is left of it."""
        signal_group(self.pid, signal.SIGKILL)


# A process that outlives ezpz-launch if it is killed, to end what it started on this host.

_TERMINATED = 1.0
"""Seconds that a launcher has to end its ranks by itself (srun does, on SIGTERM)."""


class Guardian:
    """Watches over one launch.

    Args:
        launch_id: What every process of the launch has in its environment.
        launcher: Process id of the launcher, the leader of its session.
        scratch: A file or folder of the launch, which is removed with it; empty for none.
    """

    def __init__(self, launch_id: str, launcher: int, scratch: str = "") -> None:
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._write)
                if not _is_dismissed(read, launch_id):
                    _end(launcher)
                    _remove(scratch)
            finally:
                os._exit(0)
        os.close(read)

    def tell(self, order: str) -> None:
        """Pass on what `node.obey` understands."""
        try:
            os.write(self._write, f"{order}\n".encode())
        except OSError:
            return  # somebody killed it; the launch itself goes on

    def dismiss(self) -> None:
        """End it: there is nothing left to guard."""
        self.tell("farewell")
        os.close(self._write)
        # It needs no waiting for: where it is not gone yet, our own end reaps it.
        os.waitpid(self._pid, os.WNOHANG)


def _is_dismissed(read: int, launch_id: str) -> bool:
    """Take orders until there is nobody to give any; then kill the ranks of this host."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    for number in (*ending, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # Nothing of ours may stay open through it: a reader would wait for its end.
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(0, 2)
    os.dup2(read, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    ranks = NodeRanks(launch_id)
    with open(3, "rb") as orders:
        for line in orders:
            if obey(ranks, line.decode("ascii").split()) is None:
                return True
    ranks.kill()
    return False


def _remove(scratch: str) -> None:
    if os.path.isdir(scratch):
        import shutil  # noqa: PLC0415  # only torchrun has a folder

        shutil.rmtree(scratch, ignore_errors=True)
    elif scratch:
        with suppress(OSError):
            os.unlink(scratch)


def _end(launcher: int) -> None:
    """End a launcher, that of other hosts' ranks too: by SIGTERM, then all of it by SIGKILL."""
    signal_group(launcher, signal.SIGTERM)
    until = time.monotonic() + _TERMINATED
    while time.monotonic() < until and is_running(launcher):
        time.sleep(0.02)
    signal_group(launcher, signal.SIGKILL)


# The nodes' agents: where they connect to, and how orders reach the ranks through them.

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


# The ranks of a launch, wherever they are: on this host directly, elsewhere through agents.


class Nodes(Protocol):
    """What the run loop can do to ranks.

    Attributes:
        why_not: Why there can be no agents; empty where there can.
    """

    why_not: str

    def where(self) -> tuple[str, ...]:
        """Return the addresses that agents connect to; none where there are no agents."""

    def secret(self) -> str:
        """Return what agents know; empty where there are none."""

    def watch(self, launcher: int, scratch: str) -> None:
        """See to it that nothing outlives us, if we are killed; not a scratch file either."""

    def handle(self, fd: int) -> None:
        """Serve a socket that is ready."""

    def start(self, rank: int, pid: int) -> None:
        """Take note of a rank that has started."""

    def end(self, rank: int) -> None:
        """Take note of a rank that has ended."""

    def signal(self, number: int) -> None:
        """Signal every rank that runs, and those that are still to be reached when they are."""

    def release(self, rank: int, pid: int) -> None:
        """Let the shim of a rank that failed go."""

    def kill(self) -> None:
        """SIGKILL all that is left of the launch."""

    def stacks(self, ranks: Sequence[int]) -> None:
        """Ask these ranks where they are; `on_stacks` is called with what each node answers."""

    def end_left(self) -> None:
        """End what ranks that have all ended left running; `on_stacks` is called with its names."""

    def end_all_left(self) -> None:
        """The same at the end of the launch; see to it that they do end."""

    def next_look(self) -> float:
        """Return after how many seconds to ask again."""

    def lost(self) -> list[int]:
        """Return the ranks, once each, whose end nobody would report: what started them is gone."""

    def silent(self) -> list[int]:
        """Return the nodes, once each, that do not answer any more."""

    def unreached(self, ranks: Sequence[int]) -> list[int]:
        """Return those of these ranks that nothing reaches."""

    def close(self, *, farewell: bool) -> None:
        """End it; without farewell all that is left is killed."""


OnStacks = Callable[[bytes], None]


class ThisHost:
    """Ranks of this host alone.

    Args:
        launch_id: What every process of the launch has in its environment.
        on_stacks: Called, from another thread, with the ranks' stacks.
    """

    def __init__(self, launch_id: str, on_stacks: OnStacks) -> None:
        self._launch_id = launch_id
        self._ranks = NodeRanks(launch_id)
        self._on_stacks = on_stacks
        self._guardian: Guardian | None = None
        self.why_not = ""

    def where(self) -> tuple[str, ...]:  # as all below: see Nodes
        return ()

    def secret(self) -> str:
        return ""

    def watch(self, launcher: int, scratch: str) -> None:
        self._guardian = Guardian(self._launch_id, launcher, scratch)

    def handle(self, fd: int) -> None:
        raise AssertionError(fd)

    def start(self, rank: int, pid: int) -> None:
        self._ranks.started(rank, pid)
        self._tell(f"start {rank} {pid}")

    def end(self, rank: int) -> None:
        self._ranks.ended(rank)
        self._tell(f"end {rank}")

    def signal(self, number: int) -> None:
        self._ranks.signal(number)

    def release(self, rank: int, pid: int) -> None:  # noqa: ARG002
        self._ranks.release(pid)

    def kill(self) -> None:
        self._ranks.kill()

    def stacks(self, ranks: Sequence[int]) -> None:
        import threading  # noqa: PLC0415

        def ask() -> None:
            self._on_stacks(stacks(self._ranks, list(ranks)))

        # py-spy may take its time; signals are heard meanwhile.
        threading.Thread(target=ask, daemon=True).start()

    def end_left(self) -> None:
        self._on_stacks(self._ranks.name_left().encode())
        self._ranks.end_left()

    def end_all_left(self) -> None:
        self._on_stacks(self._ranks.end_all_left().encode())

    def next_look(self) -> float:
        return self._ranks.next_look()

    def lost(self) -> list[int]:
        return self._ranks.lost()

    def silent(self) -> list[int]:
        return []

    def unreached(self, ranks: Sequence[int]) -> list[int]:  # noqa: ARG002
        return []

    def close(self, *, farewell: bool) -> None:
        if not farewell:
            self._ranks.kill()
        if self._guardian is not None:
            self._guardian.dismiss()

    def _tell(self, order: str) -> None:
        if self._guardian is not None:
            self._guardian.tell(order)


class OtherHosts:
    """Ranks of several hosts, or of one that is not this one.

    Args:
        hosts: The hosts, in the order of their nodes.
        ppn: Ranks of a full host.
        launch_id: What every process of the launch has in its environment.
        poll: Where the agents' sockets are registered.
        on_stacks: Called with what a node's agent answers.
        timeout: Seconds after which a node that does not answer is lost.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        ppn: int,
        launch_id: str,
        poll: select.poll,
        on_stacks: OnStacks,
        *,
        timeout: int,
    ) -> None:
        self._hosts, self._ppn, self._launch_id = hosts, ppn, launch_id
        self._pids: dict[int, dict[int, int]] = {}
        self._signals: list[int] = []
        self._delivered: dict[int, int] = {}
        self._lost: list[int] = []
        self._silent: list[int] = []
        self._guardian: Guardian | None = None
        self._agents: Agents | None = None
        self.why_not = ""

        try:
            self._agents = Agents(
                hosts,
                poll,
                on_hello=self._greet,
                on_stacks=lambda _, text: on_stacks(text),
                on_lost=self._lose,
                on_silent=self._silent.append,
                timeout=timeout,
            )
        except OSError as error:
            self.why_not = f"no address of ours that {hosts[0]} could reach ({error})"

    def where(self) -> tuple[str, ...]:  # as all below: see Nodes
        return self._agents.where if self._agents else ()

    def secret(self) -> str:
        return self._agents.secret if self._agents else ""

    def watch(self, launcher: int, scratch: str) -> None:
        self._guardian = Guardian(self._launch_id, launcher, scratch)

    def handle(self, fd: int) -> None:
        if self._agents:
            self._agents.handle(fd)

    def start(self, rank: int, pid: int) -> None:
        self._pids.setdefault(rank // self._ppn, {})[rank] = pid
        self._send(rank, f"start {rank} {pid}")

    def end(self, rank: int) -> None:
        self._pids.get(rank // self._ppn, {}).pop(rank, None)
        self._send(rank, f"end {rank}")

    def signal(self, number: int) -> None:
        self._signals.append(number)
        for node in range(len(self._hosts)):
            self._deliver(node)

    def release(self, rank: int, pid: int) -> None:
        self._send(rank, f"release {pid}")

    def kill(self) -> None:
        self._to_all("kill")

    def stacks(self, ranks: Sequence[int]) -> None:
        nodes: dict[int, list[str]] = {}
        for rank in ranks:
            nodes.setdefault(rank // self._ppn, []).append(str(rank))
        for node, its in nodes.items():
            if self._agents:
                self._agents.send(node, f"stacks {' '.join(its)}")

    def end_left(self) -> None:
        self._to_all("left")  # it is named before the launcher can end
        self._to_all("end-left")

    def end_all_left(self) -> None:
        # Nobody waits for thousands of nodes.
        self._to_all("end-all-left")

    def next_look(self) -> float:
        return LOOK

    def lost(self) -> list[int]:
        lost = list(self._lost)
        self._lost.clear()
        return lost

    def silent(self) -> list[int]:
        silent = list(self._silent)
        self._silent.clear()
        return silent

    def unreached(self, ranks: Sequence[int]) -> list[int]:
        agents = self._agents
        return [r for r in ranks if agents is None or not agents.is_reached(r // self._ppn)]

    def close(self, *, farewell: bool) -> None:
        if self._agents:
            self._agents.close(farewell=farewell)
        if self._guardian is not None:
            self._guardian.dismiss()

    def _to_all(self, order: str) -> None:
        for node in range(len(self._hosts)):
            if self._agents:
                self._agents.send(node, order)

    def _send(self, rank: int, order: str) -> None:
        if self._agents:
            self._agents.send(rank // self._ppn, order)

    def _lose(self, node: int, rank: int) -> None:
        # An agent speaks for the ranks of its node.
        if rank // self._ppn == node:
            self._lost.append(rank)

    def _greet(self, node: int) -> None:
        """Tell an agent that has just connected what it has missed."""
        assert self._agents
        for rank, pid in self._pids.get(node, {}).items():
            self._agents.send(node, f"start {rank} {pid}")
        self._deliver(node)

    def _deliver(self, node: int) -> None:
        if self._agents and self._agents.is_reached(node):
            for number in self._signals[self._delivered.get(node, 0) :]:
                self._agents.send(node, f"signal {number}")
            self._delivered[node] = len(self._signals)
