"""A bound for a training step: past it all ranks' stacks are written down and the job ends."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypeVar

from ezpz_dist._ranks import fold
from ezpz_dist._store import LOST, within
from ezpz_dist._world import find_world

from .doing import last_held
from .ending import end_job
from .roll_call import RollCall, call_roll
from .standing import Standing, describe_frames, main_frame, whole_stack
from .watcher import find_watcher, tell

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMED_OUT = 124
"""The exit status of all ranks, as timeout(1) has it."""

_OVERDUE = 15.0
"""Seconds beyond the time-out after which the stacks of a rank whose Python threads cannot run
(native code keeps the interpreter's lock) are dumped from outside of Python."""

_HEARING = 0.5
"""Seconds for this rank's watcher to read what it was told before the store went."""


class Watch(AbstractContextManager["Watch"]):
    """See `watch`."""

    def __init__(self, step_timeout: float, report: str | os.PathLike[str] | None = None) -> None:
        """Prepare a watch; it begins as the block is entered."""
        if not step_timeout > 0:
            raise ValueError(f"step_timeout {step_timeout}; expected seconds above 0")
        self._timeout = step_timeout
        self._report = None if report is None else Path(report)
        self._last = 0.0
        self._steps = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def step(self) -> None:
        """Say that a step is done: the time begins anew. It costs a tenth of a microsecond."""
        self._last = time.monotonic()
        self._steps += 1

    def over(self, steps: Iterable[T]) -> Iterator[T]:
        """Yield from a loader or a range, each round being a step."""
        for each in steps:
            yield each
            self.step()

    def __enter__(self) -> Self:
        """Begin."""
        self._last = time.monotonic()
        self._over.clear()
        self._thread = threading.Thread(target=self._run, name="ezpz-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End; nothing is watched any more."""
        self._over.set()
        faulthandler.cancel_dump_traceback_later()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            seen = max(self._last, last_held())
            left = seen + self._timeout - time.monotonic()
            if left <= 0:
                self._end()
                return
            # The descriptor: what stands for sys.stderr in a notebook has none.
            faulthandler.dump_traceback_later(left + _OVERDUE, exit=True, file=2)
            if self._over.wait(left):
                return

    def _end(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        start = (
            f"no step for {self._timeout:g} s (steps done on this rank: {self._steps}); "
            "where every rank stands"
        )
        watcher, world = find_watcher(), find_world()
        if watcher is None or world is None:
            line, inside = describe_frames(main_frame())
            alone = Standing(0, "this host", line, inside, stack=whole_stack(main_frame()))
            self._write(f"ezpz: {start}\n{picture(RollCall({0: alone}))}")
            _exit()
        call = call_roll(watcher, stack=True)
        board = watcher.board
        try:
            claim = "watch/report"
            mine = str(board.rank)
            first = within(1.0, lambda: board.reach().compare_set(claim, "", mine).decode() == mine)
        except LOST:
            # Rank 0 has gone with the store, as it does once another rank has told it all.
            # Where none was heard to, better twice than not at all.
            first = not watcher.ending.wait(_HEARING)
        if first:
            self._write(f"ezpz: rank {board.rank}: {start}\n{picture(call)}")
        end_job(f"no step for {self._timeout:g} s on rank {board.rank}", TIMED_OUT)
        _exit()

    def _write(self, text: str) -> None:
        tell(text)
        if self._report is not None:
            try:
                self._report.write_text(f"{text}\n")
            except OSError as error:
                tell(f"ezpz: the report could not be written to {self._report}: {error}")


def watch(step_timeout: float, report: str | os.PathLike[str] | None = None) -> Watch:
    """Watch a training loop: if a step takes too long, say where all ranks stand and end the job.

    Once one rank has waited for ``step_timeout`` seconds, the stacks of all are written to
    standard error as one report, equal ones once, and every rank ends with exit status 124. The
    time that ranks spend at `breakpoint` does not count.

    >>> with watch(step_timeout=600) as watching:
    ...     for step in range(3):
    ...         watching.step()                  # or: for batch in watching.over(loader)

    Args:
        step_timeout: Seconds for a step; the first one may have to load and compile.
        report: A file for the report too, such as one on a shared file system.

    Raises:
        ValueError: ``step_timeout`` is not above 0.
    """
    return Watch(step_timeout, report)


def picture(call: RollCall) -> str:
    """Return a roll call as people read it: equal stacks once, the fewest ranks first."""
    alike: dict[tuple[str, tuple[str, ...]], list[Standing]] = {}
    for standing in call.standings.values():
        place = str(standing).partition(": ")[2]
        alike.setdefault((place, standing.stack), []).append(standing)
    parts = []
    for rank, fate in call.silent.items():
        parts.append(f"rank {rank} on {call.hosts[rank]} {fate}")
    for (place, stack), standings in sorted(alike.items(), key=lambda item: len(item[1])):
        ranks = fold(standing.rank for standing in standings)
        hosts = sorted({standing.host for standing in standings})
        where = ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
        plural = "s" if len(standings) > 1 else ""
        parts.append("\n".join([f"rank{plural} {ranks} on {where}: {place}", *_indented(stack)]))
        parts.extend(
            f"    last collectives of rank {standing.rank}: {'; '.join(standing.collectives)}"
            for standing in standings[:1]
            if standing.collectives
        )
    return "\n".join(parts)


def _indented(stack: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in stack]


def _exit() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed, or nobody reads it
    os._exit(TIMED_OUT)
