"""A TCP port of this host that is free now, and that no outgoing connection will be given."""

from __future__ import annotations

import os

from ._errors import LaunchError

# Below Linux's and macOS's ephemeral ranges: the ranks bind it seconds later.
_FIRST, _COUNT = 20000, 10000

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def free_port() -> int:
    """Return a free port.

    Raises:
        LaunchError: All of the range are taken.
    """
    taken = _taken_ports()
    start = int.from_bytes(os.urandom(4), "little")
    for step in range(_COUNT):
        port = _FIRST + (start + step) % _COUNT
        if _can_bind(port) if taken is None else port not in taken:
            return port
    raise LaunchError(
        f"every port from {_FIRST} to {_FIRST + _COUNT - 1} is taken; expected one for the ranks "
        "to meet at; end what holds them"
    )


def _taken_ports() -> set[int] | None:
    """Return the local ports of every socket here; None where the kernel does not list them.

    Source: ``proc_net_tcp`` of Linux: local_address is hex address, colon, hex port.
    """
    ports: set[int] = set()
    try:
        for table in _TABLES:
            with open(table, encoding="utf-8") as file:
                for line in file.read().splitlines()[1:]:
                    ports.add(int(line.split(None, 2)[1].rpartition(":")[2], 16))
    except (OSError, ValueError, IndexError):
        # Not Linux, or one that has no IPv6: then each port is tried.
        return None
    return ports


def _can_bind(port: int) -> bool:
    import socket  # noqa: PLC0415  # 6 ms

    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
