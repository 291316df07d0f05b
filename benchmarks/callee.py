"""Processes that measure: one that is called again and again, and those that are asked once.

A peer lives in an environment of its own, so it is called in a process of its own, and what it
is compared with in a process of the same kind: `callee_process`, run by their interpreters.
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from callee_process import peak_mb
from paired import MeasureError

__all__ = ["Callee", "CalleeError", "begin", "environment", "fresh", "last_line", "peak_mb"]

PROCESS = str(Path(__file__).with_name("callee_process.py"))


class CalleeError(MeasureError):
    """A process that was to be measured ended, or never began."""


class Callee:
    """A process of one Python that calls something whenever told.

    Args:
        python: The interpreter.
        code: Defines ``call``, perhaps ``close``, and ``before`` if some memory does not count;
            ``words`` and ``peak_mb`` are there.
        words: Strings for the code.
        env: Variables besides ours.
    """

    def __init__(
        self, python: str, code: str, *words: str, env: dict[str, str] | None = None
    ) -> None:
        # A file: of a pipe that nobody reads, one who says much would wait for ever.
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # until `end`
        self._process = subprocess.Popen(
            [python, "-W", "ignore", PROCESS, "serve", code, *words],
            env=environment() | (env or {}), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
        )  # fmt: skip
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def typical(self, calls: int) -> float:
        """Call so often, and return the median of single calls, in seconds."""
        return float(self._ask("typical", calls))

    def mean(self, calls: int) -> float:
        """Call so often, and return the mean: for what a clock's own 0.1 us would hide."""
        return float(self._ask("mean", calls))

    def paced(self, calls: int) -> float:
        """As `typical`, with a millisecond's step of a training before each call."""
        return float(self._ask("paced", calls))

    def peak(self) -> float:
        """Return the most memory that the process has held, in MB, less what does not count."""
        return float(self._ask("peak", 0))

    def end(self) -> None:
        """End the process, in order if it can be. Harmless twice."""
        if self._said.closed:
            return
        try:
            self._process.communicate(timeout=30)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.communicate()
        self._said.close()

    def _ask(self, question: str, calls: int) -> str:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{question} {calls}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: what it said last is its answer
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._said.seek(0)
            said = last_line(self._said.read())
            self.end()
            raise CalleeError(said or f"ended with {self._process.returncode}")
        return line.strip()


def begin(
    programs: Mapping[str, tuple[str, str]],
    *words: str,
    running: ExitStack,
    failed: dict[str, str],
    env: dict[str, str] | None = None,
) -> dict[str, Callee]:
    """Begin a process for each program that is to be called.

    Args:
        programs: By name the interpreter and the code; our own are named ``ours``.
        words: Strings for the code.
        running: Ends them.
        failed: Where it is noted why a peer's did not begin; it is left out.
        env: Variables besides ours.

    Raises:
        CalleeError: One of ours did not begin.
    """
    callees = {}
    for name, (python, code) in programs.items():
        try:
            callees[name] = running.enter_context(Callee(python, code, *words, env=env))
        except CalleeError as error:
            if name.startswith("ours"):
                raise
            failed[name] = f"it fails: {error}"
    return callees


def fresh(python: str, code: str, *words: str, env: dict[str, str] | None = None) -> list[float]:
    """Run code in a new process and return the numbers that it prints; ``peak_mb`` is there.

    Raises:
        CalleeError: It failed, with the last line that it said.
    """
    done = subprocess.run(
        [python, "-W", "ignore", PROCESS, "once", code, *words], env=environment() | (env or {}),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise CalleeError(last_line(done.stderr) or f"ended with {done.returncode}")
    return [float(word) for word in done.stdout.split()]


def environment() -> dict[str, str]:
    """Return the variables for what is measured: bytecode is kept, or imports cost twice."""
    return {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def last_line(text: str) -> str:
    """Return the last line that says anything."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
