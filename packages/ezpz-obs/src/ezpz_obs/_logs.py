"""Loggers that know their rank: rank 0 speaks, the others from WARNING."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO, cast

import structlog

from ezpz_topo import get_rank_info

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def get_logger(
    name: str | None = None,
    *,
    env: Mapping[str, str] | None = None,
    file: TextIO | None = None,
) -> structlog.typing.FilteringBoundLogger:
    """Return a structlog logger for this rank; nothing global is configured.

    Rank 0 logs from ``EZPZ_LOG_LEVEL`` (default INFO); the other ranks from WARNING, so
    that real errors are never hidden, or like rank 0 with ``LOG_FROM_ALL_RANKS=1``. The
    rank is bound to every line in a world of several ranks. Colours are used on a
    terminal only, and never with ``NO_COLOR``.

    Args:
        name: Shown on every line; by custom ``__name__``.
        env: The environment to read; default ``os.environ``.
        file: Where lines go; default standard error, as it is at each call.

    Raises:
        ValueError: ``EZPZ_LOG_LEVEL`` is no level.
        ezpz_topo.TopoError: The rank cannot be known.
    """
    env = os.environ if env is None else env
    info = get_rank_info(env)
    context: dict[str, Any] = {"logger": name} if name else {}
    if info.world_size > 1:
        context["rank"] = info.rank
    logger = structlog.wrap_logger(
        # One write a line: ranks share the terminal, and pieces of lines would mix.
        structlog.WriteLogger(file or cast("TextIO", _Stderr())),
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(
                colors=_colours(env, file),
                # The rich one prints every local variable: pages of them, secrets too.
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(get_log_level(env, rank=info.rank)),
    )
    bound: structlog.typing.FilteringBoundLogger = logger.bind(**context)
    return bound


def get_log_level(env: Mapping[str, str], *, rank: int) -> int:
    """Return the level from which a rank logs, as one of `logging`'s numbers.

    Raises:
        ValueError: ``EZPZ_LOG_LEVEL`` is no level.
    """
    name = (env.get("EZPZ_LOG_LEVEL") or "INFO").upper()
    name = {"WARN": "WARNING", "FATAL": "CRITICAL"}.get(name, name)
    if name not in LEVELS:
        raise ValueError(f"EZPZ_LOG_LEVEL={name!r}; expected one of {', '.join(LEVELS)}")
    level: int = getattr(logging, name)
    if rank == 0 or env.get("LOG_FROM_ALL_RANKS", "0").lower() not in ("", "0", "false", "no"):
        return level
    return max(level, logging.WARNING)


def _colours(env: Mapping[str, str], file: TextIO | None) -> bool:
    stream = file or sys.stderr
    return not env.get("NO_COLOR") and stream is not None and stream.isatty()


class _Stderr:
    """Standard error, looked up at each write: tests and notebooks replace it.

    A process without one (``2>&-``, pythonw) logs nowhere.
    """

    def write(self, text: str) -> int:
        return 0 if sys.stderr is None else sys.stderr.write(text)

    def flush(self) -> None:
        if sys.stderr is not None:
            sys.stderr.flush()
