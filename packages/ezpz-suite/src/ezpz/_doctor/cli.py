"""The command ``ezpz doctor``."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Sequence
from typing import Final

from ezpz._version import __version__

from . import show
from .found import DoctorError, find_checks
from .run import TIMEOUT, run_checks

HELP: Final = f"""\
usage: ezpz doctor [--only=NAME,...] [--json] [--timeout=SECONDS]
       ezpz doctor --list

Look at what training needs here (devices, two ranks that reduce, MPI, scheduler, hosts, room on
disk, ...), and say for each whether it is well, and if not what to do. Every installed package can
contribute checks; each runs in a process of its own, all at once.

options:
  --only=NAME,...    these checks alone
  --json             the same for programs
  --list             the names of the checks, and the package that each is of
  --timeout=SECONDS  how long they have together, {TIMEOUT:g} if not told; what is not done by then
                     hangs, and is an error: give more where importing torch takes long
  -h, --help         this page
  --version          the version

examples:
  ezpz doctor
  ezpz doctor --only=mpi,all-reduce
  ezpz doctor --timeout=60                     on a slow file system
  ezpz doctor --json | python -m json.tool

exit status: 0, also with warnings; 1 one check at least says error; 2 the words make no sense, or
nothing could be checked or written"""

_FLAGS: Final = ("json", "list")
_VALUES: Final = ("only", "timeout")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ezpz doctor`` with these words (default: the process's) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _answer(words)
    except DoctorError as error:
        _complain(str(error))
        return 2
    except BrokenPipeError:
        # `ezpz doctor | head -1` is no failure, nor is the interpreter's own flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        _complain(f"{error.filename or 'standard output'}: {error.strerror or error}")
        return 2
    except KeyboardInterrupt:
        return 130


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
    only = [name for name in asked["only"].split(",") if name]
    if asked["list"]:
        _print(show.listing(find_checks(only)))
        return 0
    begun = time.monotonic()
    try:
        results = run_checks(only, timeout=_seconds(asked), watch=show.progress(sys.stderr))
    finally:
        show.clear(sys.stderr)
    took = time.monotonic() - begun
    if asked["json"]:
        sys.stdout.buffer.write(show.as_json(results, took) + b"\n")
        sys.stdout.flush()
    else:
        _print(show.table(results, took))
    return int(any(result.status == "error" for result in results))


def _seconds(asked: dict[str, str]) -> float:
    text = asked["timeout"]
    try:
        seconds = float(text) if text else TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise DoctorError(f"--timeout={text}; expected seconds above 0, such as --timeout=60")
    return seconds


def _asked(words: list[str]) -> dict[str, str]:
    """Let Fire read the options; return what was asked for, by name."""
    _refuse(words)
    import fire  # noqa: PLC0415  # 50 ms, and only who runs checks pays for it
    from fire.core import FireExit  # noqa: PLC0415

    asked: dict[str, str] = {}

    # It returns nothing, so that Fire has no member to look left-over words up in.
    def doctor(*, only: str = "", timeout: str = "", json: str = "", list: str = "") -> None:  # noqa: A002
        asked.update(only=only, timeout=timeout, json=json, list=list)

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            fire.Fire(fire.decorators.SetParseFn(str)(doctor), command=words, name="ezpz doctor")
    except FireExit as error:
        first = next((line for line in complaint.getvalue().splitlines() if line.strip()), "")
        raise DoctorError(
            f"{' '.join(words)!r}: {first.removeprefix('ERROR: ') or 'not understood'}; expected "
            "one of the forms of ezpz doctor --help"
        ) from error
    return asked


def _refuse(words: Sequence[str]) -> None:
    """Fire takes a missing value for True, and has options of its own: none of that."""
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in (*_FLAGS, *_VALUES):
            known = ", ".join(f"--{option}" for option in (*_VALUES, *_FLAGS))
            raise DoctorError(f"unknown word {word!r}; expected {known}; see ezpz doctor --help")
        if (name in _FLAGS) == bool(equals) or (name in _VALUES and not value):
            form = f"--{name}" if name in _FLAGS else f"--{name}=VALUE"
            raise DoctorError(f"{word!r}; expected {form}; see ezpz doctor --help")


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed: nobody is there
        print(f"ezpz doctor: {text}", file=sys.stderr, flush=True)
