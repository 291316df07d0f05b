"""Names, addresses, calls: what a name stands for, and how all ranks' words come to rank 0."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import select
import selectors
import socket
import struct
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it so

from ezpz_topo import RankInfo, get_hostname

from ._errors import SetupError

_RETRIED = 1.5  # seconds in which a name may still come to be known, as on large systems
_LONGEST = 1.8  # seconds for the resolver to say anything: by itself it may take half a minute
_SIOCGIFADDR = 0x8915  # Linux, linux/sockios.h


def is_one_node(info: RankInfo) -> bool:
    return info.local_world_size == info.world_size


def resolve(host: str, info: RankInfo, source: str) -> tuple[str, ...]:
    """Return the numeric addresses of a host, within 2 s, or say by what source it is wrong."""
    found, why = look_up(host, _RETRIED)
    if not found:
        raise SetupError(
            f"rank {info.rank} of {info.world_size} on {get_hostname()}: {source} is {host!r}, "
            f"which does not resolve here ({why}); expected rank 0's host, by a name that every "
            "node knows, or by address; export MASTER_ADDR and MASTER_PORT to name another"
        )
    return found


def look_up(host: str, retried: float = 0.0) -> tuple[tuple[str, ...], str]:
    """Return a host's numeric addresses, and why there are none; it has so long to be known."""
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return (host,), ""
    result: list[tuple[tuple[str, ...], str]] = []

    def ask() -> None:
        deadline = time.monotonic() + retried
        while not result:
            try:
                result.append((_ask(host), ""))
            except (OSError, ValueError) as error:  # ValueError: nothing that a name can be
                if isinstance(error, OSError) and time.monotonic() < deadline:
                    time.sleep(0.1)
                else:
                    result.append(((), getattr(error, "strerror", None) or str(error)))

    # The resolver's own time-outs cannot be set: it is left behind if it does not answer.
    asking = threading.Thread(target=ask, name="ezpz-resolve", daemon=True)
    asking.start()
    asking.join(_LONGEST)
    return result[0] if result else ((), f"the resolver has not answered in {_LONGEST:g} s")


def _ask(host: str) -> tuple[str, ...]:
    # As bytes where that will do: a text is made ready for foreign alphabets, which takes 10 ms.
    asked = host.encode() if host.isascii() else host
    answers = socket.getaddrinfo(asked, None, type=socket.SOCK_STREAM)
    # A zone is in the fourth member of the address, and in its text by this.
    texts = (socket.getnameinfo(each[4], socket.NI_NUMERICHOST)[0] for each in answers)
    return tuple(dict.fromkeys(texts))


def is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked, suppress(OSError):
        asked.bind((address, 0))
        return True
    return False


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def is_reachable_by_name(host: str) -> bool:
    # Debian gives a host's own name the address 127.0.1.1. Of several, the first of this host's
    # counts: gloo tells that one to the others.
    own = next((each for each in look_up(host)[0] if is_own(each)), None)
    return own is not None and not is_loopback(own)


def on_fast_network(host: str, env: Mapping[str, str]) -> str:
    """Return a host's name on the machine's fast network, as ezpz-launch does; else the same."""
    from ezpz_topo import get_machine_info  # noqa: PLC0415  # ezpz-launch has told the address

    suffix = get_machine_info(env).hsn_suffix
    if not suffix or ":" in host or host.replace(".", "").isdigit():
        return host
    return host.partition(".")[0] + suffix


def advertised(info: RankInfo, env: Mapping[str, str]) -> str:
    """Return by what name, or else address, the other ranks can reach this host."""
    if is_one_node(info):
        # Works on laptops whose own name resolves to nothing, or to a dead VPN address.
        return "127.0.0.1"
    name = get_hostname()
    for each in dict.fromkeys((on_fast_network(name, env), name)):
        if is_reachable_by_name(each):
            return each
    address = outward_address()
    if address is None:
        raise SetupError(
            f"rank 0's host {name} has no address that other nodes could reach: its name does not "
            "stand for one, and no interface but loopback is up; expected an address; export "
            "MASTER_ADDR and MASTER_PORT to name one"
        )
    return address


def gloo_interface(
    info: RankInfo, master_addr: str, master_port: int, env: Mapping[str, str] | None = None
) -> str | None:
    """Return the network interface for ``GLOO_SOCKET_IFNAME``; None to leave the choice to gloo."""
    # gloo tells the other ranks the address that this host's own name stands for. Where that is
    # loopback's (Debian: 127.0.1.1) they cannot connect.
    env = os.environ if env is None else env
    if env.get("GLOO_SOCKET_IFNAME") or is_one_node(info) or is_reachable_by_name(get_hostname()):
        return None
    for address in resolve(master_addr, info, "rank 0's address"):
        source = _source_toward(address, master_port)
        if source is not None and (found := interface_of(source)):
            return found
    # Rank 0's host, whose own name is what does not lead to the others.
    outward = outward_address()
    return None if outward is None else interface_of(outward)


def outward_address() -> str | None:
    """Return this host's address on the default route, else of the first interface; or None."""
    # Of 192.0.2.0/24, which RFC 5737 sets apart: nothing is sent.
    for beyond in ("192.0.2.1", "2001:db8::1"):
        if source := _source_toward(beyond, 9):
            return source
    return next((address for _, address in _interfaces() if not is_loopback(address)), None)


def _source_toward(address: str, port: int) -> str | None:
    """Return this host's address on the way to another; None if there is no way, or loopback's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked, suppress(OSError):
        # Connecting a datagram socket asks the routing table, and sends nothing.
        asked.connect((address, port))
        source = str(asked.getsockname()[0])
        return None if is_loopback(source) else source
    return None


def interface_of(address: str) -> str | None:
    bare = address.partition("%")[0]
    return next((name for name, each in _interfaces() if each == bare), None)


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield interface and numeric address, in the kernel's order; nothing but on Linux."""
    if sys.platform != "linux":
        return
    from fcntl import ioctl  # noqa: PLC0415  # not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # it has no IPv4 address
                yield name, socket.inet_ntoa(ioctl(asked, _SIOCGIFADDR, request)[20:24])
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as lines:  # or no IPv6
        for fields in map(str.split, lines):
            yield fields[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))


# Sockets: one that listens, one that a node's processes find by name, and messages in one piece.

_BACKLOG = 1 << 16  # connections that wait, as far as the system lets us: all nodes come at once
_HEAD = struct.Struct("!4sI")  # a message's mark, and how many bytes follow
_MARK, _LONGEST_MESSAGE = b"ezpz", 1 << 26


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens; an empty address is every one of this host, as torch does."""
    if not address and socket.has_dualstack_ipv6():
        every = ("::", port)
        try:
            return socket.create_server(
                every, family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)


def hold_name(name: str) -> socket.socket | None:
    """Return a socket that listens by a name within this node; None if another process does."""
    # Linux's abstract names are no files: with their process they are gone (unix(7)).
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return listener


def call_name(name: str) -> socket.socket:
    """Connect to who holds a name; ConnectionError: no one does; PermissionError: a stranger."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"\0{name}")
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", peer)[1] != os.getuid():
            raise PermissionError(f"{name} is held by another user")
    except OSError:
        connection.close()
        raise
    return connection


def peer_of(connection: socket.socket) -> str:
    """Return the numeric address of a connection's other end; empty: within this process."""
    if connection.family == socket.AF_UNIX:
        return ""
    address, _, *more = connection.getpeername()
    return f"{address}%{more[1]}" if more and more[1] else str(address)


def message(said: Mapping[str, Any] | bytes) -> bytes:
    payload = said if isinstance(said, bytes) else json.dumps(said).encode()
    return _HEAD.pack(_MARK, len(payload)) + payload


def pack(value: object) -> bytes:
    """Return it short: it goes from one host to every node."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 9)


def read_message(connection: socket.socket, until: float) -> tuple[bytes, list[int]]:
    """Return the next message, and no byte beyond, with the descriptors that came with it.

    Raises TimeoutError, another OSError, EOFError, or ValueError with what is no message.
    """
    received, descriptors = bytearray(), list[int]()
    while (missing := _end_of_message(received) - len(received)) > 0:
        connection.settimeout(max(until - time.monotonic(), 1e-3))
        if connection.family == socket.AF_UNIX:
            flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            piece, more, _, _ = socket.recv_fds(connection, missing, 1, flags)
            descriptors += more
        else:
            piece = connection.recv(missing)
        if not piece:
            raise EOFError
        received += piece
    return bytes(received[_HEAD.size :]), descriptors


def _end_of_message(received: bytearray) -> int:
    """Return where the first message ends, as far as is known; ValueError if it is none."""
    if len(received) < _HEAD.size:
        return _HEAD.size
    mark, length = _HEAD.unpack_from(received)
    if mark != _MARK or length > _LONGEST_MESSAGE:
        raise ValueError(bytes(received[: len(_MARK)]))
    return _HEAD.size + int(length)


# How all ranks' words come to rank 0, and its verdict to them.

# Rank 0 has a server: a port at which it serves calls, which are connections; later from a thread.
# 1. The first rank of a node to come holds a name, by which the node's others call it. It speaks
#    for them. It calls the server, which greets with rank 0's job: so strangers are told apart.
# 2. It says which processes of its node are there, with their facts; each time all of them.
# 3. If a call ends before the verdict, those for whom it spoke are not there. If a leader ends,
#    its node's ranks begin again: one of them holds the name.
# 4. Rank 0 compares, and tells a verdict: who takes part, or what is wrong.
# 5. A leader passes on the verdict, and the call itself, a descriptor: it may end from then on.
# 6. Each rank connects to torch's store, which the backend wants. Events are posted there.
# 7. Who posts one rings: a message by its node's call. The server sends a byte down all calls of
#    this set-up, or why all are to end. It wakes the responders of all ranks that have the call:
#    `Wakeup`.
# 8. Who comes later, until clean-up, is told the verdict, or that its rank is a duplicate.
# Each rank calls the server itself where all are on one node, where no other is found (a network
# namespace of its own), and where there are no such names (macOS).

Process = tuple[str, int, int]  # a rank's host, process and PID namespace
LOOK = 1.0  # seconds between two looks at those who are there: a difference is told within two
_SENDING = 1.0  # seconds for the other end to take what is sent, or to send all of a message


@dataclass(slots=True)
class Round:
    """One set-up, as rank 0's server hears of it."""

    said: dict[int, tuple[Process, str]] = field(default_factory=dict)  # process and facts, by rank
    calls: dict[socket.socket, list[int]] = field(default_factory=dict)  # for whom each speaks
    there: set[Process] = field(default_factory=set)  # all who have come; two may be one rank
    trouble: str = ""
    verdict: bytes = b""


class Server:
    """Rank 0's: serves one call of each node, while ranks meet and then from a thread."""

    def __init__(self, greeting: bytes, size: int, store_port: int) -> None:
        self.store_port = store_port  # torch's
        self.rounds = defaultdict[str, Round](Round)  # by the set-up's name
        self._greeting, self._size = message(greeting), size
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()

    @property
    def is_open(self) -> bool:
        return self._listener is not None

    def open(self, listener: socket.socket) -> None:
        self.close()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Leave the port to others. Who was greeted is served once it is open again."""
        self._pause()
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def join(self, name: str, said: Mapping[str, Any]) -> socket.socket:
        """Return a call of rank 0's own, which has said this."""
        self._pause()
        mine, call = socket.socketpair()
        call.settimeout(_SENDING)
        heard = self.rounds[name]
        self._take(call, heard, said)
        self._selector.register(call, selectors.EVENT_READ, (bytearray(), [heard]))
        return mine

    def serve(self, is_over: Callable[[], bool], seconds: float) -> None:
        self._pause()
        until = time.monotonic() + seconds
        while not is_over() and (left := until - time.monotonic()) > 0:
            self._serve(left)

    def tell(self, heard: Round, verdict: bytes) -> None:
        """Tell all of a set-up how it ended, and serve in a thread from now on."""
        heard.verdict = verdict
        for call in heard.calls:
            _send(call, message(verdict))
        self._stop = socket.socketpair()
        self._selector.register(self._stop[1], selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="ezpz-server", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._serve(None):
            pass

    def _pause(self) -> None:
        if self._thread is not None:
            self._stop[0].send(b"!")
            self._thread.join()
            self._thread = None
            self._selector.unregister(self._stop[1])
            for each in self._stop:
                each.close()

    def _serve(self, seconds: float | None) -> bool:
        goes_on = True
        for key, _ in self._selector.select(seconds):
            if key.data is not None:
                self._hear(key.fileobj, *key.data)  # type: ignore[arg-type]  # a socket
            elif key.fileobj is self._listener:
                self._accept(self._listener)
            else:
                goes_on = False  # once what is here was heard
        return goes_on

    def _accept(self, listener: socket.socket) -> None:
        try:
            call, _ = listener.accept()
        except OSError:  # too many open files, of which rank 0 has warned
            time.sleep(0.1)
            return
        call.settimeout(_SENDING)
        _send(call, self._greeting)
        self._selector.register(call, selectors.EVENT_READ, (bytearray(), []))

    def _hear(self, call: socket.socket, received: bytearray, of: list[Round]) -> None:
        try:
            piece = call.recv(1 << 16)
            received += piece
            while (end := _end_of_message(received)) <= len(received):
                said = json.loads(received[_HEAD.size : end] or b'{"ring": ""}')
                del received[:end]
                if "ring" in said:
                    rung = f"{said['ring']}\n".encode() if said["ring"] else b"!"
                    for other in of[0].calls if of else ():
                        _send(other, rung)
                else:
                    of[:] = [self.rounds[said["setup"]]]
                    self._take(call, of[0], said)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            piece = b""  # it is no one of ours, or has gone
        if not piece:
            for heard in of:
                self._forget(call, heard)
            self._selector.unregister(call)
            call.close()

    def _take(self, call: socket.socket, heard: Round, said: Mapping[str, Any]) -> None:
        twice = ""
        if "trouble" in said:
            heard.trouble = heard.trouble or said["trouble"]
            heard.there.add(tuple(said["process"]))
        else:
            self._forget(call, heard)
            ranks = heard.calls[call] = []
            for facts, processes in said["said"].items():
                for rank, host, pid, namespace in processes:
                    here = host, pid, namespace
                    heard.there.add(here)
                    if rank < self._size:  # else of another world, as the verdict tells it
                        first, _ = heard.said.setdefault(rank, (here, facts))
                        if first == here:
                            ranks.append(rank)
                        else:
                            twice = _describe_twice(rank, self._size, first, here)
        if heard.verdict:  # it comes late
            _send(call, message(pack({"trouble": twice}) if twice else heard.verdict))
        else:
            heard.trouble = heard.trouble or twice

    def _forget(self, call: socket.socket, heard: Round) -> None:
        for rank in heard.calls.pop(call, ()):
            if not heard.verdict:
                del heard.said[rank]


def _send(call: socket.socket, sent: bytes) -> None:
    with suppress(OSError):  # that it has ended is seen by who reads from it
        call.sendall(sent)


def _describe_twice(rank: int, world_size: int, first: Process, second: Process) -> str:
    return (
        f"rank {rank} of {world_size} is duplicate: process {first[1]} on {first[0]}, and "
        f"process {second[1]} on {second[0]}; expected every rank once; two jobs share a "
        "MASTER_ADDR and MASTER_PORT, or the ranks were numbered by hand: start them by one "
        "launcher"
    )


class Participant(NamedTuple):
    """How a rank takes part in a set-up: rank 0 by its server, the others by calls."""

    setup: str  # the set-up's name, the same on every rank
    call: Callable[[], tuple[socket.socket, str]]  # one that was greeted, and rank 0's host
    name: str = ""  # by what this node's ranks find each other; empty: each calls rank 0 itself
    server: Server | None = None
    store: Store | None = None  # torch's, on rank 0


def say(
    participant: Participant, said: Mapping[str, Any], info: RankInfo, patience: float
) -> tuple[bytes, socket.socket | None, bool]:
    """Return rank 0's verdict, the call to its server, and whether it is shared. Not for rank 0."""
    name = participant.name
    while name:
        if (listener := hold_name(name)) is not None:
            with listener, ExitStack() as ends:
                return _Leader(listener, ends).lead(participant, said, info, patience)
        try:
            with call_name(name) as leader:
                leader.sendall(message(said))
                # It may itself look for rank 0 first.
                told, passed = read_message(leader, time.monotonic() + 2 * patience)
            return told, socket.socket(fileno=passed[0]) if passed else None, True
        except TimeoutError as error:
            raise _unheard(info, "the rank that speaks for this node", error) from error
        except (ConnectionError, EOFError):
            time.sleep(1e-3)  # it has ended
        except OSError:  # another user's, or the system does not allow it
            name = ""
    return _Leader(None, ExitStack()).lead(participant, said, info, patience)


def _unheard(info: RankInfo, who: str, error: Exception) -> SetupError:
    late = isinstance(error, TimeoutError)
    return SetupError(
        f"rank {info.rank} of {info.world_size} on {get_hostname()} heard nothing from {who} "
        f"({'it is stopped, or cut off' if late else 'the connection has ended'}); expected it to "
        "come to setup_torch; check that it has not failed"
    )


class _Leader:
    """Speaks for a node's ranks, this one and those that call, until rank 0 tells its verdict."""

    def __init__(self, listener: socket.socket | None, ends: ExitStack) -> None:
        self._listener, self._ends = listener, ends
        self._others: dict[socket.socket, dict[str, list[Any]]] = {}

    def lead(
        self, participant: Participant, said: Mapping[str, Any], info: RankInfo, patience: float
    ) -> tuple[bytes, socket.socket, bool]:
        try:
            call, host = participant.call()
            # Rank 0 speaks for itself.
            most = (info.local_world_size or 0) - (host == get_hostname())
            try:
                told = self._converse(call, said, most if self._listener else 1, patience)
            except (OSError, EOFError) as error:
                call.close()
                raise _unheard(info, "rank 0", error) from error
        except SetupError as error:
            while self._listener and select.select([self._listener], [], [], 0)[0]:
                self._accept(self._listener)
            self._pass_on(pack({"trouble": str(error)}), [])
            raise
        self._pass_on(told, [call.fileno()])
        return told, call, bool(self._others)

    def _converse(
        self, call: socket.socket, said: Mapping[str, Any], most: int, patience: float
    ) -> bytes:
        until = time.monotonic() + patience
        unsent, send_at = True, time.monotonic() + LOOK
        with selectors.DefaultSelector() as waiting:
            for each in filter(None, (call, self._listener)):
                waiting.register(each, selectors.EVENT_READ)
            while (now := time.monotonic()) < until:
                there = 1 + sum(map(bool, self._others.values()))
                if unsent and (there >= most or now >= send_at):
                    every: dict[str, list[Any]] = {}
                    for words in (said["said"], *self._others.values()):
                        for facts, processes in words.items():
                            every.setdefault(facts, []).extend(processes)
                    call.sendall(message({**said, "said": every}))
                    unsent, send_at = False, now + LOOK
                for key, _ in waiting.select((send_at if unsent else until) - now):
                    other: socket.socket = key.fileobj  # type: ignore[assignment]
                    if other is call:
                        return read_message(call, until)[0]
                    if other is self._listener:
                        waiting.register(self._accept(other), selectors.EVENT_READ)
                        continue
                    unsent = True
                    try:
                        heard, _ = read_message(other, now + _SENDING)
                        self._others[other] = json.loads(heard)["said"]
                    except (OSError, EOFError, ValueError):  # it has ended
                        waiting.unregister(other)
                        del self._others[other]
        raise TimeoutError

    def _accept(self, listener: socket.socket) -> socket.socket:
        other = self._ends.enter_context(listener.accept()[0])
        self._others[other] = {}
        return other

    def _pass_on(self, told: bytes, call: list[int]) -> None:
        for other in self._others:
            with suppress(OSError):  # it has ended
                socket.send_fds(other, [message(told)], call)
