"""Program: attach this terminal to a rank that stands in `ezpz_dist.breakpoint`."""

from __future__ import annotations

import os
import socket
import sys
import threading
from contextlib import suppress

VARIABLE = "EZPZ_BREAKPOINT_TOKEN"
"""Holds the token: other users can read a command's arguments, but not its environment."""

USAGE = f"usage: {VARIABLE}=... python -m ezpz_dist._attach HOST PORT\n"


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or VARIABLE not in os.environ:
        sys.stderr.write(USAGE)
        return 2
    host, port = arguments
    try:
        link = socket.create_connection((host, int(port)))
    except (OSError, ValueError) as error:
        sys.stderr.write(
            f"{host} {port}: {error}; expected a rank's breakpoint to wait there; it has ended, "
            "or is on another host\n"
        )
        return 1
    with link, suppress(ConnectionError, KeyboardInterrupt):
        link.sendall(f"{os.environ[VARIABLE]}\n".encode())
        threading.Thread(target=_send_input, args=(link,), daemon=True).start()
        data = link.recv(65536)
        while data:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            data = link.recv(65536)
    sys.stdout.write("\nthe connection has ended; if the rank still waits, attach once more\n")
    return 0


def _send_input(link: socket.socket) -> None:
    with suppress(OSError):  # the debugger has ended
        for line in sys.stdin.buffer:
            link.sendall(line)
        link.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
