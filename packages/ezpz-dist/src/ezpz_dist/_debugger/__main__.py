"""Program: talk to a debugger that waits at a socket, a terminal for a rank that has none."""

from __future__ import annotations

import codecs
import importlib
import socket
import sys
from contextlib import suppress

TURN = "\x05"  # sent by the debugger behind each prompt: it is the person's turn (ASCII's enquiry)
INTERRUPT = b"\x03"  # sent to the debugger for Ctrl-C


def main(words: list[str]) -> int:
    if len(words) != 1:
        sys.stderr.write(f"usage: python {sys.argv[0]} SOCKET\n")
        return 2
    with suppress(ImportError):
        importlib.import_module("readline")  # lines can be edited and recalled
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.connect(words[0])
        except OSError as error:
            sys.stderr.write(
                f"{words[0]}: {error.strerror}; expected a rank's breakpoint to wait there; it has "
                "ended, or is on another host\n"
            )
            return 1
        with suppress(BrokenPipeError, ConnectionResetError):
            if _talk(link):
                return 0
    sys.stdout.write("the debugger has ended\n")
    return 0


def _talk(link: socket.socket) -> bool:
    """Return whether the person has left, before the debugger has ended."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    shown = ""
    while True:
        try:
            data = link.recv(65536)
        except KeyboardInterrupt:
            link.sendall(INTERRUPT)
            continue
        if not data:
            sys.stdout.write(shown)
            return False
        shown += decoder.decode(data)
        while TURN in shown:
            said, _, shown = shown.partition(TURN)
            lines, newline, prompt = said.rpartition("\n")
            sys.stdout.write(lines + newline)
            line = _ask(prompt)
            if line is None:
                sys.stdout.write("\nleft; the rank waits: the same command connects again\n")
                return True
            link.sendall(line.encode("utf-8", "replace") + b"\n")
        # Whole lines at once; a prompt stays until its turn.
        lines, newline, shown = shown.rpartition("\n")
        sys.stdout.write(lines + newline)
        sys.stdout.flush()


def _ask(prompt: str) -> str | None:
    while True:
        try:
            return input(prompt)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
        except EOFError:
            return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
