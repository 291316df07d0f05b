"""After a signal all ranks agree on a step, save there, and exit with 75."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from types import FrameType
from typing import Any, TypeVar

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # torch exports it so

from ezpz_dist import _diagnosis
from ezpz_dist._diagnosis import LOST, within
from ezpz_dist._errors import CheckpointError, MismatchError
from ezpz_dist._watch import end_job, explain, waiting
from ezpz_dist._world import World, current_world, find_world
from ezpz_topo import get_hostname, get_rank

# The ranks' votes, in the store, for the step at which all of them stop to save.

T = TypeVar("T")

NEVER = 1 << 62  # the step of a rank that takes no more steps: all continue, and nothing is saved
_REQUEST_TIMEOUT = 20.0
"""Seconds for a request to the store. Its server stands still while torch asks the name service
about a new connection, often for 5 s where that does not answer (torch 2.13)."""


class Votes:
    """Every rank gives the step that it is in. The largest is where all of them stop.

    Args:
        name: Of the keys in the store, the same on every rank.
        world: The ranks.
        on_notice: Called with what a rank posts, on every rank.
    """

    def __init__(
        self, name: str, world: World | None, on_notice: Callable[[dict[str, Any]], None]
    ) -> None:
        self._name = name
        self._on_notice = on_notice
        self._rank = 0
        self.size = 1
        self._store: Store = HashStore()
        responder = _diagnosis.find_responder()
        self._side = None
        if responder is not None:
            self._side = responder.side
        if world is not None:
            self._rank = world.info.rank
            self.size = world.info.world_size
            if self._side is not None:
                # Opened now, not in a hurry: torch asks the name service about each connection, on
                # both sides, and that can take seconds (torch 2.13). Its own, so that no other
                # wait is in the way.
                self._store = self._side.connect(world.timeout)
        self.unregister = _diagnosis.on_notice(name, on_notice)

    def post(self, **notice: Any) -> None:
        """Have ``on_notice`` called on every rank, this one too."""
        if self._side is None:
            self._on_notice(notice)
            return
        post = self._side.post
        self._request(lambda store: post(store, "notice", name=self._name, payload=notice))

    def count(self, counter: str, more: int = 1) -> int:
        """Add ``more`` to a counter and return it (0 only reads)."""
        return self._request(lambda store: store.add(f"{self._name}/{counter}", more))

    def agree_on_number(self, step: int) -> str:
        """Return the number that the first rank gives to the step at which all stop."""
        key = f"{self._name}/step"
        return self._request(lambda store: store.compare_set(key, "", str(step)).decode())

    def wait_for_all(self) -> None:
        """Count this rank as finished. Rank 0, which has the store, waits for all ranks."""
        key = f"{self._name}/all-finished"
        if self.count("finished") == self.size:
            self._request(lambda store: store.set(key, ""))
        if self._rank == 0:
            _diagnosis.arrived(self._store, [key], _REQUEST_TIMEOUT)

    def vote(self, step: int) -> int | None:
        """Give this rank's step. Return the largest of all if this is the last vote."""
        key = f"{self._name}/largest"

        def vote(store: Store) -> int | None:
            largest = store.compare_set(key, "", str(step))
            while int(largest) < step:
                largest = store.compare_set(key, largest.decode(), str(step))
            is_last = store.add(f"{self._name}/given", 1) == self.size
            if is_last and store.add(f"{self._name}/requested", 0) > 0:
                return int(store.get(key))
            return None

        return self._request(vote)

    def _request(self, request: Callable[[Store], T]) -> T:
        """Return the store's reply, or raise after a while, even where its process is stopped."""
        return within(_REQUEST_TIMEOUT, lambda: request(self._store))


logger = logging.getLogger(__name__)

EXIT_SAVED = 75
"""Exit status after a checkpoint: start the job again (EX_TEMPFAIL of sysexits.h)."""

EXIT_GAVE_UP = 124
_numbers = itertools.count()  # how many of these this process has made: the same on every rank


class SnapshotOnSignal(AbstractContextManager["SnapshotOnSignal"]):
    """Saves once on all ranks, at one step, after a signal has reached any of them.

    Collective: every rank makes one, calls `step` equally often, and calls `close` (or uses
    it in a ``with`` statement). A signal may reach one rank, some or all, in different steps.
    `step` then returns until the step that all agree upon; there it saves, and raises
    ``SystemExit(75)`` on every rank: to ezpz-launch and schedulers it says "start me again".

    It cannot deadlock: a thread gives the step that its rank is in, no rank goes beyond the
    largest of these, and up to there all of them do what they would have done without the signal.

    While no signal comes nothing is sent, and `step` takes well below a microsecond. The
    signals' earlier handlers do not run meanwhile (most would end the process). Further signals
    change nothing. In a forked child SIGTERM ends the child, and the others are ignored.
    torchrun itself ends at SIGUSR1, without telling its ranks; there, send SIGTERM.

    >>> with SnapshotOnSignal(lambda step: None) as snapshot:
    ...     for step in range(3):
    ...         snapshot.step(step)

    Args:
        save: Called with the step on every rank, in the main thread, at most once; when it
            returns, this rank's part is to be on the disk. Writes of several ranks that
            belong together are its concern: `ezpz_dist.save_checkpoint` does that.
        signals: Names of signals.
        within: Seconds from the signal, on this rank or another, after which the job gives up with
            exit status 124 and names the line where this rank is. Default: it continues
            until the scheduler ends it, which atomic checkpoints survive.

    Raises:
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        ValueError: A name is no signal's that can be handled, this is not the main thread, or
            ``within`` is no positive number.
    """

    def __init__(
        self,
        save: Callable[[int], object],
        *,
        signals: Iterable[str] = ("SIGUSR1", "SIGTERM"),
        within: float | None = None,
    ) -> None:
        numbers = [_signal(name) for name in signals]
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                f"SnapshotOnSignal in thread {threading.current_thread().name!r}; expected the "
                "main thread: Python handles signals there only"
            )
        if within is not None and not within > 0:
            raise ValueError(f"within {within}; expected a positive number of seconds, or None")
        self._save = save
        self._within = within
        self._world = current_world("SnapshotOnSignal()")
        self._rank = get_rank()
        self._who = f"rank {self._rank} on {get_hostname()}"
        self._pid = os.getpid()
        # Guards the step that this rank is in against the thread that gives it away.
        self._lock = threading.Lock()
        self._here = 1
        self._voted: int | None = None
        self._stop_at = NEVER
        self._agreed = threading.Event()
        self._over = threading.Event()
        self._outcome = ""
        self._done = threading.Event()
        # Put into by a signal's handler: of all queues only this one may be interrupted by
        # itself (queue.SimpleQueue.put is reentrant).
        self._signals: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._votes = Votes(f"snapshot/{next(_numbers)}", self._world, self._on_notice)
        self._listener = threading.Thread(target=self._listen, name="ezpz-snapshot", daemon=True)
        self._listener.start()
        # Another rank may have got a signal before this.
        if self._votes.count("requested", 0):
            self._signals.put("")
        self._previous = {number: signal.signal(number, self._on_signal) for number in numbers}
        atexit.register(self.close)

    def step(self, step: int) -> None:
        """Count a step as done; after a signal, save at the step that all ranks agree upon.

        Collective: every rank calls this after each step, with the same number.

        Args:
            step: The number that ``save`` gets.

        Raises:
            SystemExit: 75, when every rank has saved.
            CheckpointError: Another rank's ``save`` failed; its own is raised as it is.
            MismatchError: Another rank calls this step by another number.
            HangError: A rank did not give its step, or did not save, in time.
        """
        with self._lock:
            if self._voted is None:
                self._here += 1
                return
        if not self._agreed.is_set():
            self._wait(self._agreed, "SnapshotOnSignal.step(), for every rank's step", step)
        with self._lock:
            if self._here != self._stop_at:
                self._here += 1
                return
        self._snapshot(step)

    def close(self) -> None:
        """Put the signals' earlier handlers back. Does not wait for other ranks.

        SIGUSR1 and SIGUSR2, which would end the process, are ignored where they had none.
        """
        if os.getpid() != self._pid or self._over.is_set():
            return
        self._over.set()
        atexit.unregister(self.close)
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                # None: C code's, which Python cannot put back.
                before = signal.SIG_DFL if handler is None else handler
                # A warning that comes as the loop ends is not to end a rank that is done.
                if before is signal.SIG_DFL and number in (signal.SIGUSR1, signal.SIGUSR2):
                    before = signal.SIG_IGN
                signal.signal(number, before)
        self._signals.put(None)
        self._votes.unregister()
        # Other ranks learn that no step of this one will come.
        self._vote(NEVER)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._signals.put(signal.Signals(number).name)
        elif number == signal.SIGTERM:
            # A forked child's: its parent, or the scheduler, wants it to end.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _listen(self) -> None:
        """Wait for a signal on this rank or another; then vote for the main thread."""
        name = self._signals.get()
        if name is None:
            return
        start = time.monotonic()
        if name:
            logger.info("rank %d got %s", self._rank, name)
        try:
            if name and self._votes.count("requested") == 1:
                self._votes.post(signal=name)
        except LOST as error:
            self._handle_store_loss(error)
        self._vote()
        if self._within is None or self._over.wait(self._within - (time.monotonic() - start)):
            return
        self._give_up(name or "another rank's signal")

    def _on_notice(self, notice: dict[str, Any]) -> None:
        """Process what a rank posted, in the responder's thread."""
        if "signal" in notice:
            self._signals.put("")
        elif "stop_at" in notice:
            self._stop_at = notice["stop_at"]
            if self._stop_at == NEVER:
                logger.warning("rank %d saves nothing: a rank is done with its steps", self._rank)
            self._agreed.set()
        else:
            self._outcome = notice["outcome"]
            self._done.set()

    def _vote(self, at_least: int = 0) -> None:
        """Vote for the step that this rank is in, or a larger one, once."""
        with self._lock:
            if self._voted is not None:
                return
            self._voted = max(self._here, at_least)
        if self._world is not None and find_world() is not self._world:
            return  # after clean-up no one waits
        try:
            stop_at = self._votes.vote(self._voted)
            if stop_at is not None:
                self._votes.post(stop_at=stop_at)
        except LOST as error:
            self._handle_store_loss(error)

    def _handle_store_loss(self, error: Exception) -> None:
        """Continue: rank 0 has ended, and the next collective raises if that matters."""
        logger.error("rank %d cannot agree on a step to save at: %s", self._rank, error)
        self._agreed.set()

    def _snapshot(self, step: int) -> None:
        logger.info("rank %d saves at step %d, as every rank", self._rank, step)
        try:
            other = self._votes.agree_on_number(step)
            if other != str(step):
                raise MismatchError(
                    f"rank {self._rank} calls step({step}) where another rank calls step({other}); "
                    "expected the same number on every rank"
                )
            self._save(step)
        except BaseException as error:  # whatever ends this save: the others are told
            with suppress(*LOST):
                self._votes.post(outcome=f"{self._who}: {type(error).__name__}: {error}")
            raise
        if self._votes.count("saved") == self._votes.size:
            self._votes.post(outcome="")
        self._wait(self._done, "SnapshotOnSignal.step(), for every rank to save", step)
        if self._outcome:
            raise CheckpointError(
                f"the snapshot at step {step} failed on {self._outcome}; expected every rank to "
                "save; what was saved before is what there is"
            )
        with suppress(*LOST):  # then no rank is left to wait for
            self._votes.wait_for_all()
        # Python forgets a SystemExit before what runs at exit, to which this run has not finished.
        sys.last_value = SystemExit(EXIT_SAVED)
        raise sys.last_value

    def _wait(self, event: threading.Event, what: str, step: int) -> None:
        world = self._world
        with waiting(what, world):
            if not event.wait(None if world is None else world.timeout):
                assert world is not None
                raise explain(TimeoutError(f"at step {step}"), what, world, world.timeout)

    def _give_up(self, name: str) -> None:
        line, _ = _diagnosis.describe_frames(_diagnosis.main_frame())
        text = (
            f"{self._who} has not saved {self._within:g} s after {name} (within={self._within:g}); "
            f"it stands at {line}; giving up with exit status {EXIT_GAVE_UP}"
        )
        _diagnosis.tell(f"ezpz: {text}")
        end_job(text, EXIT_GAVE_UP)
        # The main thread may be in C for ever. Nothing is flushed: it may hold the lock.
        os._exit(EXIT_GAVE_UP)


def _signal(name: str) -> signal.Signals:
    number = getattr(signal, name, None)
    if not isinstance(number, signal.Signals) or name in ("SIGKILL", "SIGSTOP"):
        raise ValueError(
            f"signal {name!r}; expected the name of one that can be handled: 'SIGUSR1'"
        )
    return number
