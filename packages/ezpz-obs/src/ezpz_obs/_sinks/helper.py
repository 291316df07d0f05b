"""A library's sink in a process of its own, which can be killed.

W&B, MLflow and trackio wait for their servers: in hooks at the interpreter's end, in threads that
are no daemons, in a service process; and importing them holds Python's lock for seconds. In
training's own process none of that can be bounded. A child that is fed through a pipe costs
training one encoding a record, is killed at the deadline, and where training is killed still
sends what it was given.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ezpz_obs._errors import SinkError
from ezpz_obs._file import encode_anything, encode_record

from .child import CLOSE
from .libraries import library_seconds

logger = logging.getLogger("ezpz_obs")

_START_SECONDS = 120.0  # importing from a busy parallel file system; nobody waits for it
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ezpz_obs._sinks.child import main; main(sys.argv[2])"
)


class Helper:
    """The `Sink` that runs another one, known by name, in a child process.

    Args:
        name: One of `LIBRARY_SINKS`.
        close_seconds: How long closing may take; a `Feeder` is stricter.
    """

    def __init__(self, name: str, close_seconds: float | None = None) -> None:
        self.name = name
        self._reply_seconds = library_seconds()
        self._close_seconds = close_seconds or self._reply_seconds
        self.open_seconds = _START_SECONDS + self._reply_seconds + 1.0
        self._process: subprocess.Popen[bytes] | None = None
        self._abandoned = False
        self._unread = b""

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:
        """Start the process, and wait until its sink is open.

        Raises:
            SinkError: It did not start, or its sink could not be opened.
        """
        if not sys.executable:
            raise SinkError(
                f"sink {self.name!r} in an interpreter without sys.executable; expected one that "
                "can be started: set sys.executable"
            )
        path = json.dumps([str(entry) for entry in sys.path])
        # Not fork: MPI and CUDA do not survive it. stderr is not ours to keep open after the end.
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, path, self.name],
            bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        if self._abandoned:  # meanwhile, from another thread
            process.kill()
        first = {
            "open": dict(header),
            "folder": None if folder is None else str(folder),
            "parent": os.getpid(),
            "seconds": self._reply_seconds,
        }
        self._send(encode_anything(first))
        self._wait_for("started", _START_SECONDS)
        self._wait_for("opened", self._reply_seconds + 1.0)

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Hand records to the process.

        Raises:
            SinkError: Its sink failed.
        """
        self._wait_for(None, 0.0)
        self._send(b"".join(encode_record(record) or encode_anything(record) for record in records))

    def close(self) -> None:
        """Wait until the process has sent everything and ended.

        Raises:
            SinkError: Its sink failed, or it takes too long: it is killed.
        """
        process = self._process
        if process is None or process.stdin is None:
            return
        try:
            self._send(CLOSE + b"\n")
            self._wait_for("closed", self._close_seconds)
            process.stdin.close()
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            pass  # all was sent; what it still waits for is nobody's
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Kill the process, whatever it does. Harmless twice."""
        self._abandoned = True
        process = self._process
        if process is None:
            return
        process.kill()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            return  # in the kernel, waiting for a file system
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, text: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        rest = memoryview(text)
        try:
            while rest:
                rest = rest[self._process.stdin.write(rest) :]
        except (BrokenPipeError, ValueError):  # ValueError: closed by `abandon`
            self._wait_for("an answer", 1.0)

    def _wait_for(self, what: str | None, seconds: float) -> None:
        """Read replies until this one, or for None those that are there.

        Raises:
            SinkError: The sink failed, its process ended, or did not answer in time.
        """
        until = time.monotonic() + seconds
        while True:
            line = self._read(max(0.0, until - time.monotonic()))
            if line is None:
                if what is None:
                    return
                raise SinkError(f"its process has not {what} within {seconds:.3g} s")
            reply = json.loads(line)
            if reply["said"] == "error":
                raise SinkError(reply["text"])
            if reply["text"]:
                level = logging.WARNING if reply["said"] == "warning" else logging.INFO
                logger.log(level, "sink %s: %s", self.name, reply["text"])
            if reply["said"] == what:
                return

    def _read(self, seconds: float) -> bytes | None:
        """Return one reply, None where there is none in time.

        Raises:
            SinkError: The process has ended.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._unread:
            try:
                wait = max(0.0, until - time.monotonic())
                if not select.select([self._process.stdout], [], [], wait)[0]:
                    return None
                block = os.read(self._process.stdout.fileno(), 65536)
            except (OSError, ValueError):  # closed by `abandon`
                block = b""
            if not block:
                raise SinkError(f"its process ended with status {self._status()}")
            self._unread += block
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _status(self) -> int | str:
        assert self._process is not None
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "unknown"
