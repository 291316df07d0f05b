"""Loggers that know their rank: rank 0 speaks, the others from WARNING."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Self, TextIO, cast

import structlog

from .lines import Event, ExcInfo, to_exc_info, traceback_text
from .listeners import has_listeners, tell
from .output import Output, make_output, process_output

_NUMBERS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def get_logger(
    name: str | None = None,
    *,
    env: Mapping[str, str] | None = None,
    file: TextIO | None = None,
) -> structlog.typing.FilteringBoundLogger:
    """Return a structlog logger for this rank; nothing global is configured.

    Rank 0 logs from ``EZPZ_LOG_LEVEL`` (default INFO); the other ranks from WARNING, so
    that real errors are never hidden, or like rank 0 with ``LOG_FROM_ALL_RANKS=1``. Lines name
    rank and host in a world of several ranks, and the step that a `History` recorded last.
    ``EZPZ_LOG_FORMAT=json`` makes them JSON. Colours are used on a terminal only, and never
    with ``NO_COLOR``. What cannot be written, because standard error is closed or its disk
    full, is no error.

    Handlers that somebody has put on the standard library's logger of this name, or above it,
    hear the events too, as far as its level allows.

    Args:
        name: Shown on every line; by custom ``__name__``.
        env: The environment to read; default ``os.environ``. Such a logger, and one with a
            ``file``, is not changed by `configure_logs`.
        file: Where lines go; default standard error, as it is at each call.

    Raises:
        ValueError: ``EZPZ_LOG_LEVEL`` is no level, or ``EZPZ_LOG_FORMAT`` no format.
        ezpz_topo.TopoError: The rank cannot be known.

    >>> import sys
    >>> logger = get_logger("train", env={"EZPZ_LOG_FORMAT": "json"}, file=sys.stdout)
    >>> logger.info("saved", path="step-12")  # doctest: +ELLIPSIS
    {"time":"...","level":"info","logger":"train","event":"saved","rank":0,...,"path":"step-12"}
    """
    if env is None and file is None:
        output = process_output()
    else:
        output = make_output(os.environ if env is None else env, file)
    # Structlog's protocol is what it has, by way of a class that is made at import.
    logger: structlog.typing.FilteringBoundLogger = Logger(Channel(output, name), _PROCESSORS, {})
    return logger


_PROCESSORS: tuple[structlog.typing.Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.processors.StackInfoRenderer(),
)


class Channel:
    """What a logger speaks through: an output, and the standard library's logger of its name."""

    __slots__ = ("name", "output", "standard")

    def __init__(self, output: Output, name: str | None) -> None:
        self.output: Output = output
        self.name: str | None = name
        self.standard: logging.Logger = logging.getLogger(name)

    def wants(self, level: int) -> bool:
        """Say whether anybody hears events of this level."""
        return self.output.level <= level or (
            self.standard.isEnabledFor(level) and has_listeners(self.standard)
        )

    def send(self, event: Event, exc_info: object = None) -> None:
        """Give an event, with what ``exc_info=`` was given, to whoever wants to hear it."""
        found = None
        if exc_info:
            found = to_exc_info(exc_info)
            event.exception = traceback_text(exc_info)
        self.give(event, found)

    def give(
        self, event: Event, found: ExcInfo | None, *, on_terminal: Event | None = None
    ) -> None:
        """Give an event that has its traceback to whoever wants to hear it.

        Args:
            event: What to say.
            found: The exception that it tells of.
            on_terminal: What the terminal shows instead.
        """
        self.output.send(event, on_terminal=on_terminal)
        if has_listeners(self.standard):
            tell(self.standard, event, found, self.output.terminal.stream())

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Self:
        """Return itself: models with a logger in them are copied."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Channel], tuple[str | None]]:
        """Let a spawned process have the logger of the same name, by its own environment."""
        return _channel, (self.name,)


def _channel(name: str | None) -> Channel:
    return Channel(process_output(), name)


_Base: Any = structlog.make_filtering_bound_logger(logging.NOTSET)


class Logger(_Base):  # type: ignore[misc]  # structlog makes the class at run time
    """Structlog's logger, whose level may change: `configure_logs` can come after it."""

    _logger: Channel
    _processors: tuple[structlog.typing.Processor, ...]
    _context: dict[str, Any]

    def _proxy_to_logger(self, method_name: str, event: object = None, /, **fields: Any) -> None:
        """Make an event and send it; also what structlog's asynchronous methods call."""
        level = _NUMBERS[method_name]
        channel = self._logger
        if not channel.wants(level):
            return
        known: dict[str, Any] = {**self._context, **fields}
        exc_info = known.pop("exc_info", None)
        for processor in self._processors:
            # Ours are two of structlog's, which return what they are given.
            known = cast("dict[str, Any]", processor(channel, method_name, known))
        stack = known.pop("stack", None) if "stack_info" in fields else None
        text = event if type(event) is str else str(event)
        channel.send(Event(level, method_name, channel.name, text, known, stack=stack), exc_info)

    def log(self, level: int, event: str, /, *args: Any, **fields: Any) -> None:
        """Log at a level that is given by number."""
        # Levels between two are the lower one's: structlog knows these five.
        name = max(
            (name for name in _NUMBERS if _NUMBERS[name] <= level),
            key=_NUMBERS.__getitem__,
            default="debug",
        )
        getattr(self, name)(event, *args, **fields)

    def is_enabled_for(self, level: int) -> bool:
        """Say whether anybody hears events of this level."""
        return self._logger.wants(level)

    def get_effective_level(self) -> int:
        """Return the level from which events are shown or written to a file."""
        return self._logger.output.level


def _method(name: str) -> Callable[..., None]:
    level = _NUMBERS[name]

    def method(self: Logger, event: str, /, *args: Any, **fields: Any) -> None:
        channel = self._logger
        # The first line of `wants`, without a call: most that is suppressed ends here.
        if channel.output.level > level and not channel.wants(level):
            return
        self._proxy_to_logger(name, _interpolate(event, args) if args else event, **fields)

    method.__name__ = name
    method.__doc__ = f"Log at level {name.upper()}."
    return method


def _interpolate(event: str, args: tuple[Any, ...]) -> str:
    one_mapping = len(args) == 1 and isinstance(args[0], Mapping) and args[0]
    try:
        return event % (args[0] if one_mapping else args)
    # Whatever is wrong with the arguments, they are shown; a log line must not end a training.
    except Exception:  # noqa: BLE001
        return f"{event} {args!r}"


for _name in _NUMBERS:
    setattr(Logger, _name, _method(_name))
for _alias, _name in {"warn": "warning", "fatal": "critical", "msg": "info"}.items():
    setattr(Logger, _alias, getattr(Logger, _name))
