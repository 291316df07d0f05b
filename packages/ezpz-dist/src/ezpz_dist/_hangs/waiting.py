"""The part of a collective that waits for other ranks: named, timed, and explained if it fails."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ezpz_dist._errors import CollectiveError, HangError, LostRankError
from ezpz_dist._ranks import fold
from ezpz_dist._world import World, is_forked

from . import doing
from .roll_call import RollCall, call_roll
from .standing import calling_line
from .watcher import find_watcher

_SPIN = 50e-6
_POLL = 1e-3

_SIGNS = ("/gloo/", "NCCL", "oneCCL", "Operation timed out", "Connection closed by peer")
"""Words in the errors of collectives; gloo raises a plain RuntimeError, with its file's name."""

_LINES = 16
"""Ranks, or groups of ranks at one line, that a message lists."""


@contextmanager
def waiting(
    what: str, world: World | None, members: Collection[int] | None = None
) -> Iterator[None]:
    """Say what this rank waits for, so that others can be told; explain a failure of torch's.

    Inside, a RuntimeError of torch.distributed (a time-out, a closed connection) becomes a
    `HangError` or `LostRankError` that names the missing ranks, their hosts and lines.

    Args:
        what: The operation as a reader of the error wants it: ``"all_reduce(float32 [3, 2])"``.
        world: None or a world of one: nothing happens.
        members: The ranks that take part, of which one can be missing; None: all.

    Raises:
        CollectiveError: This process is a rank's forked child.
    """
    if world is None or world.info.world_size == 1:
        yield
        return
    if is_forked():
        raise CollectiveError(
            f"{what} at {calling_line()} in a process that rank {world.info.rank} has forked, such "
            "as a worker of a data loader: it would take its parent's part; expected it in the "
            "process that called setup_torch"
        )
    doing.enter(what)
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not is_of_a_collective(error):
            raise
        raise explain(error, what, world, time.monotonic() - start, members) from error
    finally:
        doing.leave()


def finish(
    work: dist.Work,
    timeout: float | None,
    what: str,
    world: World,
    *,
    members: Collection[int] | None = None,
    where: torch.device | None = None,
) -> None:
    """Wait for an asynchronous operation of torch's, at most so long. Use it inside `waiting`.

    Args:
        work: What an ``async_op=True`` call returned.
        timeout: Seconds; None: the group's own.
        what: The operation, as for `waiting`.
        world: The world.
        members: The ranks that take part; None: all.
        where: The device of its tensors; None: that of the world's backend.

    Raises:
        HangError: It is not done after ``timeout`` seconds; names the ranks that have not come.
    """
    if timeout is None:
        work.wait()
    elif (where or world.on_host).type == "cpu":
        work.wait(timedelta(seconds=timeout))
    else:
        # Other backends' wait only queues a wait on the device's stream.
        start = time.monotonic()
        while not work.is_completed():
            waited = time.monotonic() - start
            if waited > timeout:
                late = TimeoutError(f"not done after {timeout:g} s")
                raise explain(late, what, world, waited, members)
            time.sleep(_SPIN if waited < _POLL else _POLL)
        work.wait()


def is_of_a_collective(error: BaseException) -> bool:
    """Say whether an error is torch.distributed's word for: somebody did not come, or has gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def explain(
    error: BaseException,
    what: str,
    world: World,
    waited: float,
    members: Collection[int] | None = None,
) -> CollectiveError:
    """Return the error that names who is missing, where torch's names nobody.

    Args:
        error: What torch raised.
        what: What this rank was doing.
        world: The world.
        waited: Seconds since it began to.
        members: The ranks that take part; None: all.
    """
    rank, host = world.info.rank, world.hosts[world.info.rank]
    start = f"{what} at {calling_line()} on rank {rank} ({host}) failed after {waited:.1f} s: "
    watcher = find_watcher()
    if watcher is None:
        return CollectiveError(f"{start}{first_line(error)}")
    call = call_roll(watcher)
    if members is not None:
        call = call.among({*members, rank})
    text, missing = tell_missing(call, rank, what)
    kind = LostRankError if set(missing) & set(call.gone()) else HangError
    return kind(f"{start}{text} ({first_line(error)})", missing)


def tell_missing(call: RollCall, rank: int, what: str = "") -> tuple[str, list[int]]:
    """Say who is not where this rank is, and where they are instead.

    Args:
        call: What a roll call found.
        rank: Who wants to know.
        what: The collective of ours that it waits in; empty: by source line.

    Returns:
        The text, and the ranks it is about.
    """
    mine = call.standings[rank]
    away = [
        standing
        for standing in call.standings.values()
        if standing.rank != rank
        and (
            standing.doing != what
            if what
            else (standing.line, standing.collectives) != (mine.line, mine.collectives)
        )
    ]
    named = list(call.silent.items())[:_LINES]
    parts = [f"rank {one} on {call.hosts[one]} {fate}" for one, fate in named]
    if len(call.silent) > _LINES:
        parts.append(f"{len(call.silent)} ranks in all do not answer: {fold(call.silent)}")
    places: dict[str, list[int]] = {}
    for standing in away:
        place = str(standing).partition(": ")[2]
        if not what and standing.collectives != mine.collectives:
            # Not in one of ours: torch's own tell whether they took different branches.
            theirs, my_own = ("".join(each.collectives) or "none" for each in (standing, mine))
            place += f" (its last collective: {theirs}; here: {my_own})"
        places.setdefault(place, []).append(standing.rank)
    for place, ranks in sorted(places.items(), key=lambda item: len(item[1]))[:_LINES]:
        if len(ranks) == 1:
            parts.append(f"rank {ranks[0]} on {call.standings[ranks[0]].host} stands at {place}")
        else:
            parts.append(f"ranks {fold(ranks)} stand at {place}")
    if not parts:
        return "every rank answers and waits in the same place: the network, or a device", []
    return "; ".join(parts), sorted([*call.silent, *(standing.rank for standing in away)])


def first_line(error: BaseException) -> str:
    """Return what an error says, without the traces that torch appends."""
    line = str(error).strip().partition("\n")[0]
    # gloo's begin with the source file of the machine that built it, and end with advice.
    line = line.partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\] |\[[^]]*\.\w+:\d+\] ", "", line) or type(error).__name__
