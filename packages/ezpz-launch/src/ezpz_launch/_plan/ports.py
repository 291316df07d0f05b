"""A TCP port of this host that is free now, and that no outgoing connection will get."""

from __future__ import annotations

import errno
import os
from socket import AF_INET, SOCK_DGRAM, socket

from ezpz_launch._errors import LaunchError

# Below Linux's and macOS's ephemeral ranges: the ranks bind it seconds later.
_FIRST = 20000
_COUNT = 10000

_reservations: list[socket] = []  # until this process ends


def reserve_port() -> int:
    """Return a free port, which no other launch on this host gets while this process lives."""
    start = int.from_bytes(os.urandom(4), "little")
    for step in range(_COUNT):
        port = _FIRST + (start + step) % _COUNT
        if _is_free(port) and _reserve(port):
            return port
    raise LaunchError(
        f"every port from {_FIRST} to {_FIRST + _COUNT - 1} is taken; expected one for the ranks "
        "to meet at; end what holds them"
    )


def _is_free(port: int) -> bool:
    with socket() as probe:
        try:
            # On every address: a listener on any of them is in the way.
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _reserve(port: int) -> bool:
    """Reserve a port against other launches; False if one of them has it."""
    # TCP's is the ranks' own to bind: UDP's of the same number keeps other launches from it.
    reservation = socket(AF_INET, SOCK_DGRAM)
    try:
        reservation.bind(("127.0.0.1", port))
    except OSError as error:
        reservation.close()
        # Without a reservation it is still free.
        return error.errno != errno.EADDRINUSE
    _reservations.append(reservation)
    return True
