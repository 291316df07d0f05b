"""One node's agent: it signals the node's ranks, ends them, and asks them where they hang.

ezpz-launch uses it for ranks on its own host. For those of other hosts it is a program as well,
``python -I -S node.py NODE``, that the first rank's shim of each node starts in the background:
it connects to ezpz-launch, takes its orders, and when the connection ends without a farewell,
because ezpz-launch was killed or its host is gone, it kills the ranks. It knows the standard
library alone. Launchers signal by themselves, but srun and Open MPI kill within half a second of
SIGTERM, and torchrun dies of SIGUSR1.
"""

from __future__ import annotations

import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from . import proc
    from .node_ranks import NodeRanks
else:
    # As a program it knows no package, only its neighbours.
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import proc
    from node_ranks import NodeRanks

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from types import ModuleType

PROTOCOL_LINE = 4096
"""Longest line of the protocol, in bytes."""

_CONNECT_TIMEOUT = 5.0

_SETTLED = 0.2
"""Seconds before it connects: a launch of `true` needs none, and pays nothing."""


def main() -> int:
    """Serve ezpz-launch on this node until it says farewell."""
    # What started the shim that started us, and this node's other shims.
    launcher = proc.parent(os.getppid())
    if os.fork():
        # No child of the shim: it is none of the rank's processes.
        return 0
    os.setsid()
    # The launcher's own pipes and sockets among them: it would wait for their end.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    for number in (*ending, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    fields = os.environ["EZPZ_CONTROL"].split("\n")
    launch_id, addresses, secret = fields[0], fields[4], fields[5]
    time.sleep(_SETTLED)
    # ezpz-launch is to say first that we are lost: our ranks' end is no failure of theirs.
    connection = _connect(addresses.split(), 2 * int(fields[6]))
    ranks = NodeRanks(launch_id, launcher)
    if connection is None:
        # The launch is over, or its host cannot be reached; ezpz-launch says so if it matters.
        while launcher and proc.is_running(launcher):
            time.sleep(1)
        if launcher:
            ranks.end_all_left()
        return 0
    try:
        lines = _lines(connection, ranks)
        if not _is_welcome(connection, lines, secret, int(sys.argv[1])):
            return 1
        for line in lines:
            reply = obey(ranks, line.split())
            if reply is None:
                return 0
            connection.sendall(reply)
    except (OSError, ValueError, TypeError, LookupError):
        pass  # reset instead of closed, or no orders of ezpz-launch: the same
    ranks.kill()
    return 1


def _is_welcome(connection: socket.socket, lines: Iterator[str], secret: str, node: int) -> bool:
    """Show ezpz-launch that we know the node's secret; return whether it knows it, too."""
    import hmac  # noqa: PLC0415  # as socket

    challenge, own = next(lines, "").partition(" ")[2], os.urandom(16).hex()
    shown = proof(secret, node, "agent", challenge, own)
    connection.sendall(f"hello {node} {own} {shown}\n".encode())
    expected = f"welcome {proof(secret, node, 'launch', own, challenge)}"
    return hmac.compare_digest(next(lines, ""), expected)


def proof(secret: str, node: int, *words: str) -> str:
    """Return what only one can say to these words who knows a node's secret.

    Each node's is made of the launch's; neither goes over the network.
    """
    import hmac  # noqa: PLC0415

    of_node = hmac.digest(secret.encode(), b"node %d" % node, "sha256")
    return hmac.digest(of_node, " ".join(words).encode(), "sha256").hex()


def _lines(connection: socket.socket, ranks: NodeRanks) -> Iterator[str]:
    """Return ezpz-launch's orders; while there are none, tell it of ranks that are lost."""
    received = b""
    while True:
        connection.settimeout(ranks.next_look())
        line, newline, rest = received.partition(b"\n")
        if newline:
            received = rest
            yield line.decode("ascii")
            continue
        try:
            chunk = connection.recv(1 << 16)
        except TimeoutError:
            for rank in ranks.lost():
                connection.sendall(f"lost {rank}\n".encode())
            continue
        if not chunk:
            return
        received += chunk


def obey(ranks: NodeRanks, words: list[str]) -> bytes | None:
    """Carry out one order and return what is to be answered; None for a farewell."""
    numbers = [int(word) for word in words[1:]]
    match words[0]:
        case "farewell":
            return None
        case "stacks":
            text = stacks(ranks, numbers)
        case "left":
            text = ranks.name_left().encode()
        case order:
            _obey_silently(ranks, order, numbers)
            return b""
    return b"stacks %d\n%s" % (len(text), text)


def _obey_silently(ranks: NodeRanks, order: str, numbers: list[int]) -> None:
    match order:
        case "start":
            ranks.started(*numbers)
        case "end":
            ranks.ended(*numbers)
        case "signal":
            ranks.signal(*numbers)
        case "release":
            ranks.release(*numbers)
        case "kill":
            ranks.kill()
        case "end-left":
            ranks.end_left()
        case "end-all-left":
            ranks.end_all_left()


def stacks(ranks: NodeRanks, which: list[int]) -> bytes:
    """Return the Python stacks of these ranks; those that cannot be read print their own."""
    tool = _stacks_module()
    py_spy = tool.find_py_spy(os.environ.get("PATH", ""), os.path.dirname(sys.executable))
    texts = []
    for rank in which:
        pid = ranks.pid(rank)
        if pid is None:
            continue
        # All of them within the run loop's patience.
        text = tool.dump(pid, py_spy, bound=max(1.0, 10.0 / len(which)))
        if text is not None:
            texts.append(f"rank {rank}:\n{text.rstrip()}\n")
            continue
        # faulthandler prints it on the rank's own standard error.
        for process in tool.python_processes(pid):
            proc.send(process, signal.SIGABRT)
    return "".join(texts).encode(errors="replace")


def _stacks_module() -> ModuleType:
    return __import__(f"{__package__}.stacks" if __package__ else "stacks", fromlist=["dump"])


def _connect(addresses: list[str], timeout: int) -> socket.socket | None:
    import socket  # noqa: PLC0415  # ezpz-launch itself loads this module, and needs none

    # Of thousands that come at once some find no room.
    for attempt, address in enumerate(addresses * 3):
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT)
        except ConnectionRefusedError:
            continue  # the launch is over
        except OSError:
            time.sleep(attempt + int.from_bytes(os.urandom(1), "little") / 256)
            continue
        connection.settimeout(None)
        keep_alive(connection, timeout)
        return connection
    return None


def keep_alive(connection: socket.socket, timeout: int) -> None:
    """Let the kernel end a connection to a host that has not answered for so many seconds.

    Kernels ask and answer by themselves: a host that is busy or suspended is not lost.
    """
    import socket  # noqa: PLC0415

    often = max(1, timeout // 7)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", often),
        ("TCP_KEEPINTVL", often),
        ("TCP_KEEPCNT", timeout // often - 1),
        # In milliseconds: what was sent and is not taken, which no other of these bounds.
        ("TCP_USER_TIMEOUT", 1000 * (timeout - often)),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


if __name__ == "__main__":
    sys.exit(main())
