"""A terminal by another way: a socket of this host, at which a person connects with `attach`."""

from __future__ import annotations

import atexit
import os
import queue
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress

from ezpz_dist._errors import DistError

from . import attach

_KEPT = 1 << 16
"""Characters of output that are kept for whoever connects."""


class RemoteTerminal:
    """Lines from and to whoever is connected; a file to read from and to write to.

    Nothing is lost while nobody is: output is kept, and reading waits. The socket lies in a
    folder that only this user can enter, so it needs no secret (one on a command line could
    be seen by all users of the host).

    Attributes:
        command: What to type in a shell on this host.

    Raises:
        DistError: No socket can be made.
    """

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        self._kept = ""
        self._awaits = False
        self._closed = False
        self._folder, self._listener = _listen()
        words = [sys.executable, attach.__file__, self._listener.getsockname()]
        self.command = shlex.join(words)
        # The program may end in a step, without a word to us.
        atexit.register(self.close)
        threading.Thread(target=self._serve, name="ezpz-attach", daemon=True).start()

    def readline(self, _limit: int = -1) -> str:
        """Return the next line that somebody types, waiting for somebody to come."""
        with self._lock:
            self._awaits = True
            self._send(attach.TURN)
        line = self._lines.get()
        with self._lock:
            self._awaits = False
        return line

    def write(self, text: str) -> int:
        """Show text, or keep it for whoever connects."""
        with self._lock:
            self._kept = (self._kept + text)[-_KEPT:]
            self._send(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: what is written is sent."""

    def close(self) -> None:
        """End the connection, and remove the socket and its folder."""
        with self._lock:
            self._closed = True
            atexit.unregister(self.close)
            link, self._link = self._link, None
        for each in (self._listener, link):
            if each is not None:
                with suppress(OSError):  # nobody is connected, or not any more
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, text: str) -> None:
        if self._link is not None:
            # Who has gone meanwhile is noticed by the thread that reads.
            with suppress(OSError):
                self._link.sendall(text.encode("utf-8", "replace"))

    def _serve(self) -> None:
        # One person at a time: the next one waits in the listener's queue.
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                if self._closed:
                    link.close()
                    return
                self._link = link
                self._send(self._kept + attach.TURN * self._awaits)
            self._listen_to(link)
            with self._lock:
                self._link = None
            link.close()

    def _listen_to(self, link: socket.socket) -> None:
        typed = b""
        while True:
            try:
                data = link.recv(65536)
            except OSError:
                return
            if not data:
                return
            if attach.INTERRUPT in data:
                # As Ctrl-C at a terminal would: the main thread is interrupted, even in a wait.
                main = threading.main_thread().ident
                signal.pthread_kill(main or 0, signal.SIGINT)
            *lines, typed = (typed + data.replace(attach.INTERRUPT, b"")).split(b"\n")
            for line in lines:
                self._lines.put(line.decode("utf-8", "replace") + "\n")


def _listen() -> tuple[str, socket.socket]:
    """Return a private folder and a socket in it that listens."""
    reasons = []
    # The second, where the first is on a file system without sockets, or its name is too long
    # (108 bytes on Linux: unix(7)).
    for place in dict.fromkeys((tempfile.gettempdir(), "/tmp")):  # noqa: S108  # mkdtemp's 0700
        try:
            folder = tempfile.mkdtemp(prefix="ezpz-pdb-", dir=place)
        except OSError as error:
            reasons.append(f"{place}: {error.strerror}")
            continue
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(os.path.join(folder, "socket"))
            listener.listen()
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror or error}")
            listener.close()
            shutil.rmtree(folder, ignore_errors=True)
            continue
        return folder, listener
    raise DistError(
        f"breakpoint() finds no terminal and no place for a socket ({'; '.join(reasons)}); "
        "expected a folder on a local disk; set TMPDIR to one"
    )
