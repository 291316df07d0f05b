"""Where the lines of a process go: its terminal, and its log file where it has one."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from ezpz_obs._context import Place, find_place

from .levels import get_log_level, wants_json
from .lines import Event, json_line
from .log_file import LogFile
from .terminal import Terminal

NAME = "ezpz_obs"
"""The logger of what we say about ourselves."""


@dataclass(slots=True)
class Output:
    """A terminal and perhaps a log file, with the rank that speaks there."""

    place: Place
    terminal: Terminal
    file: LogFile | None = None
    level: int = 0
    """From which events anybody here is interested."""
    is_configured: bool = False
    """Whether `configure_logs` has made it what it is."""

    def __post_init__(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Find the level anew, after a change."""
        level = self.terminal.level
        self.level = level if self.file is None else min(level, self.file.level)

    def send(
        self, event: Event, *, to_terminal: bool = True, on_terminal: Event | None = None
    ) -> None:
        """Write an event where its level is wanted.

        Args:
            event: What to write.
            to_terminal: False: to the file only.
            on_terminal: What the terminal shows instead.
        """
        now = time.time()
        terminal, file = self.terminal, self.file
        event.redact()
        if on_terminal is not None:
            on_terminal.redact()
        line: str | bytes = b""
        if to_terminal and event.level >= terminal.level:
            line = terminal.render(on_terminal or event, self.place, now)
            if terminal.write(line) and terminal.lost:
                self._tell_lost(terminal, now)
        if file is not None and event.level >= file.level:
            if type(line) is str or not line or on_terminal is not None:
                line = json_line(event, self.place, now)
            assert isinstance(line, bytes)
            if file.write(line, now) and file.lost:
                self._tell_lost(file, now)

    def complain(self, text: str) -> None:
        """Say on the terminal what is wrong with the file."""
        event = Event(logging.WARNING, "warning", NAME, text, {})
        self.terminal.write(self.terminal.render(event, self.place, time.time()))

    def _tell_lost(self, target: Terminal | LogFile, now: float) -> None:
        lost, why = target.lost, target.trouble
        target.lost, target.trouble = 0, None
        reason = getattr(why, "strerror", None) or why
        text = f"{lost} log lines before this one were lost: {reason}"
        event = Event(logging.WARNING, "warning", NAME, text, {})
        if isinstance(target, LogFile):
            target.write(json_line(event, self.place, now), now)
        else:
            target.write(target.render(event, self.place, now))


_process: Output | None = None


def make_output(env: Mapping[str, str], stream: TextIO | None) -> Output:
    """Return an output as the environment says.

    Raises:
        ValueError: ``EZPZ_LOG_LEVEL`` or ``EZPZ_LOG_FORMAT`` is none.
        ezpz_topo.TopoError: The rank cannot be known.
    """
    place = find_place(env)
    level = get_log_level(env, rank=place.rank)
    return Output(place, Terminal(stream, level=level, as_json=wants_json(env), env=env))


def process_output() -> Output:
    """Return the output of this process, which its loggers share.

    Until `configure_logs` it is as the environment says at the moment: launchers' variables may
    come after the first logger.

    Raises:
        ValueError: See `make_output`.
        ezpz_topo.TopoError: See `make_output`.
    """
    global _process
    if _process is None:
        _process = make_output(os.environ, None)
    elif not _process.is_configured:
        copy_output(make_output(os.environ, None), _process)
    return _process


def copy_output(source: Output, target: Output) -> None:
    """Make ``target``, which loggers hold, what ``source`` is."""
    target.place, target.terminal, target.file = source.place, source.terminal, source.file
    target.is_configured = source.is_configured
    target.settle()
