"""One place where a process's logs are configured, and undone."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from ezpz_obs._context import Place, find_place

from .levels import for_rank, to_level, wants_json
from .log_file import LogFile, file_name
from .logger import Channel
from .output import NAME, Output, copy_output, process_output
from .standard import capture_warnings, join
from .terminal import Terminal
from .uncaught import Uncaught


@dataclass(frozen=True, slots=True)
class _Asked:
    """What comes of the arguments and the environment: the same asks for nothing new."""

    place: Place
    level: int
    as_json: bool
    path: Path | None
    file_level: int
    is_level_given: bool
    warnings: bool
    hooks: bool


class LogSetup:
    """What `configure_logs` has set up; a context manager whose end undoes it.

    Attributes:
        path: This rank's log file, or None.
    """

    def __init__(
        self, asked: _Asked, uncaught: Uncaught | None, undo: list[Callable[[], None]]
    ) -> None:
        self.path: Path | None = asked.path
        self._asked = asked
        self._uncaught = uncaught
        self._undo = undo

    def undo(self) -> None:
        """Put everything back as it was. Harmless twice, and after another set-up."""
        global _active
        if _active is self:
            _active = None
        while self._undo:
            self._undo.pop()()

    def is_for(self, asked: _Asked) -> bool:
        """Say whether it is what is asked for."""
        return self._asked == asked

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Once undone, nobody would log it; where it is printed is for others to say.
        if isinstance(value, Exception) and kind is not None and self._uncaught is not None:
            self._uncaught.log((kind, value, trace))
        self.undo()


_active: LogSetup | None = None


def configure_logs(
    *,
    directory: str | os.PathLike[str] | None = None,
    per_rank: bool = False,
    level: str | int | None = None,
    file_level: str | int | None = None,
    as_json: bool | None = None,
    warnings: bool = True,
    hooks: bool = True,
    env: Mapping[str, str] | None = None,
) -> LogSetup:
    """Bring all that this process logs to one output, and if wanted into a file.

    The loggers of `get_logger`, those that were made before included, the standard library's
    (``logging.getLogger``) and Python's warnings go to standard error, and to ``directory``. An
    uncaught exception, of a thread too, is logged with rank and host before the process ends;
    the hook that was there before then prints the traceback and does what else it does.

    Handlers and levels that somebody has set stay as they are. Handlers of others get the
    loggers' events too; one of theirs that writes to standard error shows the standard library's
    records alone. Chatty libraries without a level of their own speak from WARNING. Call it
    after the imports: libraries that keep their records from the root logger, as torch does, are
    found then. While it is in force ``logging.basicConfig()`` does nothing.

    The same call again changes nothing; another one takes its place.

    Args:
        directory: Where rank 0 writes ``rank-00000.jsonl``, one JSON object a line, one write
            each. Where that is not possible (a full disk) one warning says so.
        per_rank: Every rank writes a file of its own there.
        level: From which level rank 0 shows events, such as "DEBUG"; default:
            ``EZPZ_LOG_LEVEL``, else INFO. The other ranks from WARNING, unless
            ``LOG_FROM_ALL_RANKS=1``. A given one is the root logger's too.
        file_level: From which level all ranks write to their files; default: INFO, or ``level``
            where that is lower.
        as_json: JSON lines on standard error; default: whether ``EZPZ_LOG_FORMAT=json``.
        warnings: Capture Python's warnings.
        hooks: Log uncaught exceptions.
        env: The environment to read; default ``os.environ``.

    Returns:
        A handle that undoes it: ``undo()``, or the end of its ``with``. An exception that
        leaves such a ``with`` is logged as an uncaught one.

    Raises:
        ValueError: A level or format is none.
        ezpz_topo.TopoError: The rank cannot be known.
    """
    global _active
    env = os.environ if env is None else env
    place = find_place(env)
    said = to_level(env.get("EZPZ_LOG_LEVEL") or "INFO", "EZPZ_LOG_LEVEL")
    number = said if level is None else to_level(level, "level")
    writes = directory is not None and (place.rank == 0 or per_rank)
    asked = _Asked(
        place=place,
        level=for_rank(number, env, place.rank),
        as_json=wants_json(env) if as_json is None else as_json,
        path=Path(directory).absolute() / file_name(place.rank) if directory and writes else None,
        file_level=(
            min(number, logging.INFO) if file_level is None else to_level(file_level, "file_level")
        ),
        is_level_given=level is not None,
        warnings=warnings,
        hooks=hooks,
    )
    if _active is not None:
        if _active.is_for(asked):
            return _active
        _active.undo()
    _active = _set_up(asked, env)
    return _active


def _set_up(asked: _Asked, env: Mapping[str, str]) -> LogSetup:
    output = process_output()
    undo: list[Callable[[], None]] = [partial(copy_output, replace(output), output)]
    terminal = Terminal(None, level=asked.level, as_json=asked.as_json, env=env)
    file = None
    if asked.path is not None:
        file = LogFile(asked.path, level=asked.file_level, complain=output.complain)
        undo.append(file.close)
    copy_output(Output(asked.place, terminal, file, is_configured=True), output)
    if file is not None:
        file.open(time.time())
    undo += join(output, is_level_given=asked.is_level_given)
    if asked.warnings:
        undo += capture_warnings()
    uncaught = None
    if asked.hooks:
        uncaught = Uncaught(Channel(output, NAME))
        undo.append(uncaught.remove)
    return LogSetup(asked, uncaught, undo)
