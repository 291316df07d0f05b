"""Run a command for a check: no input, a time limit, and nothing left of it afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Ended(NamedTuple):
    """How a command ended; ``status`` is None where its time was over."""

    status: int | None
    stdout: str
    stderr: str

    @property
    def last_words(self) -> str:
        """The last line with a letter in it of what it said, for people."""
        said = self.stderr.strip() or self.stdout.strip()
        lines = [line for line in said.splitlines() if any(map(str.isalpha, line))]
        return lines[-1].strip()[:160] if lines else "nothing"


def run(
    argv: Sequence[str], env: Mapping[str, str], seconds: float, *, grace: float = 0.0
) -> Ended:
    """Run a command to its end, or for so long.

    Args:
        argv: The command and its arguments.
        env: Its environment.
        seconds: Then it is ended.
        grace: Seconds from SIGTERM to SIGKILL, for one that has others to end.

    Raises:
        OSError: It cannot be started.
    """
    process = subprocess.Popen(
        list(argv), env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            if grace:
                process.terminate()
            return Ended(None, *_rest(process, grace))
        finally:
            if process.returncode is None:
                _kill(process)
        return Ended(process.returncode, *said)


def _rest(process: subprocess.Popen[str], grace: float) -> tuple[str, str]:
    """Return what it had said; all of its group are killed where it does not end by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=grace)
    _kill(process)
    try:
        return process.communicate(timeout=0.5)
    except subprocess.TimeoutExpired as error:
        # A process of another session holds the pipes.
        return _text(error.stdout), _text(error.stderr)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill it and its group, whose number is its own: nobody has waited for it yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""
