"""Take the group down once, on whatever way a rank ends."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

import torch.distributed as dist

from ._group import Asked
from ._hangs import ending, watcher
from ._hangs.standing import calling_line
from ._meeting.frameworks import leave_frameworks
from ._store import LOST, arrived, within
from ._world import World, enter, find_world, finish_all, is_forked, mark_forked

logger = logging.getLogger(__name__)

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@dataclass(frozen=True, slots=True)
class Made:
    """What there is to undo, and what was asked for."""

    asked: Asked
    exported: dict[str, str | None]
    """What the variables that we set were before; None: not set."""
    hooks: tuple[Hook, Hook]
    """``sys.excepthook`` before, and as torch and we have left it."""
    is_whole: bool = False
    """Whether set-up came to its end."""


_made: Made | None = None
_left: tuple[Hook, Hook] | None = None
_forks_are_seen = False

_retired: list[dist.ProcessGroup | None] = []
"""Groups that `cleanup` destroyed, kept until they can be dropped without harm.

A DDP model holds its group too. Were it the last to hold it, the group's destructor would
join gloo's thread with the GIL held, while that thread waits for the GIL to drop the tensor
of the last collective: a deadlock (torch 2.13; within 150 set-ups of two ranks on two
cores). Python's own reference drops the group without the GIL.
"""


_LAST_TENSOR = 0.1
"""Seconds in which gloo's threads get the GIL, to drop the tensor of the last collective.

A script's model can outlive `cleanup` and hold the group until the interpreter ends; a thread
that still waits for the GIL then aborts the process ("terminate called without an active
exception"; torch 2.13, 15 of 50 launches of four ranks on two cores, and none of 10 with it).
"""

_FAREWELL = 5.0
"""Seconds that rank 0, whose process may hold the store, waits at clean-up for the others."""


def find_made() -> Made | None:
    """Return what `cleanup` will undo; None where there is nothing."""
    return _made


def to_undo(made: Made) -> None:
    """Have `cleanup` undo this, at exit at the latest. For set-up."""
    global _made, _forks_are_seen
    _made = made
    atexit.register(_retired.clear)
    atexit.register(cleanup)
    if multiprocessing.parent_process() is not None:
        # Python < 3.14 ends a process that multiprocessing has forked without calling `atexit`'s.
        multiprocessing.util.Finalize(None, _when_the_function_ends, exitpriority=0)
    if not _forks_are_seen:
        os.register_at_fork(after_in_child=_in_forked_child)
        _forks_are_seen = True


def mark_whole() -> None:
    """Say that set-up has come to its end."""
    global _made
    if _made is not None:
        _made = replace(_made, is_whole=True)


def before_failure() -> Hook:
    """Return ``sys.excepthook``, without what a set-up that failed has left there."""
    global _left
    if _left is not None and sys.excepthook is _left[1]:
        sys.excepthook = _left[0]
    _left = None
    return sys.excepthook


def left_by_failure(before: Hook) -> None:
    """Say what ``sys.excepthook`` was before a set-up that failed. For set-up."""
    global _left
    _left = before, sys.excepthook


def drop_retired() -> None:
    """Drop the groups that were destroyed."""
    _retired.clear()


def cleanup() -> None:
    """Destroy the process group that `setup_torch` made; harmless when there is none.

    Collective: every rank calls this. It also runs at exit, so that a rank that fails
    closes its connections and the others learn of it.

    Raises:
        CheckpointError: A check-point that was written in the background has failed; the
            rest of clean-up is done.
    """
    global _made
    world, made = find_world(), _made
    if world is None or made is None or is_forked():
        return
    line = calling_line()
    trouble = finish_all()
    ending.leave_word("its script ended" if line == "?" else f"cleanup() at {line}")
    enter(None)
    _made = None
    atexit.unregister(cleanup)
    # Whatever fails, the rest is done; the last comes first.
    with ExitStack() as rest:
        rest.callback(_restore, made)
        rest.callback(_leave, world)
        rest.callback(_destroy_group, world)
        rest.callback(leave_frameworks)
        if made.asked.degrees is not None:
            import ezpz_tp  # noqa: PLC0415  # only where its groups are used

            rest.callback(ezpz_tp.destroy_tensor_parallel)
        if trouble is not None:
            raise trouble


def _when_the_function_ends() -> None:
    """End as a script does, where the rank is a function that multiprocessing runs."""
    error = sys.exc_info()[1]
    world = find_world()
    if world is not None and error is not None and not isinstance(error, SystemExit):
        ending.last_words(world, error, error.__traceback__)
    cleanup()


def _destroy_group(world: World) -> None:
    if dist.is_initialized():
        _retired.append(dist.group.WORLD)
        dist.destroy_process_group()
        if world.info.world_size > 1:
            time.sleep(_LAST_TENSOR)


def _restore(made: Made) -> None:
    """Undo what this process and its environment were changed in."""
    before, ours = made.hooks
    if sys.excepthook is ours:
        # Torch's own too: under another set-up's they would hold back what we say.
        sys.excepthook = before
    for name, value in made.exported.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _leave(world: World) -> None:
    """End the watcher; on rank 0 wait a moment for those of the others."""
    own = watcher.find_watcher()
    if own is None:
        return
    ending.release_sigterm()
    watcher.forget()
    stay = world.info.rank == 0 and not ending.has_failed()

    def leave() -> None:
        own.stop(world.store)
        if not own.lost and world.store.add("left", 1) == world.info.world_size:
            world.store.set("all left", "")
        if stay and not arrived(world.store, ["all left"], _FAREWELL):
            # A connection that breaks under a sleeping watcher costs a page of torch's warnings.
            own.board.post(world.store, "closed")
            time.sleep(_LAST_TENSOR)

    try:
        within(_FAREWELL + 1.0 if stay else 1.0, leave)
    except LOST as error:
        logger.debug("rank %d leaves before others: %s", world.info.rank, error)


def _in_forked_child() -> None:
    """Leave the world to the parent: a child must neither end the job nor close the group."""
    if _made is not None:
        mark_forked()
        ending.release_sigterm()
        if sys.excepthook is _made.hooks[1]:
            sys.excepthook = _made.hooks[0]
