"""A library's sink in a process of its own, which can be killed.

W&B, MLflow and trackio wait for their servers: in hooks at the interpreter's end, in threads that
are no daemons, in a service process; and importing them holds Python's lock for seconds. In
training's own process none of that can be bounded. A child that is fed through a pipe costs
training one encoding a record, is killed at the deadline, and where training is killed still
sends what it was given.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from ezpz_obs._errors import SinkError
from ezpz_obs._file import RECORD, decode, encode_anything, encode_record

from .libraries import library_seconds, say_error

CLOSE = b'{"close":true}'
_BLOCK = 1 << 16
_AFTERLIFE = 10.0  # seconds to finish in where training was killed


def main(name: str, descriptor: str) -> None:
    # What ends training (ctrl-C, a scheduler's warning) ends it through its pipe, with all records.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)
    os.set_inheritable(int(descriptor), False)  # by what libraries start
    replies = Connection(int(descriptor), readable=False)

    def say(what: str, text: str = "") -> None:
        # Where no one listens any more, the records are sent all the same.
        with contextlib.suppress(BrokenPipeError):
            replies.send((what, text))

    try:
        _run(name, say)
    # Whatever a library raises: the parent is to read it.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        say("error", say_error(error))
        os._exit(1)
    # Not by sys.exit: hooks of libraries would wait once more for what was closed already.
    os._exit(0)


def _run(name: str, say: Callable[..., None]) -> None:
    batches = _batches()
    line, *waiting = next(batches)
    first = decode(line)
    threading.Thread(target=_outlive, args=(first["parent"],), daemon=True).start()
    folder = None if first["folder"] is None else Path(first["folder"])
    make = getattr(import_module(f"{__package__}.{name}"), f"{name.title()}Sink")
    sink = make(lambda text: say("warning", text), folder)
    say("started")
    sink.open(first["open"], folder)
    say("opened", getattr(sink, "place", ""))
    # It has the cores of rank 0, whose training comes first; but not before it has begun: where
    # these cores are busy, to import a library would take minutes.
    os.nice(10)
    for batch in chain([waiting], batches):
        if records := [decode(each) for each in batch if each.startswith(RECORD)]:
            sink.write(records)
        if CLOSE in batch:
            break
    sink.close()
    say("closed")


def _outlive(parent: int) -> None:
    """End this process some time after its parent's end, whatever it waits for."""
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(_AFTERLIFE)
    os._exit(2)


def _batches() -> Iterator[list[bytes]]:
    """Give the lines of standard input as they come; a torn last one is left out."""
    # Not as standard input: what libraries start would inherit the pipe, and keep it open.
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    rest = b""
    while block := os.read(pipe, _BLOCK):
        *lines, rest = (rest + block).split(b"\n")
        if lines:
            yield lines


logger = logging.getLogger("ezpz_obs")
_START_SECONDS = 600.0  # to import from a busy parallel file system; training goes on
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ezpz_obs._sinks.helper import main; main(*sys.argv[2:])"
)


class Helper:
    """The `Sink` that runs another one, known by name, in a child process."""

    def __init__(self, name: str, close_seconds: float | None = None) -> None:
        self.name = name
        self._reply_seconds = library_seconds()
        self._close_seconds = close_seconds or self._reply_seconds
        self.open_seconds = _START_SECONDS + self._reply_seconds + 1.0
        self._process: Any = None
        self._replies: Any = None
        self._abandoned = False

    def open(self, header: Mapping[str, Any], folder: Path | None) -> None:
        if not sys.executable:
            raise SinkError(
                f"sink {self.name!r} in an interpreter without sys.executable; expected one that "
                "can be started: set sys.executable"
            )
        path = json.dumps([str(entry) for entry in sys.path])
        self._replies, theirs = Pipe(duplex=False)
        # Not fork: MPI and CUDA do not survive it. stderr is not ours to keep open after the end.
        with theirs:
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, path, self.name, str(theirs.fileno())],
                bufsize=0, pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        if self._abandoned:  # meanwhile, from another thread
            process.kill()
        where = None if folder is None else str(folder)
        self._send(encode_anything({"open": header, "folder": where, "parent": os.getpid()}))
        self._wait_for("started", _START_SECONDS)
        self._wait_for("opened", self._reply_seconds + 1.0)

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._wait_for(None, 0.0)
        self._send(b"".join(encode_record(record) or encode_anything(record) for record in records))

    def close(self) -> None:
        process = self._process
        if process is None:
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
        """Kill the process, whatever it does. It may be called twice."""
        self._abandoned = True
        process = self._process
        if process is None:
            return
        process.kill()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            return  # in the kernel, waiting for a file system
        process.stdin.close()
        self._replies.close()

    def _send(self, text: bytes) -> None:
        rest = memoryview(text)
        try:
            while rest:
                rest = rest[self._process.stdin.write(rest) :]
        except (BrokenPipeError, ValueError):  # ValueError: closed by `abandon`
            self._wait_for("an answer", 1.0)

    def _wait_for(self, what: str | None, seconds: float) -> None:
        """Read replies until this one, or for None those that are there."""
        until = time.monotonic() + seconds
        while True:
            try:
                if not self._replies.poll(max(0.0, until - time.monotonic())):
                    if what is None:
                        return
                    raise SinkError(f"its process has not {what} within {seconds:.3g} s")
                said, text = self._replies.recv()
            except (EOFError, OSError):  # OSError: closed by `abandon`
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)
                status = self._process.returncode
                raise SinkError(f"its process ended with status {status}") from None
            if said == "error":
                raise SinkError(text)
            if text:
                level = logging.WARNING if said == "warning" else logging.INFO
                logger.log(level, "sink %s: %s", self.name, text)
            if said == what:
                return
