"""``ezpz doctor``: what works here, what does not, and what to do about it.

Packages contribute the checks, by entry points of the group ``ezpz.checks``; each runs in a process
of its own, so that one that crashes or hangs is a result too, and the others go on.
"""

from __future__ import annotations

import contextlib
import difflib
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import IO, Any, Final, NamedTuple, NoReturn, TextIO

from ezpz_topo import CheckResult

from ._streams import abandon, complain
from ._version import __version__

__all__ = [
    "GROUP", "TIMEOUT", "Check", "CheckResult", "DoctorError", "find_checks", "main", "run_checks",
]  # fmt: skip

GROUP: Final = "ezpz.checks"
"""The group of entry points by which a package contributes checks."""

TIMEOUT: Final = 4.0
"""Seconds that a check has once it is imported."""

IMPORTS = 60.0
"""Seconds that it has to be imported in: the first import of torch on a shared file system takes
longer than all checks together, and says nothing about the machine."""


class DoctorError(Exception):
    """The doctor was asked for what it does not have, or found nothing to ask."""


class Check(NamedTuple):
    """One check, not loaded yet.

    Attributes:
        name: The entry point's.
        value: Where it is, as ``"package.module:function"``.
        package: The distribution that contributes it, with its version.
    """

    name: str
    value: str
    package: str

    @property
    def source(self) -> str:
        """The distribution and the object, for people."""
        return f"{self.package} ({self.value})"


def find_checks(only: Sequence[str] = ()) -> list[Check]:
    """Return the checks of all installed packages, by name; nothing of theirs is imported.

    Args:
        only: Names of those to return; all if empty.

    Raises:
        DoctorError: No package has a check, or none has one of these names.
    """
    checks = sorted(
        Check(one.name, one.value, f"{one.dist.name} {one.dist.version}" if one.dist else "unknown")
        for one in entry_points(group=GROUP)
    )
    if not checks:
        raise DoctorError(
            f"no installed package has an entry point of the group {GROUP}; expected those of "
            "ezpz-topo and its siblings; install them again: ezpz_setup_env in a clone, else "
            "pip install --force-reinstall ezpz-suite"
        )
    names = {check.name for check in checks}
    for name in only:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else "see ezpz doctor --list"
            raise DoctorError(
                f"no check is called {name!r}; expected one of {', '.join(sorted(names))}; {hint}"
            )
    return [check for check in checks if not only or check.name in only]


def run_checks(
    only: Sequence[str] = (),
    *,
    timeout: float = TIMEOUT,
    watch: Callable[[Sequence[str]], None] | None = None,
) -> list[CheckResult]:
    """Run the checks of all installed packages at once, and return what each says, by name.

    One that raises, crashes, hangs, or cannot be imported is an error that names it and its
    package. Nothing that a check started is left afterwards.

    Args:
        only: Names of those to run; all if empty.
        timeout: Seconds that each has once its modules are imported, for which it has a minute.
        watch: Called with the names of those that still run, some times a second.

    Raises:
        DoctorError: There are no checks, none of one of these names, or no room for processes.
        ValueError: ``timeout`` is not above 0 and finite.
    """
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout={timeout}; expected seconds above 0")
    checks = find_checks(only)
    running: list[_Running] = []
    try:
        try:
            running.extend(_Running(check, timeout) for check in checks)
        except OSError as error:
            raise DoctorError(
                f"no process can be started for the check {checks[len(running)].name!r} "
                f"({error.strerror}); expected room for {len(checks)}; see ulimit -u, or take some "
                "at a time with --only"
            ) from error
        results = [each.end() for each in _as_they_end(running, watch)]
    finally:
        for each in running:
            each.kill()
    return sorted(results, key=lambda result: (result.name, result.source))


def _as_they_end(
    running: Sequence[_Running], watch: Callable[[Sequence[str]], None] | None
) -> Iterator[_Running]:
    """Yield each check when it has answered or ended, or its time is over."""
    left = list(running)
    while left:
        if watch is not None:
            watch([each.check.name for each in left])
        time.sleep(0.05)
        for each in [each for each in left if each.is_done]:
            left.remove(each)
            yield each


# The doctor's side of a check's process.

_MOST = 1 << 20  # bytes of an answer
_TAIL, _SHOWN = 1 << 16, 2000  # bytes of what it prints that are kept; characters that are shown

# Nothing of what is imported is garbage: to look for some takes a fifth of torch's import.
_CHILD = """\
import gc, json, sys
gc.disable()
path, job = json.loads(sys.stdin.readline())
sys.path[:] = path
from ezpz.doctor import be_check
be_check(*job)
"""

# Of the line that comes before the answer: the monotonic clock where its own work begins.
_BEGAN = b"began "

_GRACE = 0.5  # seconds to end itself, and say where it stands, when its time is over
# What `faulthandler` writes first, and for each place.
_TIME_OVER = "Timeout (0:"
_FRAME = re.compile(r'^  File "(.*)", line ([0-9]+) in (.*)$', re.MULTILINE)


class _Running:
    """A check in a process and process group of its own: what it has said, and how it ended."""

    def __init__(self, check: Check, timeout: float) -> None:
        self.check = check
        self._timeout, self._imports = timeout, max(timeout, IMPORTS)
        self._answers, self._printed = bytearray(), bytearray()
        self._begun = time.monotonic()
        # Not what lies in the working directory: where to look is told.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD],
            stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True,
        )  # fmt: skip
        pipes = self._process.stdin, self._process.stdout, self._process.stderr
        self._stdin, stdout, stderr = (each for each in pipes if each)
        job = [sys.path, [check.name, check.value, self._begun + self._imports, timeout]]
        # Less than a pipe holds: it does not wait. A process that has ended is seen below.
        # The pipe stays open: at its end the process knows that this one is gone.
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(json.dumps(job).encode() + b"\n")
            self._stdin.flush()
        self._readers = [
            threading.Thread(target=_collect, args=args, daemon=True)
            for args in ((stdout, self._answers, _MOST + 1), (stderr, self._printed, _TAIL))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def is_done(self) -> bool:
        """Whether it has answered, said too much, or ended, or its time is over."""
        began, answer = self._said()
        if answer is not None or len(self._answers) > _MOST or self._has_ended():
            return True
        over = self._begun + self._imports if began is None else began + self._timeout
        return time.monotonic() >= over + _GRACE

    def _has_ended(self) -> bool:
        # Not waited for: its number, which is its group's, would be another's some day.
        try:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, options) is not None
        except AttributeError:  # macOS, before Python 3.13
            return self._process.poll() is not None

    def _said(self) -> tuple[float | None, bytes | None]:
        """Return when its own work began, and its answer; None for what has not come yet."""
        lines = bytes(self._answers).split(b"\n")[:-1]
        begun = (float(line[len(_BEGAN) :]) for line in lines if line.startswith(_BEGAN))
        return next(begun, None), next((one for one in lines if not one.startswith(_BEGAN)), None)

    def end(self) -> CheckResult:
        had_ended = self._has_ended()
        self.kill()
        for reader in self._readers:
            reader.join(1.0)  # what has left its process group may keep a pipe open
        with contextlib.suppress(BrokenPipeError):  # what it never read of its job
            self._stdin.close()
        began, answer = self._said()
        # Of more than that only the end is kept, which is no answer.
        if answer and len(self._answers) <= _MOST:
            result = self._answered(answer)
        else:
            result = self._unanswered(began, had_ended)
        took = time.monotonic() - self._begun
        return replace(
            result, name=self.check.name, source=self.check.source, seconds=round(took, 3)
        )

    def kill(self) -> None:
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # In uninterruptible sleep (a hung file system) not even that ends it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)

    def _answered(self, said: bytes) -> CheckResult:
        # Python writes NaN, which is no JSON.
        answer: dict[str, Any] = json.loads(said, parse_constant=lambda _: None)
        if "broken" in answer:
            return self._broken(answer["broken"], answer["details"])
        return CheckResult(**answer)

    def _unanswered(self, began: float | None, had_ended: bool) -> CheckResult:
        status, words = self._process.returncode, self._printed.decode(errors="replace")
        details = {"exit_status": status, "printed": words[-_SHOWN:]}
        if len(self._answers) > _MOST:
            return self._broken(f"answered more than {_MOST >> 20} MiB", details)
        # Its own watch ends it with this status, and says where it stood.
        if _TIME_OVER in words or (status in (None, -signal.SIGKILL) and not had_ended):
            return self._late(began, _standing(words), details)
        if status == -signal.SIGKILL:
            remedy = "memory may be short: see dmesg, or the job's limit; run it alone: ezpz doctor"
            return CheckResult.error(
                "was killed by SIGKILL, and not by the doctor",
                f"{remedy} --only={self.check.name}", **details,
            )  # fmt: skip
        if status < 0:
            # Of the real-time signals only the first and the last have a name.
            known = -status in list(signal.Signals)
            name = signal.Signals(-status).name if known else f"signal {-status}"
            return self._broken(f"crashed by {name}{_standing(words)}", details)
        return self._broken(f"ended with exit status {status} and without a result", details)

    def _late(self, began: float | None, standing: str, details: dict[str, Any]) -> CheckResult:
        if began is None:
            module = self.check.value.partition(":")[0]
            return CheckResult.error(
                f"not imported in {self._imports:g} s{standing}",
                f"see what takes so long: {sys.executable} -X importtime -c 'import {module}'; on "
                "a slow file system, put the environment on each node's own disk (sbcast, or tar)",
                **details,
            )
        return CheckResult.error(
            f"hangs: did not end in {self._timeout:g} s{standing}",
            f"give it more time: ezpz doctor --timeout=60 --only={self.check.name}; if that does "
            "not help, what it waits for hangs",
            **details,
        )

    def _broken(self, message: str, details: dict[str, Any]) -> CheckResult:
        package = self.check.package.partition(" ")[0]
        return CheckResult.error(
            message, f"install {package} again, or report it to its authors with --json", **details
        )


def _collect(pipe: IO[bytes], kept: bytearray, most: int) -> None:
    """Keep the last of what comes, until the pipe is closed."""
    with pipe:
        while chunk := os.read(pipe.fileno(), 1 << 16):
            kept += chunk
            del kept[:-most]


def _standing(words: str) -> str:
    """Return the end of a sentence that says where a process stood; empty if that is unknown."""
    # `faulthandler` writes the main thread last, and there the innermost place first.
    frames = _FRAME.findall(words.rpartition("(most recent call first):")[2])
    own = (sysconfig.get_path("stdlib"), "<frozen ")
    installed = [each for each in frames if not each[0].startswith(own) or "-packages" in each[0]]
    for path, line, function in (installed or frames)[:1]:
        return f"; it stands in {function} ({path}:{line})"
    return ""


# The check's side: the process says when its own work begins, and answers with a line of JSON.


def be_check(name: str, value: str, imported_by: float, timeout: float) -> NoReturn:
    """Be the process of the check at ``"module:function"``, which then has so many seconds."""
    answer, lifeline = os.dup(1), os.dup(0)
    # Whatever the check prints, or a process that it starts: only the answer is the answer.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable()
    _end_after(imported_by - time.monotonic())
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    facts = _result_of(EntryPoint(name, value, GROUP), answer, timeout)
    # A path may hold bytes that are no text.
    text = json.dumps(facts, default=str, ensure_ascii=False)
    _write(answer, text.encode(errors="replace") + b"\n")
    # To take torch apart takes as long as many a check.
    os._exit(0)


def _end_after(seconds: float) -> None:
    # Also where its parent is gone, or a C library holds the GIL.
    faulthandler.dump_traceback_later(max(seconds, 0.01), exit=True)


def _end_with(lifeline: int) -> None:
    """End with the doctor, however that ends: its end of this pipe is closed then."""
    os.read(lifeline, 1)
    # With all that the check started: the process group is its own.
    os.killpg(0, signal.SIGKILL)


def _write(answer: int, line: bytes) -> None:
    while line:
        line = line[os.write(answer, line) :]


def _result_of(entry: EntryPoint, answer: int, timeout: float) -> dict[str, Any]:
    try:
        check = entry.load()
        getattr(check, "prepare", lambda: None)()
    except BaseException as error:  # noqa: BLE001  # whatever a package raises at its import
        return _failed(f"{entry.value} cannot be loaded: {_said(error)}")
    _end_after(timeout)
    _write(answer, _BEGAN + repr(time.monotonic()).encode() + b"\n")
    try:
        # It is to be done a little before its time is over, so that it can say so itself.
        result = check(max(timeout - 0.3, 0.1))
    except BaseException as error:  # noqa: BLE001  # a check that exits is a broken one, too
        return _failed(f"{entry.value} raised {_said(error)}")
    if isinstance(result, Mapping):
        try:
            # For a package that does not import ours.
            result = CheckResult(**result)
        except Exception as error:  # noqa: BLE001  # names and values of somebody else
            return _failed(f"{entry.value} returned what is no result: {_said(error)}")
    if not isinstance(result, CheckResult):
        return _failed(f"{entry.value} returned {result!r:.80}; expected an ezpz_topo.CheckResult")
    said = {key: getattr(result, key) for key in ("status", "message", "remedy")}
    return {**said, "details": dict(result.details)}


def _failed(message: str) -> dict[str, Any]:
    trace = traceback.format_exc() if sys.exc_info()[0] else ""
    return {"broken": message, "details": {"traceback": trace} if trace else {}}


def _said(error: BaseException) -> str:
    words = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


# The command: its words, and what the checks said as a table or as JSON.

_COLOURS: Final = {"ok": "green", "warning": "yellow", "error": "red"}
_NARROWEST_COLUMN = 16  # of what was found: beside names that leave less, lines are too long


def table(results: Sequence[CheckResult], seconds: float) -> str:
    """Return the results for people, a row or more for each."""
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
    counts = {status: sum(result.status == status for result in results) for status in _COLOURS}
    keys = ("name", "status", "message", "remedy", "source", "seconds", "details")
    checks = [{key: getattr(result, key) for key in keys} for result in results]
    document = {"checks": checks, "counts": counts, "seconds": round(seconds, 3)}
    return json.dumps(document, indent=2).encode()


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
    # What others printed may steer a terminal.
    plain = "".join(c if c.isprintable() else " " for c in text)
    return textwrap.wrap(plain, width, break_on_hyphens=False) or [""]


def _coloured(status: str, word: str) -> str:
    """Return the word, coloured where standard output is a terminal and NO_COLOR is not set."""
    if not sys.stdout.isatty():
        return word
    from termcolor import colored  # noqa: PLC0415  # only a terminal needs it

    return colored(word, _COLOURS[status])


HELP: Final = f"""\
usage: ezpz doctor [--only=NAME,...] [--json] [--timeout=SECONDS]
       ezpz doctor --list

Check what training needs here: devices, two ranks that reduce, MPI, scheduler,
hosts, room on disk, ... Each result is ok, a warning or an error, with a
remedy. Every installed package can contribute checks. They run at once, each in
its own process.

options:
  --only=NAME,...    these checks alone
  --json             the same for programs
  --list             the names of the checks, and the package that each is of
  --timeout=SECONDS  how long each has, {TIMEOUT:g} if not told; what is not done by then
                     hangs, and is an error. While it is still importing torch
                     its time has not begun
  -h, --help         this page
  --version          the version

examples:
  ezpz doctor
  ezpz doctor --only=mpi,all-reduce
  ezpz doctor --timeout=60                     on a slow file system
  ezpz doctor --json | python -m json.tool

exit status: 0, also with warnings; 1 one check at least says error; 2 wrong
usage, or nothing could be checked or written"""

_NAME: Final = "ezpz doctor"
_FLAGS: Final = ("json", "list")
_VALUES: Final = ("only", "timeout")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ezpz doctor`` with these words (default: the process's) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
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
        checks = find_checks(only)
        names = max(len(check.name) for check in checks)
        _print("\n".join(f"{check.name:<{names}}  {check.source}" for check in checks))
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
