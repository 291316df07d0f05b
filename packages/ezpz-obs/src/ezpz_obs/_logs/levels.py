"""From which level a rank logs, and in which format: what the environment says."""

from __future__ import annotations

import logging
from collections.abc import Mapping

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_OTHER_NAMES = {"WARN": "WARNING", "FATAL": "CRITICAL"}


def get_log_level(env: Mapping[str, str], *, rank: int) -> int:
    """Return the level from which a rank logs, as one of `logging`'s numbers.

    Raises:
        ValueError: ``EZPZ_LOG_LEVEL`` is no level.
    """
    return for_rank(to_level(env.get("EZPZ_LOG_LEVEL") or "INFO", "EZPZ_LOG_LEVEL"), env, rank)


def for_rank(level: int, env: Mapping[str, str], rank: int) -> int:
    """Return the level for this rank's terminal, where rank 0's is ``level``."""
    if rank == 0 or env.get("LOG_FROM_ALL_RANKS", "0").lower() not in ("", "0", "false", "no"):
        return level
    return max(level, logging.WARNING)


def to_level(value: str | int, said_by: str) -> int:
    """Return a level as a number.

    Args:
        value: A name, in whatever case, or a number.
        said_by: Who said it, for the error.

    Raises:
        ValueError: It is none.
    """
    if isinstance(value, int):
        return value
    name = _OTHER_NAMES.get(value.upper(), value.upper())
    if name not in LEVELS:
        raise ValueError(f"{said_by}={name!r}; expected one of {', '.join(LEVELS)}")
    level: int = getattr(logging, name)
    return level


def wants_json(env: Mapping[str, str]) -> bool:
    """Say whether the terminal's lines are to be JSON.

    Raises:
        ValueError: ``EZPZ_LOG_FORMAT`` is no format.
    """
    said = env.get("EZPZ_LOG_FORMAT", "").lower()
    if said not in ("", "console", "json"):
        raise ValueError(f"EZPZ_LOG_FORMAT={said!r}; expected console (the default) or json")
    return said == "json"
