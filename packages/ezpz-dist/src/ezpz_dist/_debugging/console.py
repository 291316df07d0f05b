"""Where the debugger reads and writes, wherever the rank was started."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from typing import IO, NamedTuple, cast

from ezpz_topo import RankInfo

from .remote import RemoteTerminal
from .terminal import STDIN, find_terminal, has_input

_DRAINED = 0.3
"""Seconds for what this rank wrote into pipes to reach the terminal: ezpz-launch's labels hold
an unfinished line for 0.2."""


class Console(NamedTuple):
    """A way to the person.

    Attributes:
        stdin: Where commands are read; None: standard input, with line editing.
        stdout: Where answers go; None: standard output.
        where: In words, for those who wait.
        close: Gives it back.
    """

    stdin: IO[str] | None
    stdout: IO[str] | None
    where: str
    close: Callable[[], None]


def open_console(info: RankInfo, host: str, line: str) -> Console:
    """Return a terminal, or a socket for one, and say on standard error how to get there.

    Args:
        info: This rank's place.
        host: Its host.
        line: The user's line that stops.

    Raises:
        DistError: There is neither.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    path, why_not = find_terminal(info.launcher)
    if path == STDIN or (not path and info.launcher == "none" and has_input()):
        return Console(None, None, "its standard input", _nothing)
    if path:
        time.sleep(_DRAINED)
        return _at_terminal(path)
    remote = RemoteTerminal()
    command = f"on {shlex.quote(host)}: {remote.command}"
    who = f"rank {info.rank} of {info.world_size}" if info.world_size > 1 else "this process"
    sys.stderr.write(
        f"ezpz: {who} stops at {line} and waits for you; {why_not}. Type in a shell {command}\n"
    )
    sys.stderr.flush()
    file = cast("IO[str]", remote)
    return Console(file, file, f"a socket; type in a shell {command}", remote.close)


def _at_terminal(path: str) -> Console:
    # Left in its cooked mode: a rank that is killed must not leave it in another.
    commands = open(path, encoding="utf-8", errors="replace")  # noqa: SIM115  # until `close`
    answers = open(path, "w", encoding="utf-8", errors="replace")  # noqa: SIM115

    def close() -> None:
        commands.close()
        answers.close()

    return Console(commands, answers, f"the terminal {path}", close)


def _nothing() -> None:
    """Leave standard input and output open."""
