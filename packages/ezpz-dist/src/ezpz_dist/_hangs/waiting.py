"""The part of a collective that waits for other ranks: named, timed, and explained if it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ezpz_dist._world import World


@contextmanager
def waiting(what: str, world: World | None) -> Iterator[None]:
    """Say what this rank waits for, so that others can be told; explain a failure of torch's.

    Inside, a RuntimeError of torch.distributed (a time-out, a closed connection) becomes a
    `HangError` or `LostRankError` that names the missing ranks, their hosts and lines.

    Args:
        what: The operation as a reader of the error wants it: ``"all_reduce(float32 [3, 2])"``.
        world: None or a world of one: nothing happens.
    """
    yield


def finish(work: dist.Work, timeout: float | None, what: str, world: World) -> None:
    """Wait for an asynchronous operation of torch's, at most so long. Use it inside `waiting`.

    Args:
        work: What an ``async_op=True`` call returned.
        timeout: Seconds; None: the group's own.
        what: The operation, as for `waiting`.
        world: The world.

    Raises:
        HangError: It is not done after ``timeout`` seconds; names the ranks that have not come.
    """
    work.wait()
