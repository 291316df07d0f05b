"""A breakpoint on one rank, while the others wait."""

from __future__ import annotations

import bdb
import logging
import os
import re
import sys
import time
from collections import Counter
from types import FrameType

from ezpz_dist._errors import HangError, LostRankError
from ezpz_dist._hangs.doing import held
from ezpz_dist._hangs.roll_call import call_roll
from ezpz_dist._hangs.waiting import waiting
from ezpz_dist._hangs.watcher import find_watcher
from ezpz_dist._world import World, current_world
from ezpz_topo import get_hostname, get_rank_info

from .console import open_console
from .debugger import RankPdb

logger = logging.getLogger(__name__)

EVERY = 60.0
"""Seconds after which a rank that waits says so, again and again."""

UNANSWERED = 10
"""Times that the debugged rank may leave a call unanswered before it counts as lost: a native
debugger may hold it, too."""

_FASTEST, _SLOWEST = 0.05, 5.0
"""Seconds between two looks whether it is over."""

_REQUESTS = 2000
"""Looks a second, of all ranks together, that the store's server is given."""

_ENDED = re.compile(r"has (ended|left)")
"""What a roll call says of a rank that comes no more; a stopped one may go on."""

_calls: Counter[tuple[str, int]] = Counter()
"""How often each line has called: the ranks' n-th calls at one line belong together."""


def breakpoint(rank: int = 0) -> None:  # noqa: A001  # the name that was promised
    """Stop one rank in pdb, at this line; the others wait for it, however long that takes.

    Collective: every rank calls this, at the same line. Works in an ``except`` block; the
    command ``pm`` then shows the frames of the exception. The commands are pdb's, and

    - ``c`` lets all ranks go on; ``q`` raises `bdb.BdbQuit`, which ends the job;
    - ``n``, ``s``, ``r`` run this rank alone, and the others go on waiting: type ``release``
      before you step over a collective;
    - ``pm`` looks at the exception that is being handled.

    The terminal is this process's own, or, under ezpz-launch and torchrun on this host, the
    launcher's: Ctrl-C ends the launch as ever. Where there is none (another host, a batch
    job), a command is printed that connects to the debugger from any shell on the rank's host;
    leaving that with Ctrl-D keeps the rank waiting, Ctrl-C interrupts what it computes.

    Where one rank alone calls this (an exception that the others do not have), they run on
    into their next collective and wait there for ``setup_torch(timeout=...)``: give enough to
    look around in. ``PYTHONBREAKPOINT=0`` switches it off, as it does Python's own.

    Args:
        rank: The rank to stop.

    Raises:
        ValueError: There is no such rank; on every rank.
        HangError: The rank to stop did not come here within the time-out.
        LostRankError: It ended while the others waited.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        bdb.BdbQuit: On the stopped rank: ``q``.
    """
    world = current_world("breakpoint()")
    size = 1 if world is None else world.info.world_size
    if not 0 <= rank < size:
        raise ValueError(f"breakpoint(rank={rank}); expected a rank from 0 to {size - 1}")
    if os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    frame = sys._getframe(1)  # noqa: SLF001  # the caller's, as pdb itself finds it
    line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    place = frame.f_code.co_filename, frame.f_lineno
    key = f"breakpoint/{rank}/{line}/{_calls[place]}"
    _calls[place] += 1
    if world is not None and world.info.rank != rank:
        with waiting(f"breakpoint(rank={rank})", world), held():
            _wait(world, rank, key, line)
        return
    exception = sys.exception()
    with waiting(f"pdb, breakpoint(rank={rank})", world if size > 1 else None):
        debugger = _debug(world if size > 1 else None, key, line, frame, exception)
    if debugger.quitting:
        raise bdb.BdbQuit
    if debugger.traces:
        # The last thing: from here on every call is traced.
        sys.settrace(debugger.trace_dispatch)


def _debug(
    world: World | None, key: str, line: str, frame: FrameType, exception: BaseException | None
) -> RankPdb:
    """Take commands on this rank until one of them lets it go on."""
    info = get_rank_info() if world is None else world.info
    host = get_hostname() if world is None else world.hosts[info.rank]
    console = open_console(info, host, line)

    def release() -> None:
        if world is not None:
            world.store.set(f"{key}/over", "")

    prompt = "(Pdb) " if world is None else f"(Pdb rank {info.rank}) "
    debugger = RankPdb(console, prompt, release, exception)
    if world is not None:
        world.store.set(f"{key}/here", console.where)
        debugger.message(
            f"rank {info.rank} on {host}; the others wait: c lets all go on, release the others, "
            "q ends the job"
        )
    if exception is not None:
        debugger.message(f"in handling {exception!r}; pm shows where it was raised")
    debugger.begin(frame)
    return debugger


def _wait(world: World, rank: int, key: str, line: str) -> None:
    """Wait on another rank until the debugged one releases it, or cannot any more."""
    store, size = world.store, world.info.world_size
    # One of those that wait speaks and looks for all.
    speaks = store.add(f"{key}/others", 1) == 1
    # Often enough for a person, and few enough requests for one server.
    pause = min(_SLOWEST, max(_FASTEST, size / _REQUESTS))
    began = said = time.monotonic()
    is_here, unanswered = False, 0
    while not store.check([f"{key}/over"]):
        # Not a wait at the store: signals are served meanwhile.
        time.sleep(pause)
        now = time.monotonic()
        is_here = is_here or store.check([f"{key}/here"])
        if not is_here and now - began > world.timeout:
            raise HangError(
                f"breakpoint(rank={rank}) at {line} on rank {world.info.rank} "
                f"({world.hosts[world.info.rank]}): rank {rank} on {world.hosts[rank]} did not "
                f"come within {world.timeout:g} s; expected every rank to call it at that line; "
                f"{_standing(rank)[0]}",
                [rank],
            )
        if speaks and now - said >= EVERY:
            said = now
            where, answers = _standing(rank)
            unanswered = 0 if answers else unanswered + 1
            if unanswered >= UNANSWERED or (not answers and _ENDED.search(where)):
                store.set(f"{key}/over", f"{where}; the ranks at breakpoint(rank={rank}) waited")
            how = f"debugged at {store.get(f'{key}/here').decode()}" if is_here else "awaited"
            logger.warning(
                "breakpoint(rank=%d) at %s: the other ranks wait for %.0f s; %s, %s",
                rank, line, now - began, where, how,
            )  # fmt: skip
    lost = store.get(f"{key}/over").decode()
    if lost:
        raise LostRankError(f"breakpoint(rank={rank}) at {line}: {lost}", [rank])


def _standing(rank: int) -> tuple[str, bool]:
    """Return where a rank stands, or what became of it, and whether it answered itself."""
    watcher = find_watcher()
    if watcher is None:
        return f"rank {rank} cannot be asked", True
    call = call_roll(watcher)
    if rank in call.standings:
        return str(call.standings[rank]), True
    fate = call.silent.get(rank, "is not known of")
    return f"rank {rank} on {call.hosts.get(rank, '?')} {fate}", False
