"""The standard library's handlers that others have put there: they hear our events too."""

from __future__ import annotations

import inspect
import logging
import os
from typing import TextIO

from .lines import Event, ExcInfo

MARK = "ezpz_obs_event"
"""The attribute of a record that was made of an event of ours, and holds it."""


class OurHandler(logging.Handler):
    """What `configure_logs` puts on the root logger; never told of our own events."""


def has_listeners(logger: logging.Logger) -> bool:
    """Say whether any handler but ours would hear what this logger is told."""
    at: logging.Logger | None = logger
    while at is not None:
        for handler in at.handlers:
            if not isinstance(handler, OurHandler):
                return True
        if not at.propagate:
            return False
        at = at.parent
    return False


def is_shown_by_others(logger: logging.Logger, level: int, stream: TextIO | None) -> bool:
    """Say whether another's handler writes what this logger is told to that very stream."""
    return stream is not None and any(
        level >= handler.level and _writes_to(handler, stream) for handler in _handlers(logger)
    )


def tell(
    logger: logging.Logger, event: Event, exc_info: ExcInfo | None, stream: TextIO | None
) -> None:
    """Give an event to the handlers of others, as a record of this logger.

    Args:
        logger: Whose handlers, filters and level count, and of the loggers above its handlers.
        event: What to tell; the record's message has its fields too.
        exc_info: What failed.
        stream: Our terminal's: who writes there would show the line a second time.
    """
    if not logger.isEnabledFor(event.level):
        return
    fields = "".join(f" {name}={_show(value)}" for name, value in event.fields.items())
    path, line, function = _caller()
    record = logger.makeRecord(
        logger.name, event.level, path, line, event.text + fields, (), exc_info, function,
        sinfo=event.stack,
    )  # fmt: skip
    setattr(record, MARK, event)
    if not logger.filter(record):
        return
    for handler in _handlers(logger):
        if event.level >= handler.level and not _writes_to(handler, stream):
            handler.handle(record)


def is_ours(record: logging.LogRecord) -> bool:
    """Say whether a record was made of an event of this process that we have shown already.

    A user's queue may bring it back to the root logger; one from another process is news.
    """
    return hasattr(record, MARK) and record.process == os.getpid()


def _handlers(logger: logging.Logger) -> list[logging.Handler]:
    found: list[logging.Handler] = []
    at: logging.Logger | None = logger
    while at is not None:
        found += [handler for handler in at.handlers if not isinstance(handler, OurHandler)]
        at = at.parent if at.propagate else None
    return found


def _writes_to(handler: logging.Handler, stream: TextIO | None) -> bool:
    return (
        stream is not None
        and isinstance(handler, logging.StreamHandler)
        and handler.stream is stream
    )


def _show(value: object) -> str:
    try:
        return value if isinstance(value, str) else repr(value)
    # Somebody's __repr__; a log line must not end a training.
    except Exception:  # noqa: BLE001
        return f"<{type(value).__name__}>"


def _caller() -> tuple[str, int, str]:
    """Return file, line and function of the nearest frame outside this room and structlog."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("ezpz_obs._logs", "structlog")):
            return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return "(unknown file)", 0, "(unknown function)"
