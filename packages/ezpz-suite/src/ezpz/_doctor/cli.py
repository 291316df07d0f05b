"""The command ``ezpz doctor``: its words, and what the checks said as a table or as JSON."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TextIO

from ezpz._streams import abandon, complain
from ezpz._version import __version__
from ezpz_topo import CheckResult

from .checks import TIMEOUT, Check, DoctorError, find_checks, run_checks

_COLOURS: Final = {"ok": "green", "warning": "yellow", "error": "red"}
_NARROWEST_COLUMN = 16  # of what was found: beside names that leave less, lines are too long


def table(results: Sequence[CheckResult], seconds: float) -> str:
    width = _width()
    statuses = max(len(status) for status in _COLOURS)
    names = max(len(result.name) for result in results)
    indent = statuses + names + 4
    column = max(width - indent, _NARROWEST_COLUMN)
    lines: list[str] = []
    for result in results:
        word = _coloured(result.status, result.status.ljust(statuses))
        first, *more = _wrapped(result.message, column)
        if result.remedy and result.status != "ok":
            more += _wrapped(f"remedy: {result.remedy}", column)
        lines.append(f"{word}  {result.name:<{names}}  {first}")
        lines += [" " * indent + line for line in more]
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
    keys = ("name", "status", "message", "remedy", "source", "seconds", "details")
    checks = [{key: getattr(result, key) for key in keys} for result in results]
    document = {"checks": checks, "counts": counts, "seconds": round(seconds, 3)}
    return orjson.dumps(document, option=orjson.OPT_INDENT_2)


def listing(checks: Sequence[Check]) -> str:
    names = max(len(check.name) for check in checks)
    return "\n".join(f"{check.name:<{names}}  {check.source}" for check in checks)


@contextlib.contextmanager
def _progress(stream: TextIO | None) -> Iterator[Callable[[Sequence[str]], None] | None]:
    if stream is None or not stream.isatty():
        yield None
        return

    def say(names: Sequence[str]) -> None:
        text = f"checking: {', '.join(names)}"[: _width() - 1] if names else ""
        stream.write(f"\r\x1b[K{text}")
        stream.flush()

    try:
        yield say
    finally:
        say(())


def _width() -> int:
    return min(max(shutil.get_terminal_size((80, 24)).columns, 40), 100)


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


HELP: Final = f"""\
usage: ezpz doctor [--only=NAME,...] [--json] [--timeout=SECONDS]
       ezpz doctor --list

Check what training needs here: devices, two ranks that reduce, MPI, scheduler, hosts, room on
disk, ... Each result is ok, a warning or an error, with a remedy. Every installed package can
contribute checks. They run at once, each in its own process.

options:
  --only=NAME,...    these checks alone
  --json             the same for programs
  --list             the names of the checks, and the package that each is of
  --timeout=SECONDS  how long each has, {TIMEOUT:g} if not told; what is not done by then hangs, and
                     is an error. While it is still importing torch its time has not begun
  -h, --help         this page
  --version          the version

examples:
  ezpz doctor
  ezpz doctor --only=mpi,all-reduce
  ezpz doctor --timeout=60                     on a slow file system
  ezpz doctor --json | python -m json.tool

exit status: 0, also with warnings; 1 one check at least says error; 2 the words make no sense, or
nothing could be checked or written"""

_NAME: Final = "ezpz doctor"
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
_FLAGS: Final = ("json", "list")
_VALUES: Final = ("only", "timeout")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ezpz doctor`` with these words (default: the process's) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with _unwound_by_signals():
            return _answer(words)
    except DoctorError as error:
        complain(str(error), _NAME)
        return 2
    except OSError as error:
        abandon(sys.stdout)
        if isinstance(error, BrokenPipeError):
            return 0  # `ezpz doctor | head -1` is no failure
        complain(f"{error.filename or 'standard output'}: {error.strerror or error}", _NAME)
        return 2
    except KeyboardInterrupt:
        return 130


@contextlib.contextmanager
def _unwound_by_signals() -> Iterator[None]:
    def unwind(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    # Signals are the main thread's; one that is ignored (nohup) or another's stays so.
    ours = threading.current_thread() is threading.main_thread()
    taken = [each for each in _ENDING if ours and signal.getsignal(each) is signal.SIG_DFL]
    for each in taken:
        signal.signal(each, unwind)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)


def _answer(words: list[str]) -> int:
    if sys.stdout is None:
        raise DoctorError("standard output is closed; expected somewhere to write to")
    if {"-h", "--help"} & set(words):
        _print(HELP)
        return 0
    if words == ["--version"]:
        _print(__version__)
        return 0
    asked = _asked(words)
    only = [name for name in asked.get("only", "").split(",") if name]
    timeout, text = 0.0, asked.get("timeout", f"{TIMEOUT}")
    with contextlib.suppress(ValueError):
        timeout = float(text)
    if not 0 < timeout < 1e6:
        raise DoctorError(f"--timeout={text}; expected seconds above 0, such as --timeout=60")
    if "list" in asked:
        _print(listing(find_checks(only)))
        return 0
    begun = time.monotonic()
    with _progress(sys.stderr) as watch:
        results = run_checks(only, timeout=timeout, watch=watch)
    took = time.monotonic() - begun
    if "json" in asked:
        sys.stdout.buffer.write(as_json(results, took) + b"\n")
        sys.stdout.flush()
    else:
        _print(table(results, took))
    return int(any(result.status == "error" for result in results))


def _asked(words: Sequence[str]) -> dict[str, str]:
    asked: dict[str, str] = {}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in (*_FLAGS, *_VALUES):
            known = ", ".join(f"--{option}" for option in (*_VALUES, *_FLAGS))
            raise DoctorError(f"unknown word {word!r}; expected {known}; see ezpz doctor --help")
        if (name in _FLAGS) == bool(equals) or (name in _VALUES and not value):
            form = f"--{name}" if name in _FLAGS else f"--{name}=VALUE"
            raise DoctorError(f"{word!r}; expected {form}; see ezpz doctor --help")
        if name in asked:
            raise DoctorError(f"--{name} is given twice; expected once; see ezpz doctor --help")
        asked[name] = value or name
    return asked


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
