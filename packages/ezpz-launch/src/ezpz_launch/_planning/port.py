"""A TCP port of this host that is free now, and that no outgoing connection will be given."""

from __future__ import annotations

import errno
import os

from ezpz_launch._errors import LaunchError

# Below Linux's and macOS's ephemeral ranges: the ranks bind it seconds later.
_FIRST, _COUNT = 20000, 10000

_reserved: list[object] = []
"""Sockets, until this process ends."""


def free_port() -> int:
    """Return a free port, which no other launch from this host is given while this one lives.

    Raises:
        LaunchError: All of the range are taken.
    """
    # Not socket, which takes 6 ms for the sake of names; nor /proc/net/tcp, which takes the kernel
    # up to 10.
    from _socket import AF_INET, SOCK_DGRAM  # noqa: PLC0415
    from _socket import socket as Socket  # noqa: N812, PLC0415

    start = int.from_bytes(os.urandom(4), "little")
    for step in range(_COUNT):
        port = _FIRST + (start + step) % _COUNT
        probe = Socket()
        try:
            # On every address: a listener on any of them is in the way.
            probe.bind(("", port))
        except OSError:
            continue
        finally:
            probe.close()
        # TCP's is the ranks' own to bind: UDP's of the same number tells other launches meanwhile.
        reservation = Socket(AF_INET, SOCK_DGRAM)
        try:
            reservation.bind(("127.0.0.1", port))
        except OSError as error:
            reservation.close()
            if error.errno == errno.EADDRINUSE:
                continue
        else:
            _reserved.append(reservation)
        return port
    raise LaunchError(
        f"every port from {_FIRST} to {_FIRST + _COUNT - 1} is taken; expected one for the ranks "
        "to meet at; end what holds them"
    )
