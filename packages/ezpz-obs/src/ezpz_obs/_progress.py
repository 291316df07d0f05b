"""How far a loop has got: a bar for a person, a line now and then for a file."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Generic, TypeVar

from ._context import find_rank_info
from ._handlers import is_terminal
from ._logs import find_output, get_logger
from ._text import to_text

T = TypeVar("T")


def progress(
    iterable: Iterable[T],
    *,
    total: int | None = None,
    desc: str | None = None,
    unit: str = "it",
    every: float = 30.0,
) -> Progress[T]:
    """Return the iterable, which shows on rank 0 how far it has got.

    It is a bar on a terminal, which log lines leave intact. Without a terminal it is lines of the
    log, with the rate and the remaining time. There is at most one in ``every`` seconds, and one
    at the end. Other ranks iterate only. Any iterable will do, also generators and endless ones.

    Args:
        iterable: What to iterate over.
        total: How many there are; default: its length, where it has one.
        desc: A description, before the count.
        unit: The name of an item.
        every: Seconds between two lines.

    Raises:
        ValueError: ``EZPZ_LOG_LEVEL`` is no level, or ``EZPZ_LOG_FORMAT`` no format.
        ezpz_topo.TopoError: The rank cannot be known.

    >>> sum(progress(range(4)))
    6
    """
    return Progress(iterable, total, desc, unit, every)


@dataclass(eq=False, repr=False)
class Progress(Generic[T]):
    """An iterable that shows how far it has got; see `progress`."""

    _iterable: Iterable[T]
    _total: int | None
    _desc: str | None
    _unit: str
    _every: float

    def __post_init__(self) -> None:
        self._is_shown = find_rank_info().rank == 0
        self._logger = get_logger("progress")
        if self._desc is not None:
            self._desc = to_text(self._desc)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"a {type(self._iterable).__name__} without a length; give total=")
        return self._length

    def __iter__(self) -> Iterator[T]:
        if not self._is_shown:
            return iter(self._iterable)
        output = find_output()
        wants_bar = output.terminal.level <= logging.INFO and not output.as_json
        if wants_bar and is_terminal(sys.stderr):
            return self._with_bar()
        return self._iterate_with_log_lines()

    @cached_property
    def _length(self) -> int | None:
        if self._total is not None:
            return self._total
        # A loader's length may be costly, or an error: it is read once.
        try:
            return len(self._iterable)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError, AttributeError):
            return None

    def _with_bar(self) -> Iterator[T]:
        from tqdm import tqdm  # type: ignore[import-untyped]  # 20 ms

        try:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
        except (OSError, ValueError):
            width = shutil.get_terminal_size((0, 0)).columns  # COLUMNS, which ezpz-launch sets
        # Some pseudo-terminals are 0 columns wide, where tqdm shows nothing.
        # An iterator, since tqdm would read the length itself.
        bar: Any = tqdm(
            iter(self._iterable), total=self._length, desc=self._desc, unit=self._unit,
            dynamic_ncols=width > 0, ncols=None if width else 80, file=sys.stderr,
        )  # fmt: skip
        try:
            yield from bar
        finally:
            bar.close()

    def _iterate_with_log_lines(self) -> Iterator[T]:
        total = self._length
        start = time.monotonic()
        last = start
        count = 0
        is_whole = False
        try:
            for item in self._iterable:
                yield item
                count += 1
                now = time.monotonic()
                if now - last >= self._every:
                    last = now
                    self._logger.info(self._describe(count, total, now - start))
            is_whole = True
        finally:
            passed = time.monotonic() - start
            text = self._describe(count, total if not is_whole else None, passed)
            ending = "done" if is_whole else "stopped"
            self._logger.info(f"{text}, {ending} after {timedelta(seconds=round(passed))}")

    def _describe(self, count: int, total: int | None, seconds: float) -> str:
        from tqdm import tqdm

        form = "{n_fmt} {unit}, {rate_fmt}"
        if total and count <= total:
            form = "{n_fmt}/{total_fmt} ({percentage:.0f}%), {rate_fmt}, {remaining} left"
        text: str = tqdm.format_meter(count, total, seconds, unit=self._unit, bar_format=form)
        if self._desc:
            return f"{self._desc}: {text}"
        return text
