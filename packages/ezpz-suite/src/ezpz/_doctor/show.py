"""What the checks said: as a table for people, as JSON for programs, and while they run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Final, TextIO

from ezpz_topo import CheckResult

from .found import Check

_COLOURS: Final = {"ok": "green", "warning": "yellow", "error": "red"}
_NARROWEST, _WIDEST, _USUAL = 40, 100, 80
_NARROWEST_COLUMN = 16
"""Of what was found: beside names that leave less than that lines are too long."""


def table(results: Sequence[CheckResult], seconds: float) -> str:
    """Return the results in columns, the remedies below what they mend, and their number."""
    width = _width()
    statuses = max(len(status) for status in _COLOURS)
    names = max(len(result.name) for result in results)
    indent = statuses + names + 4
    column = max(width - indent, _NARROWEST_COLUMN)
    lines: list[str] = []
    for result in results:
        word = _coloured(result.status, result.status.ljust(statuses))
        said = _wrapped(result.message, column)
        lines.append(f"{word}  {result.name:<{names}}  {said[0]}")
        lines += [" " * indent + line for line in said[1:]]
        if result.remedy and result.status != "ok":
            remedy = _wrapped(f"remedy: {result.remedy}", column)
            lines += [" " * indent + line for line in remedy]
    return "\n".join([*lines, *_wrapped(_summary(results, seconds), width)])


def _summary(results: Sequence[CheckResult], seconds: float) -> str:
    told = []
    for status in _COLOURS:
        names = [result.name for result in results if result.status == status]
        if names:
            plural = "s" if len(names) > 1 and status != "ok" else ""
            which = f" ({', '.join(names)})" if status != "ok" else ""
            told.append(f"{len(names)} {status}{plural}{which}")
    checks = "1 check" if len(results) == 1 else f"{len(results)} checks"
    return f"{checks} in {seconds:.1f} s: {', '.join(told)}"


def as_json(results: Sequence[CheckResult], seconds: float) -> bytes:
    """Return the results for programs; docs/doctor.md of the repository names the keys."""
    import orjson  # noqa: PLC0415  # only this needs it

    counts = {status: sum(result.status == status for result in results) for status in _COLOURS}
    document = {
        "checks": [
            {
                "name": result.name,
                "status": result.status,
                "message": result.message,
                "remedy": result.remedy,
                "source": result.source,
                "seconds": result.seconds,
                "details": result.details,
            }
            for result in results
        ],
        "counts": counts,
        "seconds": round(seconds, 3),
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2)


def listing(checks: Sequence[Check]) -> str:
    """Return the names of checks and who contributes them."""
    names = max(len(check.name) for check in checks)
    return "\n".join(f"{check.name:<{names}}  {check.source}" for check in checks)


def progress(stream: TextIO | None) -> Callable[[Sequence[str]], None] | None:
    """Return what says on a terminal which checks still run; None where there is none."""
    if stream is None or not stream.isatty():
        return None
    shown = ""

    def say(names: Sequence[str]) -> None:
        nonlocal shown
        text = f"checking: {', '.join(names)}"[: _width() - 1]
        if text != shown:
            stream.write(f"\r\x1b[K{text}")
            stream.flush()
            shown = text

    return say


def clear(stream: TextIO | None) -> None:
    """Take away what `progress` said."""
    if stream is not None and stream.isatty():
        stream.write("\r\x1b[K")
        stream.flush()


def _width() -> int:
    columns = shutil.get_terminal_size((_USUAL, 24)).columns
    return min(max(columns, _NARROWEST), _WIDEST)


def _wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text; a path that is longer than a line begins one of its own."""
    # What others printed may steer a terminal.
    plain = "".join(c if c.isprintable() else " " for c in text)
    lines = [""]
    for word in plain.split():
        for start in range(0, len(word), width):
            part = word[start : start + width]
            if not lines[-1]:
                lines[-1] = part
            elif start == 0 and len(lines[-1]) + 1 + len(part) <= width:
                lines[-1] += f" {part}"
            else:
                lines.append(part)
    return lines


def _coloured(status: str, word: str) -> str:
    """Return the word, coloured where standard output is a terminal and NO_COLOR is not set."""
    if not sys.stdout.isatty():
        return word
    from termcolor import colored  # noqa: PLC0415  # only a terminal needs it

    return colored(word, _COLOURS[status])
