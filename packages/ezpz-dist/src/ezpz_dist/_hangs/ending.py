"""One rank's end is everybody's: an uncaught exception, a signal, a time-out of `watch`."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from ezpz_dist._store import LOST, within
from ezpz_dist._world import World, find_world, is_forked

from . import doing
from .board import Board
from .roll_call import call_roll
from .standing import describe_frames, raising_line
from .waiting import first_line, is_of_a_collective, tell_missing
from .watcher import find_watcher, tell

logger = logging.getLogger(__name__)

_SAYING = 1.0
"""Seconds to tell others something, should the store still answer."""

_READING = 0.1
"""Seconds that the store stays for the others to read it, once they were told of the end."""

_failed = False
_unwinding = False


def install() -> None:
    """Let an uncaught exception of this rank end the job, and SIGTERM clean up.

    To be called after ``init_process_group``, whose own hook captures standard error while
    it calls ours. SIGTERM is left alone where somebody handles it already. Who calls it puts
    ``sys.excepthook`` back.
    """
    global _failed, _unwinding
    _failed = _unwinding = False
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        try:
            previous(kind, value, trace)
        finally:
            world = find_world()
            if world is not None and not is_forked():
                last_words(world, value, trace)

    sys.excepthook = hook
    on_main = threading.current_thread() is threading.main_thread()
    if on_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def has_failed() -> bool:
    """Say whether this rank goes because of a failure."""
    return _failed


def release_sigterm() -> None:
    """Let SIGTERM end the process as before, unless somebody else handles it by now."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is _terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminated(_: int, frame: FrameType | None) -> None:
    global _unwinding
    if _unwinding or not threading.main_thread().is_alive():
        # Launchers repeat it, and a `finally` that saves is not to be cut off. At exit the main
        # thread counts as ended: there is no script to unwind, and Python would print a traceback.
        return
    _unwinding = True
    line, _inside = describe_frames(frame)
    leave_word(f"SIGTERM at {line}")
    # Unwinds the script, so that its own `finally` and our cleanup run.
    sys.exit(128 + signal.SIGTERM)


def last_words(world: World, value: BaseException, trace: TracebackType | None) -> None:
    """Tell every other rank what this one ends of, and to end too."""
    sys.stdout.flush()
    sys.stderr.flush()
    watcher = find_watcher()
    rank, host = world.info.rank, world.hosts[world.info.rank]
    name, text = type(value).__name__, first_line(value)
    reason = name if text == name else f"{name}: {text}"
    status = 128 + signal.SIGINT if isinstance(value, KeyboardInterrupt) else 1
    line = raising_line(trace)
    doing.fail(line)
    start = f"rank {rank} on {host} failed at {line}: "
    if watcher is not None and is_of_a_collective(value):
        # torch's error names nobody; ours have told already.
        missing, _ = tell_missing(call_roll(watcher), rank)
        reason = f"in a collective, because {missing}"
        tell(f"ezpz: {start}{reason}")
    end_job(start + reason, status)


def end_job(text: str, status: int) -> bool:
    """Tell every other rank to end; returns, so that this one can end as it likes.

    Args:
        text: Why; one of the others prints it.
        status: The exit status of the others.

    Returns:
        Whether they were told, by this rank or one before it.
    """
    global _failed
    watcher = find_watcher()
    if watcher is None or watcher.lost:
        return False
    _failed = True
    board = watcher.board

    def end() -> None:
        store = board.reach()
        store.compare_set(_left(board.rank), "", text)
        if store.add("ended", 1) == 1:  # else who came first has told all
            teller = 0 if board.rank != 0 else 1
            # This rank too: its watcher is not to notice the end of the store.
            everybody = range(board.size)
            board.post(store, "end", everybody, text=text, status=status, teller=teller)
        elif board.rank != 0 or not watcher.ending.wait(_SAYING / 2):
            return
        # The server's process is rank 0, or may be ended by this one's end.
        time.sleep(_READING)

    return _said(board, end)


def leave_word(text: str) -> None:
    """Leave a note of why this rank goes, for those who will look for it."""
    watcher = find_watcher()
    if watcher is None or watcher.lost:
        return
    board = watcher.board
    # The first reason is the true one: what follows is the way out.
    _said(board, lambda: board.reach().compare_set(_left(board.rank), "", text))


def _said(board: Board, say: Callable[[], object]) -> bool:
    try:
        within(_SAYING, say)
    except LOST as error:
        logger.debug("rank %d could not tell the others: %s", board.rank, error)
        return False
    return True


def _left(rank: int) -> str:
    return f"left/{rank}"
