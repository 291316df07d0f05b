"""The command ``ezpz-obs``: what a run's numbers look like."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
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
  tail      say what a live run records, until it ends (or Ctrl-C)
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
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _answer(words)
        if sys.stdout is not None:
            sys.stdout.flush()
    except ObsError as error:
        _complain(str(error))
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:
        # `ezpz-obs tail RUN | head -1` is no failure, nor is the interpreter's own flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        _complain(f"{error.filename or 'standard output'}: {error.strerror or error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _complain(text: str) -> None:
    line = " ".join(text.split("\n"))
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed: no one is told
        print(f"ezpz-obs: {line}", file=sys.stderr, flush=True)


def _answer(words: list[str]) -> None:
    if sys.stdout is None:
        raise UsageError("standard output is closed; expected somewhere to write to")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if {"-h", "--help"} & set(words):
        print(HELP)
        return
    if words == ["--version"]:
        print(__version__)
        return
    if not words or words[0] not in _COMMANDS:
        said = repr(words[0]) if words else "nothing"
        raise UsageError(f"{said}; expected one of {', '.join(_COMMANDS)}; see ezpz-obs --help")
    _meant(words)()


def _meant(words: Sequence[str]) -> Callable[[], None]:
    command, plain, options = words[0], list[str](), dict[str, str | bool]()
    signature = inspect.signature(_COMMANDS[command])
    defaults = {
        name.replace("_", "-"): one.default
        for name, one in signature.parameters.items()
        if one.kind is one.KEYWORD_ONLY
    }
    for word in words[1:]:
        name, equals, value = word[2:].partition("=")
        if not word.startswith("-"):
            plain.append(word)
        elif not word.startswith("--") or name not in defaults:
            known = ", ".join(f"--{option}" for option in defaults) or "none"
            raise UsageError(
                f"{command}: unknown option {word!r}; expected {known}; see ezpz-obs --help"
            )
        elif (is_flag := defaults[name] is False) == bool(equals):
            form = f"--{name}" if is_flag else f"--{name}=VALUE"
            raise UsageError(f"{command}: {word!r}; expected {form}")
        elif equals and not value:
            raise UsageError(f"{command}: {word!r} is empty; expected a value")
        else:
            options[name.replace("-", "_")] = value or True
    try:
        signature.bind(*plain, **options)
    except TypeError as error:
        raise UsageError(
            f"{' '.join(words)!r}: {error}; expected one of the forms of ezpz-obs --help"
        ) from None
    return partial(_COMMANDS[command], *plain, **options)


def _report(*runs: str, out: str = "") -> None:
    if not runs:
        raise UsageError("report: no RUN; expected one at least: ezpz-obs report outputs/run")
    from ._report import write_report

    page, text, *_ = write_report(runs, out or None)
    print(f"{page}\n{text}")


def _plot(run: str, *metrics: str) -> None:
    from ._report.terminal import plot

    plot(run, *metrics)


def _tail(run: str, *, lines: str = "10", no_follow: bool = False) -> None:
    if not lines.isdecimal():
        raise UsageError(f"tail: --lines={lines}; expected how many: --lines=10")
    from ._report.terminal import tail

    tail(run, follow=not no_follow, lines=int(lines))


def _export(run: str, *, csv: str = "", parquet: str = "") -> None:
    if not csv and not parquet:
        raise UsageError("export: no file; expected --csv=FILE or --parquet=FILE")
    from ._table import export

    count = export(run, csv=csv or None, parquet=parquet or None)
    print(f"{count:,} records in {' and '.join(name for name in (csv, parquet) if name)}")


def _replay(run: str, *, to: str) -> None:
    from ._sinks import replay

    print(f"{replay(run, to):,} records sent to {to}")


_COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "report": _report, "plot": _plot, "tail": _tail, "export": _export, "replay": _replay,
}  # fmt: skip
