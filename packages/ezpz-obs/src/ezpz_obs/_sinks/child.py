"""What runs in the process that a `Helper` starts: one sink, fed through standard input."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ezpz_obs._file import decode

from .libraries import make_library_sink

CLOSE = b'{"close":true}'
_BLOCK = 1 << 16
_AFTERLIFE = 10.0
"""Seconds to finish in where training was killed."""


def main(name: str) -> None:
    """Run the sink until standard input ends."""
    # What ends training (ctrl-C, a scheduler's warning) ends it through its pipe, with all records.
    for which in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, which):
            signal.signal(getattr(signal, which), signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(10)  # it has the cores of rank 0, whose training comes first
    say = _speaker()
    try:
        _run(name, say)
    # Whatever a library raises: the parent is to read it.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        text = " ".join(str(error).split())
        say("error", f"{type(error).__name__}: {text:.500}")
        os._exit(1)
    # Not by sys.exit: hooks of libraries would wait once more for what was closed already.
    os._exit(0)


def _speaker() -> Callable[[str, str], None]:
    """Return what writes replies; what libraries print goes nowhere."""
    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)

    def say(what: str, text: str = "") -> None:
        # Where nobody listens any more, the records are sent all the same.
        with contextlib.suppress(BrokenPipeError):
            os.write(replies, json.dumps({"said": what, "text": text}).encode() + b"\n")

    return say


def _run(name: str, say: Callable[[str, str], None]) -> None:
    lines = _Lines()
    first = decode(next(lines))
    threading.Thread(target=_outlive, args=(first["parent"],), daemon=True).start()
    folder = None if first["folder"] is None else Path(first["folder"])
    sink = make_library_sink(name, lambda text: say("warning", text), folder)
    say("started", "")
    sink.open(first["open"], folder)
    say("opened", getattr(sink, "place", ""))
    for line in lines:
        batch = [line, *lines.at_hand()]
        closing = batch[-1] == CLOSE
        if records := [decode(each) for each in batch if each != CLOSE]:
            sink.write(records)
        if closing:
            break
    sink.close()
    say("closed", "")


def _outlive(parent: int) -> None:
    """End this process some time after its parent's end, whatever it waits for."""
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(_AFTERLIFE)
    os._exit(2)


class _Lines:
    """Whole lines from standard input; a torn last one is left out."""

    def __init__(self) -> None:
        # Not as standard input: what libraries start would inherit the pipe, and keep it open.
        self._fd = os.dup(0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        self._whole: list[bytes] = []
        self._rest = b""

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> bytes:
        while not self._whole:
            block = os.read(self._fd, _BLOCK)
            if not block:
                raise StopIteration
            *lines, self._rest = (self._rest + block).split(b"\n")
            self._whole = lines[::-1]
        return self._whole.pop()

    def at_hand(self) -> list[bytes]:
        """Return the lines that were read already."""
        lines, self._whole = self._whole[::-1], []
        return lines
