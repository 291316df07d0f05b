"""The command ``ezpz-obs``: what a run's numbers look like."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Final

from ._errors import ObsError
from ._version import __version__

HELP: Final = """\
usage: ezpz-obs report RUN... [--out=FOLDER]
       ezpz-obs plot RUN [METRIC...]
       ezpz-obs tail RUN [--lines=N] [--no-follow]
       ezpz-obs export RUN --csv=FILE | --parquet=FILE
       ezpz-obs replay RUN --to=SINK

Show the metrics that a History wrote. A RUN is its folder, or the file.

commands:
  report    write report/report.html (one page that needs no network), report.md
            and its pictures into RUN; of several runs the curves are overlaid,
            in the first one
  plot      draw metrics on the terminal; without METRIC the losses
  tail      print what a live run records, until it ends (or Ctrl-C)
  export    write the records as a table: step, time, a column for each metric
  replay    send the records to another sink: csv, tensorboard, wandb, ...

options:
  -h, --help   this page
  --version    the version

examples:
  ezpz-obs report outputs/run
  ezpz-obs report outputs/run-a outputs/run-b --out=outputs/a-or-b
  ezpz-obs plot outputs/run loss eval/loss
  ezpz-obs tail outputs/run --lines=3
  ezpz-obs export outputs/run --parquet=run.parquet
  ezpz-obs replay outputs/run --to=tensorboard

exit status: 0; 1 it could not be done, and one line says why; 2 wrong usage"""


class UsageError(ObsError):
    """The words of the command line make no sense."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ezpz-obs`` with these words (default: the process's) and return its exit status."""
    if argv is None:
        argv = sys.argv[1:]
    words = list(argv)
    try:
        _run(words)
        if sys.stdout is not None:
            sys.stdout.flush()
    except UsageError as error:
        _complain(f"{error}; see ezpz-obs --help")
        return 2
    except ObsError as error:
        _complain(str(error))
        return 1
    except BrokenPipeError:
        # `ezpz-obs tail RUN | head -1` succeeds; the interpreter's own flush must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        _complain(f"{error.filename or 'standard output'}: {error.strerror or error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error is closed
        print(f"ezpz-obs: {' '.join(text.split())}", file=sys.stderr, flush=True)


def _run(words: list[str]) -> None:
    if sys.stdout is None:
        raise UsageError("standard output is closed; expected somewhere to write to")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if "-h" in words or "--help" in words:
        print(HELP)
    elif words == ["--version"]:
        print(__version__)
    else:
        call = _parse(words)
        call.function(*call.arguments, **call.options)


@dataclass(frozen=True)
class Call:
    """A command as the words have it, before it runs."""

    function: Callable[..., None]
    arguments: tuple[str, ...]
    options: dict[str, str]


def _parse(words: list[str]) -> Call:
    """Let Fire read the words; its pages of usage become one line."""
    import fire  # 50 ms

    if not words or words[0] not in _COMMANDS:
        given = repr(words[0]) if words else "no command"
        raise UsageError(f"{given}; expected one of {', '.join(_COMMANDS)}")
    if "--" in words:
        raise UsageError("'--' is an unknown option")
    commands = {name: _as_deferred_call(function) for name, function in _COMMANDS.items()}
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            call: Call = fire.Fire(commands, words, name="ezpz-obs", serialize=lambda _call: None)
    except fire.core.FireExit as error:
        problem = error.trace.elements[-1].ErrorAsStr()
        raise UsageError(f"{words[0]}: {problem}") from None
    for name, value in call.options.items():
        option = f"--{name.replace('_', '-')}"
        if name == "no_follow":
            if value != "True":
                raise UsageError(f"{words[0]}: {option}={value}; expected {option}")
        elif value == "True":  # Fire's value of an option without one
            raise UsageError(f"{words[0]}: {option} has no value; expected {option}=VALUE")
        elif not value:
            raise UsageError(f"{words[0]}: {option} is empty; expected {option}=VALUE")
    return call


def _as_deferred_call(function: Callable[..., None]) -> Callable[..., Call]:
    """Return a function of the same signature that only keeps what it is called with, as text."""
    import fire

    @wraps(function)
    def keep(*arguments: str, **options: str) -> Call:
        return Call(function, arguments, options)

    parsed: Callable[..., Call] = fire.decorators.SetParseFn(str)(keep)
    return parsed


def _report(*runs: str, out: str = "") -> None:
    if not runs:
        raise UsageError("report: no RUN; expected one at least")
    from ._report import write_report

    page, text, *_ = write_report(runs, out or None)
    print(f"{page}\n{text}")


def _plot(run: str, *metrics: str) -> None:
    from ._report.terminal import plot

    plot(run, *metrics)


def _tail(run: str, *, lines: str = "10", no_follow: str = "") -> None:
    if not lines.isdecimal():
        raise UsageError(f"tail: --lines={lines}; expected a number: --lines=10")
    from ._report.terminal import tail

    tail(run, follow=not no_follow, lines=int(lines))


def _export(run: str, *, csv: str = "", parquet: str = "") -> None:
    if not csv and not parquet:
        raise UsageError("export: no file; expected --csv=FILE or --parquet=FILE")
    from ._table import export

    count = export(run, csv=csv or None, parquet=parquet or None)
    print(f"{count:,} records in {' and '.join(filter(None, (csv, parquet)))}")


def _replay(run: str, *, to: str) -> None:
    from ._sinks import replay

    print(f"{replay(run, to):,} records sent to {to}")


_COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "report": _report,
    "plot": _plot,
    "tail": _tail,
    "export": _export,
    "replay": _replay,
}
