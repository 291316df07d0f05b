"""Structlog processors: they add to an event, and render it as a line.

Each is a function ``(logger, method_name, event_dict) -> event_dict``, as any of structlog's own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
import structlog
from structlog.typing import EventDict, Processor

from ezpz_topo import redact

from ._context import NOW, RankInfo
from ._text import to_plain

_USUAL: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""What every record has."""

_FIRST: Final = ("time", "level", "logger", "event", "rank", "host", "step")


def get_log_level(env: Mapping[str, str], *, rank: int) -> int:
    """Return the level from which a rank logs, as one of `logging`'s numbers.

    Raises:
        ValueError: ``EZPZ_LOG_LEVEL`` is no level.
    """
    level = parse_level(env.get("EZPZ_LOG_LEVEL") or "INFO", "EZPZ_LOG_LEVEL")
    return level_of_rank(level, env, rank)


def level_of_rank(level: int, env: Mapping[str, str], rank: int) -> int:
    """Return the level of this rank's terminal, where rank 0's is ``level``."""
    all_ranks = env.get("LOG_FROM_ALL_RANKS", "0").lower() not in ("", "0", "false", "no")
    if rank == 0 or all_ranks:
        return level
    return max(level, logging.WARNING)


def parse_level(value: str | int, source: str) -> int:
    """Return one of `logging`'s numbers; ``source`` names the value in the error."""
    if isinstance(value, int):
        return value
    level = logging.getLevelNamesMapping().get(value.upper())
    if level is None:
        raise ValueError(
            f"{source}={value.upper()!r}; expected one of DEBUG, INFO, WARNING, ERROR, CRITICAL"
        )
    return level


def wants_json(env: Mapping[str, str]) -> bool:
    """Return whether ``EZPZ_LOG_FORMAT`` is json.

    Raises:
        ValueError: It is no format.
    """
    name = env.get("EZPZ_LOG_FORMAT", "").lower()
    if name not in ("", "console", "json"):
        raise ValueError(f"EZPZ_LOG_FORMAT={name!r}; expected console (the default) or json")
    return name == "json"


class RankAdder:
    """Adds this process's rank and host, and the step that a `History` recorded last."""

    def __init__(self, place: RankInfo) -> None:
        self._place = place

    def __call__(self, _logger: Any, _method_name: str, event_dict: EventDict) -> EventDict:
        for name, own in (("rank", self._place.rank), ("host", self._place.host)):
            if event_dict.get(name, own) != own:  # a field about another rank
                event_dict[f"{name}_"] = event_dict[name]
            event_dict[name] = own
        if NOW.step is not None:
            event_dict.setdefault("step", NOW.step)
        return event_dict


def add_extra(_logger: Any, _method_name: str, event_dict: EventDict) -> EventDict:
    """Add what a record of the standard library was given as ``extra``."""
    record = event_dict.get("_record")
    if record is not None:
        event_dict["event"] = event_dict["event"].rstrip("\n")
        for name, value in record.__dict__.items():
            if name not in _USUAL:
                event_dict.setdefault(name, value)
    return event_dict


def add_logger_name(logger: Any, _method_name: str, event_dict: EventDict) -> EventDict:
    """Add the name of the logger, if it has one."""
    record = event_dict.get("_record")
    name = logger.name if record is None else record.name
    if name:
        event_dict["logger"] = name
    return event_dict


def make_plain(_logger: Any, _method_name: str, event_dict: EventDict) -> EventDict:
    """Make all values numbers, strings, lists or dicts: one that cannot be shown ends nothing."""
    return {name: to_plain(value) for name, value in event_dict.items()}


def redact_secrets(_logger: Any, _method_name: str, event_dict: EventDict) -> EventDict:
    """Replace credentials by ``***``."""
    redacted: EventDict = redact(event_dict)
    return redacted


def remove_repeated_step(_logger: Any, _method_name: str, event_dict: EventDict) -> EventDict:
    """Remove the step where the event is a summary of `History.update`, which begins with it."""
    if str(event_dict["event"]).startswith(f"step={event_dict.get('step')} "):
        del event_dict["step"]
    return event_dict


def move_further_lines(_logger: Any, _method_name: str, event_dict: EventDict) -> EventDict:
    """Put the further lines of an event below its fields."""
    first, newline, rest = str(event_dict["event"]).partition("\n")
    if newline:
        event_dict["event"] = first
        event_dict["stack"] = "\n".join(filter(None, [rest, event_dict.get("stack")]))
    return event_dict


def remove_single_rank(_logger: Any, _method_name: str, event_dict: EventDict) -> EventDict:
    """Remove rank and host, which are needless with one rank."""
    event_dict.pop("rank", None)
    event_dict.pop("host", None)
    return event_dict


def order_fields(_logger: Any, _method_name: str, event_dict: EventDict) -> EventDict:
    """Put time, level, logger, event, rank, host and step before the other fields."""
    first = {name: event_dict[name] for name in _FIRST if name in event_dict}
    return {**first, **event_dict}


def dump_json(event_dict: EventDict, **_options: Any) -> str:
    """Serialize for `structlog.processors.JSONRenderer`."""
    return orjson.dumps(event_dict).decode()


def make_chain(place: RankInfo, more: Sequence[Processor] = ()) -> list[Processor]:
    """Return the processors of every event, before it is rendered."""
    return [
        structlog.contextvars.merge_contextvars,
        add_extra,
        add_logger_name,
        structlog.stdlib.add_log_level,
        RankAdder(place),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        *more,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    ]


def make_formatter(
    chain: Sequence[Processor], place: RankInfo, *, as_json: bool, colors: bool
) -> logging.Formatter:
    """Return a formatter that renders structlog's events and the standard library's records."""
    processors: list[Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        make_plain,
        redact_secrets,
    ]
    if as_json:
        processors += [order_fields, structlog.processors.JSONRenderer(serializer=dump_json)]
    else:
        if place.world_size == 1:
            processors.append(remove_single_rank)
        processors += [
            remove_repeated_step,
            move_further_lines,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False, key="time"),
            structlog.dev.ConsoleRenderer(
                colors=colors,
                sort_keys=False,
                timestamp_key="time",
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ]
    return structlog.stdlib.ProcessorFormatter(processors=processors, foreign_pre_chain=chain)
