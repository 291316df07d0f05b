"""The time of a function or a block, said by one rank."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

from ezpz_dist._world import find_world
from ezpz_topo import get_rank

from .timers import Timer, in_words

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def timed(
    name: str,
    rank: int | None = None,
    *,
    level: int = logging.INFO,
    log: logging.Logger = logger,
) -> Iterator[Timer]:
    """Log how long a block took, on one rank; yields its `Timer`.

    The device is waited for before and after, on that rank alone: the time is that of the
    work, not of putting it into a queue.

    Args:
        name: What to call it.
        rank: Which rank measures and logs; default: rank 0.
        level: A level of `logging`.
        log: Where to.
    """
    mine = _my_rank()
    timer = Timer(name, enabled=mine == (rank or 0))
    failed = ""
    try:
        with timer:
            yield timer
    except BaseException as error:
        failed = f" and raised {type(error).__name__}"
        raise
    finally:
        if timer.enabled and timer.timing.count:
            log.log(
                level, "%s took %s on rank %d%s", name, in_words(timer.timing.last), mine, failed
            )


def timeitlogit(
    rank: int | None = None, *, level: int = logging.INFO
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Log how long each call of a function takes, on one rank.

    ``@timeitlogit()`` logs on rank 0. ``@timeitlogit(rank=ezpz.get_rank())`` names each rank
    itself, so that all of them log; a logger that shows rank 0's lines only shows one.

    The line comes from the logger of the function's module. The device is waited for before
    and after, on the rank that logs. Of an ``async def`` the time until it returns is taken.

    Args:
        rank: Which rank measures and logs; default: rank 0.
        level: A level of `logging`.

    Raises:
        TypeError: The function is a generator: its call ends before its work begins.
    """
    if callable(rank):
        raise TypeError(
            f"@timeitlogit on {getattr(rank, '__name__', rank)}; expected @timeitlogit()"
        )

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = getattr(function, "__qualname__", repr(function))
        log = logging.getLogger(function.__module__)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"timeitlogit of the generator {name}; expected a function: a generator's call "
                "returns before its work begins; time what consumes it, in `with timed(...)`"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
                with timed(name, rank, level=level, log=log):
                    return await cast("Callable[P, Awaitable[Any]]", function)(*args, **kwargs)

            return cast("Callable[P, R]", awaited)

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if _my_rank() != (rank or 0):
                return function(*args, **kwargs)
            with timed(name, rank, level=level, log=log):
                return function(*args, **kwargs)

        return called

    return decorate


def _my_rank() -> int:
    world = find_world()
    return get_rank() if world is None else world.info.rank
