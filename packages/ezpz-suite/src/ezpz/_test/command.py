"""The command ``ezpz test``: starts the test on every rank of this allocation, or host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from ezpz import _streams
from ezpz._version import __version__

from .options import OPTIONS, UsageError, closest, take

_NAME: Final = "ezpz test"
_USAGE: Final = f"{_NAME} [OPTION...] [LAUNCH OPTION...]"
_WIDEST: Final = 120

_HEAD: Final = f"""\
usage: {_USAGE}

Train a small Llama on text that is already here (the Python standard library's sources), on
every rank of this job, or of this host. It ends with the loss curve, the throughput, and the
bandwidth of all-reduce by message size. Nothing is downloaded, and nothing written without
--outdir.

options:"""

_TAIL: Final = """
launch options: those of ezpz-launch, such as
  -n N, --ppn N, -N N      ranks in all, on each host; hosts
  --launcher KIND          auto, pals, mpiexec, openmpi, srun, torchrun, spawn
  --idle-timeout TIME      end a test that hangs, with the stacks of all ranks
  --dry-run                print what would be run, and why, and stop

examples:
  ezpz test                                one rank a device
  ezpz test -n 4 --tp=2 --pp=2             four ranks: tensor parallel in a pipeline
  ezpz test --wrap=fsdp2 --steps=100       sharded over all ranks
  ezpz test --pairs --sizes=64M --steps=4  which pair of nodes is slow?
  ezpz test --json > result.json           for programs
  ezpz-launch -m ezpz.test_dist --tp=2     the same, by your own launcher (srun, mpiexec, ...)

exit status: 0 the loss fell, all ranks agree and all values are finite; 1 one of these is not
so, and one line says which; 2 the words make no sense; else as of ezpz-launch."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ezpz test`` with these words (default: the process's) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if {"-h", "--help"} & set(words):
            return _streams.print_page(help_page(), _NAME)
        if words == ["--version"]:
            return _streams.print_page(__version__, _NAME)
        return _launch(words)
    except UsageError as error:
        complain(str(error))
        return 2


def help_page() -> str:
    """Return what ``ezpz test --help`` prints."""
    lines = [_HEAD]
    for option in OPTIONS:
        flag = f"--{option.name}={option.value}" if option.value else f"--{option.name}"
        lines.append(f"  {flag:<15} {option.help}")
    return "\n".join([*lines, _TAIL])


def complain(text: str) -> None:
    """Write a line of the test's to standard error."""
    _streams.complain(text, _NAME)


def _launch(words: Sequence[str]) -> int:
    """Check all words, then start the ranks with them."""
    import ezpz_launch  # noqa: PLC0415  # a page of help does not need it

    from .settings import parse  # noqa: PLC0415  # nor Fire

    ours, others = take(words)
    try:
        options, command = ezpz_launch.split(others)
    except ezpz_launch.UsageError as error:
        raise UsageError(_with_hint(str(error), others)) from error
    if command or "module" in options or "code" in options:
        raise UsageError(
            f"{' '.join(others)!r} has a command in it; expected options only; a script of yours "
            "is started by ezpz launch"
        )
    settings = parse(ours)
    if "dry-run" in options and settings.json:
        others = [*others, "--json"]
    return ezpz_launch.main([*others, *_width(), "-m", "ezpz.test_dist", *settings.words()])


def _with_hint(said: str, words: Sequence[str]) -> str:
    """Return what the launcher said of its options, with ours in mind."""
    import re  # noqa: PLC0415  # only a wrong word needs it

    theirs = re.search(r"did you mean (\S+)\?", said)
    for word in words:
        if f"unknown option {word!r}" in said:
            hint = closest(word, [theirs[1]] if theirs else [])
            if hint:
                return f"unknown option {word!r}; did you mean {hint}?"
    return said.replace("ezpz-launch --help", "ezpz test --help")


def _width() -> list[str]:
    """Return what tells the ranks, who have no terminal, how wide ours is."""
    if "COLUMNS" in os.environ or sys.stdout is None or not sys.stdout.isatty():
        return []
    columns = os.get_terminal_size(sys.stdout.fileno()).columns
    # Some pseudo-terminals are 0 columns wide.
    return ["--env", f"COLUMNS={min(columns, _WIDEST)}"] if columns else []
