"""Run a command for a check: no input, a time limit, and nothing left of it afterwards."""

from __future__ import annotations

import contextlib
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

    It stays in the check's process group: what it leaves behind ends with that, also where the
    check itself is ended.

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
        stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    with process:
        try:
            said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            if grace:
                process.terminate()
            return Ended(None, *_rest(process, grace))
        finally:
            process.kill()  # nothing, where it has ended
        return Ended(process.returncode, *said)


def _rest(process: subprocess.Popen[str], grace: float) -> tuple[str, str]:
    """Return what it had said; it is killed where it does not end by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=grace)
    process.kill()
    try:
        return process.communicate(timeout=0.2)
    except subprocess.TimeoutExpired as error:
        # What it started holds the pipes.
        return _text(error.stdout), _text(error.stderr)


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""
