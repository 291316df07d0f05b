"""The thread of each rank that answers for it while its main thread is stuck."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it so

from ezpz_dist._store import LOST

from . import doing, flight
from .board import FOREVER, Board
from .processes import state_of
from .standing import Standing, describe_frames, main_frame, whole_stack

logger = logging.getLogger(__name__)

FIRST_WORDS = 1.0
"""Seconds that a rank goes on after another's failure, so that that one's traceback is first and
its exit status the one that the launcher sees first. The whole job is to end within two."""

_ON_ITS_WAY = 0.2
"""Seconds of these that the line naming the failed rank waits for that rank's traceback: launchers
bring the words of each node by a way of its own (srun), and what was written later comes first."""

JOIN = 0.5

_CONNECTING = 60.0

_LAST = 5

Notice = Callable[[dict[str, Any]], None]

_callbacks: dict[str, list[Notice]] = {}


class Watcher(threading.Thread):
    """Sleeps at the side store until another rank posts an event, then serves it.

    Attributes:
        board: Where events are.
        pid: The process that it was started in; a forked child has none.
        lost: Whether rank 0, which holds the store, has left before this rank.
        ending: Set once a rank, this one or another, was heard to end the job.
    """

    def __init__(self, board: Board) -> None:
        """Prepare the thread for one set-up's board; `start` starts it."""
        super().__init__(name="ezpz-watcher", daemon=True)
        self.board = board
        self.lost = False
        self.ending = threading.Event()
        self.pid = os.getpid()
        self._leaving = threading.Event()
        self._stopped = threading.Event()
        self._pinned: Standing | None = None

    def run(self) -> None:
        """Serve events until `stop`, or until the store is gone."""
        try:
            # Not on the caller's time: set-up need not wait for this connection.
            store = self._connect()
            seen = 0
            while not self._leaving.is_set():
                for event in self.board.events_after(store, seen):
                    seen += 1
                    self._serve(store, event)
                if not self._leaving.is_set():
                    self.board.sleep(store)
        except LOST as error:
            self.lost = not self._leaving.is_set()
            logger.debug("rank %d: the side store is gone: %s", self.board.rank, error)

    def _connect(self) -> Store:
        """Try again and again: the server stands still while torch asks the name service."""
        until = time.monotonic() + _CONNECTING
        while True:
            try:
                return self.board.connect(FOREVER.total_seconds())
            except LOST as error:
                if self._leaving.wait(1.0):
                    raise
                if time.monotonic() > until:
                    logger.warning(
                        "rank %d will not hear of the other ranks' failures: %s",
                        self.board.rank, error,
                    )  # fmt: skip
                    raise

    def stop(self, store: Store) -> None:
        """End the thread; harmless when it has ended.

        Args:
            store: A connection, through which its sleep is ended.
        """
        self._leaving.set()
        self._stopped.set()
        if self.lost:
            return
        try:
            self.board.wake_myself(store)
        except LOST:
            return  # its own connection is gone as well
        self.join(JOIN)

    def _serve(self, store: Store, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "roll" and event["from"] != self.board.rank:
            said = self.standing(stack=event["stack"]).as_json()
            store.set(f"standing/{event['roll']}/{self.board.rank}", json.dumps(said))
        elif kind == "look":
            self._look(store, event)
        elif kind == "closed":
            self.lost = True
            self._leaving.set()
        elif kind == "end":
            self.ending.set()
            self._leaving.set()
            if event["from"] != self.board.rank:
                self._name_the_cause(event["from"])
                self._end(event)
        elif kind == "notice":
            for callback in tuple(_callbacks.get(event["name"], ())):
                self._call(callback, event)

    def _call(self, callback: Notice, event: dict[str, Any]) -> None:
        try:
            callback(event["payload"])
        # Whatever it is: this thread has others to answer.
        except Exception:
            logger.exception("rank %d: what hears of %s failed", self.board.rank, event["name"])

    def standing(self, *, stack: bool) -> Standing:
        """Return where this rank's main thread stands; with its whole stack on demand."""
        if self._pinned is not None:
            return self._pinned
        frame = main_frame()
        line, inside = describe_frames(frame)
        if doing.failed_at():
            line, inside = doing.failed_at(), ""
        return Standing(
            self.board.rank,
            self.board.hosts[self.board.rank],
            line,
            inside,
            doing.current(),
            whole_stack(frame) if stack else (),
            tuple(flight.last_collectives(_LAST if stack else 1)),
        )

    @contextmanager
    def pinned(self, standing: Standing) -> Iterator[None]:
        """Let this rank be said to stand there, while it asks where the others are."""
        self._pinned = standing
        try:
            yield
        finally:
            self._pinned = None

    def _look(self, store: Store, event: dict[str, Any]) -> None:
        """Answer for silent ranks of this host: have their processes ended, or are they stopped?"""
        host = self.board.hosts[self.board.rank]
        for rank, where, pid, namespace in event["at"]:
            state = state_of(pid, namespace) if where == host else ""
            if state:
                store.set(f"state/{event['roll']}/{rank}", state)

    def _name_the_cause(self, rank: int) -> None:
        """Tell ezpz-launch who failed, as that rank's process may take longer to end than this."""
        path = os.environ.get("EZPZ_CAUSE_FILE", "")
        # In a world of its own making, ranks have other numbers.
        if path and os.environ.get("EZPZ_RANK") == str(self.board.rank):
            with suppress(OSError), open(path, "x", encoding="ascii") as file:
                file.write(f"{rank}\n")

    def _end(self, event: dict[str, Any]) -> None:
        end = time.monotonic() + FIRST_WORDS
        if event["teller"] == self.board.rank:
            self._stopped.wait(_ON_ITS_WAY)
            tell(f"ezpz: {event['text']}; the other ranks end too")
        # Its own last words, which may be the better explanation, are not cut off. Nor is a rank
        # ended that has left this world by then.
        if self._stopped.wait(end - time.monotonic()):
            return
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue  # closed, or nobody reads it
        os._exit(event["status"])


def tell(text: str) -> None:
    """Write a line to standard error, whatever the main thread has locked."""
    try:
        os.write(2, f"{text}\n".encode())
    except OSError:
        return  # nobody reads it any more


_watcher: Watcher | None = None


def start(board: Board) -> Watcher:
    """Start this rank's watcher."""
    global _watcher
    _watcher = Watcher(board)
    _watcher.start()
    return _watcher


def find_watcher() -> Watcher | None:
    """Return this process's watcher; None in a world of one, before set-up and in a child."""
    if _watcher is None or _watcher.pid != os.getpid():
        return None
    return _watcher


def forget() -> None:
    """Drop the watcher that has been stopped."""
    global _watcher
    _watcher = None


def on_notice(name: str, callback: Notice) -> Callable[[], None]:
    """Have a function called, in the watcher's thread, for each notice of this name.

    Returns:
        A function that takes the callback back.
    """
    _callbacks.setdefault(name, []).append(callback)
    return lambda: _callbacks[name].remove(callback)
