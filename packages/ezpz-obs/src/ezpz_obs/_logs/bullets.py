"""A nested mapping as a bulleted list: a configuration that one can read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import structlog

from .logger import get_logger


def log_dict_as_bulleted_list(
    d: Mapping[Any, Any],
    name: str | None = None,
    *,
    logger: structlog.typing.FilteringBoundLogger | None = None,
) -> None:
    r"""Log a mapping, such as a configuration, as one event with a line for each value.

    Args:
        d: The mapping; mappings in it are indented below their names.
        name: What to call it; default: the name of its class.
        logger: Which logger; default: this rank's.

    >>> import sys
    >>> log_dict_as_bulleted_list(
    ...     {"lr": 0.1, "model": {"layers": 2}},
    ...     "config",
    ...     logger=get_logger(env={"EZPZ_LOG_FORMAT": "json"}, file=sys.stdout),
    ... )  # doctest: +ELLIPSIS
    {...,"event":"[config]:\n- lr=0.1\n- model:\n  - layers=2",...}
    """
    title = name or getattr(d, "__qualname__", type(d).__name__)
    logger = get_logger() if logger is None else logger
    logger.info("\n".join([f"[{title}]:", *_lines(d, "", ())]))


def _lines(mapping: Mapping[Any, Any], indent: str, above: tuple[int, ...]) -> Iterator[str]:
    for key, value in mapping.items():
        if not isinstance(value, Mapping) or not value:
            lines = str(value).splitlines() or [""]
            yield f"{indent}- {key}={lines[0]}"
            yield from (f"{indent}  {line}" for line in lines[1:])
        elif id(value) in above or value is mapping:
            yield f"{indent}- {key}=..."
        else:
            yield f"{indent}- {key}:"
            yield from _lines(value, f"{indent}  ", (*above, id(mapping)))
