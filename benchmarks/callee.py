"""Processes that measure: one that is called again and again, and those that are asked once.

A peer lives in an environment of its own, so it is called in a process of its own, and what it
is compared with in a process of the same kind. The process runs this file too (it needs the
standard library alone): Python code that defines ``call``, and perhaps ``close``.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Self


class CalleeError(Exception):
    """A process that was to be measured ended, or never began."""


def peak_mb() -> float:
    """Return the most memory that this process has held so far, in MB (10^6 bytes)."""
    if sys.platform == "linux":
        # Of this program alone: getrusage remembers the one that started it.
        with open("/proc/self/status", encoding="utf-8") as file:
            return int(file.read().split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    import resource  # noqa: PLC0415  # this system's way

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


class Callee:
    """A process of one Python that calls something whenever told.

    Args:
        python: The interpreter.
        code: Defines ``call``; ``words`` and ``peak_mb`` are there.
        words: Strings for the code.
        env: Variables besides ours.
    """

    def __init__(
        self, python: str, code: str, *words: str, env: dict[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [python, "-W", "ignore", __file__, code, *words], env=environment() | (env or {}),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
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

    def peak(self) -> float:
        """Return the most memory that the process has held, in MB."""
        return float(self._ask("peak", 0))

    def end(self) -> None:
        """End the process, in order if it can be."""
        try:
            self._process.communicate(timeout=30)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.communicate()

    def _ask(self, question: str, calls: int) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question} {calls}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _, said = self._process.communicate()
            raise CalleeError(last_line(said) or f"ended with {self._process.returncode}")
        return json.loads(line)


def fresh(python: str, code: str, *words: str, env: dict[str, str] | None = None) -> list[float]:
    """Run code in a new process and return the numbers that it prints; ``peak_mb`` is there.

    Raises:
        CalleeError: It failed, with the last line that it said.
    """
    program = "import sys; sys.path.append(sys.argv.pop(1))\n"
    program += "from callee import apart, peak_mb; print = apart()\n"
    folder = os.path.dirname(__file__)
    done = subprocess.run(
        [python, "-W", "ignore", "-c", program + code, folder, *words],
        env=environment() | (env or {}), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise CalleeError(last_line(done.stderr) or f"ended with {done.returncode}")
    return [float(word) for word in done.stdout.split()]


def apart() -> Callable[..., None]:
    """Return a `print` to where standard output was; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return partial(print, file=answers, flush=True)


def environment() -> dict[str, str]:
    """Return the variables for what is measured: bytecode is kept, or imports cost twice."""
    return {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def last_line(text: str) -> str:
    """Return the last line that says anything."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def serve(code: str, words: list[str]) -> None:
    """Be the process: answer each line of standard input until it ends."""
    answer = apart()
    names: dict[str, Any] = {"words": words, "peak_mb": peak_mb}
    exec(code, names)  # noqa: S102  # the program's own code, from its own argument
    call, clock = names["call"], time.perf_counter_ns

    def typical(calls: int) -> float:
        taken = []
        for _ in range(calls):
            began = clock()
            call()
            taken.append(clock() - began)
        return statistics.median(taken) / 1e9

    def mean(calls: int) -> float:
        began = clock()
        for _ in range(calls):
            call()
        return (clock() - began) / calls / 1e9

    ways = {"typical": typical, "mean": mean, "peak": lambda _: peak_mb()}
    answer("true")
    for line in sys.stdin:
        question, calls = line.split()
        answer(json.dumps(ways[question](int(calls))))
    names.get("close", lambda: None)()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
