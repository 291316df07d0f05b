"""One check's process, as its parent sees it: what it has said, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from ezpz_topo import CheckResult

from .child import BEGAN
from .found import Check
from .late import judge, standing

_MOST = 1 << 20
"""Bytes of an answer."""

_TAIL = 1 << 16
_SHOWN = 2000
"""Bytes of what it prints that are kept, and characters that are shown."""

# Nothing of what is imported is garbage: to look for some takes a fifth of torch's import.
_CHILD = """\
import gc, json, sys
gc.disable()
path, job = json.loads(sys.stdin.readline())
sys.path[:] = path
from ezpz._doctor.child import main
main(*job)
"""

_TIME_OVER = "Timeout (0:"
"""What `faulthandler` writes first."""


class Running:
    """A check that runs in a process, and a process group, of its own.

    Attributes:
        check: Which one.
        answer: The descriptor that its answer comes from.
        printed: The descriptor of what it prints.
    """

    def __init__(self, check: Check, timeout: float, deadline: float) -> None:
        self.check = check
        self._timeout = timeout
        self._said = {0: bytearray(), 1: bytearray()}
        self._begun = time.monotonic()
        # Not what lies in the working directory: where to look is told.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        job = [sys.path, [check.name, check.value, deadline, timeout]]
        # Less than a pipe holds: it does not wait. A process that has ended is seen below.
        # The pipe stays open: at its end the process knows that this one is gone.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        self.answer = self._process.stdout.fileno()
        self.printed = self._process.stderr.fileno()
        for descriptor in (self.answer, self.printed):
            os.set_blocking(descriptor, False)

    def read(self, descriptor: int) -> bool | None:
        """Take what there is to read; return whether there was any, None at the end of it."""
        try:
            chunk = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        said = self._said[int(descriptor == self.printed)]
        said += chunk
        if descriptor == self.printed:
            del said[:-_TAIL]
        return True if chunk else None

    @property
    def is_done(self) -> bool:
        """Whether it has answered, said too much, or ended."""
        return self._answer is not None or len(self._said[0]) > _MOST or self._has_ended()

    def _has_ended(self) -> bool:
        # Not waited for: its number, which is its group's, would be another's some day.
        try:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, options) is not None
        except AttributeError:  # macOS, before Python 3.13
            return self._process.poll() is not None

    @property
    def _lines(self) -> list[bytes]:
        return bytes(self._said[0]).split(b"\n")[:-1]

    @property
    def _answer(self) -> bytes | None:
        return next((line for line in self._lines if not line.startswith(BEGAN)), None)

    @property
    def _began(self) -> float | None:
        """When its own work began: it had been loaded."""
        for line in self._lines:
            if line.startswith(BEGAN):
                return float(line.removeprefix(BEGAN))
        return None

    def end(self) -> CheckResult:
        """End it, and all that it started; return what came of it, whatever that is."""
        had_ended = self._has_ended()
        self.kill()
        for descriptor in (self.answer, self.printed):
            while len(self._said[0]) <= _MOST and self.read(descriptor):
                pass
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what it never read of its job
                    pipe.close()
        result = self._answered() if self._answer else self._unanswered(had_ended)
        took = time.monotonic() - self._begun
        return replace(
            result, name=self.check.name, source=self.check.source, seconds=round(took, 3)
        )

    def kill(self) -> None:
        """End it, and every process of its group."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # In uninterruptible sleep (a hung file system) not even that ends it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)

    def _answered(self) -> CheckResult:
        answer: dict[str, Any] = json.loads(self._answer or b"", parse_int=_number)
        if "broken" in answer:
            return self._broken(answer["broken"], answer["details"])
        return CheckResult(**answer)

    def _unanswered(self, had_ended: bool) -> CheckResult:
        status, words = self._process.returncode, self._said[1].decode(errors="replace")
        details = {"exit_status": status, "printed": words[-_SHOWN:]}
        if len(self._said[0]) > _MOST:
            return self._broken(f"answered more than {_MOST >> 20} MiB", details)
        # Its own watch ends it with this status, and says where it stood.
        if _TIME_OVER in words or (status in (None, -signal.SIGKILL) and not had_ended):
            worked = None if self._began is None else time.monotonic() - self._began
            return judge(self.check, self._timeout, worked, words, details)
        if status == -signal.SIGKILL:
            return CheckResult.error(
                "was killed by SIGKILL, and not by the doctor",
                "memory may be short: see dmesg, or the job's limit; run it alone: ezpz doctor "
                f"--only={self.check.name}",
                **details,
            )
        if status < 0:
            return self._broken(f"crashed by {_signal(-status)}{standing(words)}", details)
        return self._broken(f"ended with exit status {status} and without a result", details)

    def _broken(self, message: str, details: dict[str, Any]) -> CheckResult:
        package = self.check.package.partition(" ")[0]
        return CheckResult.error(
            message, f"install {package} again, or report it to its authors with --json", **details
        )


def _signal(number: int) -> str:
    # Of the real-time signals only the first and the last have a name.
    known = number in list(signal.Signals)
    return signal.Signals(number).name if known else f"signal {number}"


def _number(digits: str) -> int | str:
    """Return a whole number; one that orjson cannot write, which knows 64 bits, as its text."""
    number = int(digits)
    return number if -(1 << 63) <= number < 1 << 64 else digits
