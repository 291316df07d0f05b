"""The command ``ezpz test``: its options, and the start of the test on every rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from ezpz import _streams
from ezpz._version import __version__


class UsageError(Exception):
    """The words of the command line make no sense, or not together."""


def take(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the words that are ours, as ``--name=value`` or ``--name``, from all others."""
    ours: dict[str, str] = {}
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in _TAKES:
            others.append(word)
            continue
        takes = _TAKES[flag]
        if flag in ours:
            raise UsageError(f"{flag} is given twice; expected once")
        if takes and not equals:
            if not left or left[0].startswith("--"):
                raise UsageError(f"{flag} needs a value; expected {flag}={takes}")
            value = left.pop(0)
        if equals and not takes:
            raise UsageError(f"{word}: {flag} takes no value")
        if takes and not value:
            raise UsageError(f"{flag}= is empty; expected {flag}={takes}")
        ours[flag] = f"{flag}={value}" if takes else flag
    return list(ours.values()), others


def closest(word: str, others: Sequence[str] = ()) -> str:
    """Return the option, of ours or of others, that a misspelt word probably means; or nothing."""
    import difflib  # noqa: PLC0415  # only a wrong word needs it

    close = difflib.get_close_matches(word.partition("=")[0], [*_TAKES, *others], n=1)
    return close[0] if close else ""


WRAPS: Final = ("auto", "ddp", "fsdp2", "zero1", "none")
# What goes around a pipeline's part: of the others each backward pass would reduce.
_AROUND_PIPELINE: Final = ("auto", "none", "fsdp2")
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_FEWEST: Final = {"steps": 4, "seed": 0}
_LARGEST: Final = 2**31 - 1


def _option(default: Any, value: str, said: str) -> Any:
    return field(default=default, metadata={"value": value, "help": said})


@dataclass(frozen=True)
class Settings:
    """A test, as asked. A number that is 0 is chosen by the device, as are empty texts and None."""

    tp: int = _option(1, "N", "ranks that share each layer: tensor parallel (default 1)")
    pp: int = _option(1, "N", "ranks that share the layers out: pipeline (1)")
    cp: int = _option(1, "N", "ranks that share each sequence: context parallel (1)")
    wrap: str = _option("auto", "KIND", "ddp, fsdp2, zero1, none (ddp; with --pp none)")
    steps: int = _option(40, "N", "steps to train (40)")
    batch: int = _option(8, "N", "sequences a step of each data-parallel rank (8)")
    seq: int = _option(0, "N", "tokens of a sequence (128; on accelerators 1024)")
    layers: int = _option(0, "N", "layers of the Llama (4; on accelerators 12)")
    dim: int = _option(0, "N", "its width (128; on accelerators 1024); --tp may raise it")
    dtype: str = _option("", "TYPE", "fp32 or bf16, to compute in (fp32; on accelerators bf16)")
    seed: int = _option(42, "N", "of weights and data (42)")
    sizes: tuple[int, ...] | None = _option(  # in bytes
        None, "LIST", "all-reduce messages such as 4K,1M,64M; none: do not measure"
    )
    pairs: bool = _option(False, "", "all-reduce within each pair of nodes as well: which is slow?")
    json: bool = _option(False, "", "the result for programs, on standard output")
    outdir: str = _option("", "DIR", "keep the run there: metrics.jsonl, result.json")

    def __post_init__(self) -> None:
        wrap, pp = self.wrap, self.pp
        for is_wrong, said in (
            (wrap not in WRAPS, f"--wrap={wrap}; expected one of {', '.join(WRAPS)}"),
            (self.dtype not in ("", "fp32", "bf16"),
             f"--dtype={self.dtype}; expected fp32 or bf16"),
            (pp > 1 and wrap not in _AROUND_PIPELINE,
             (f"--wrap={wrap} with --pp={pp}; expected none or fsdp2: around a pipeline's part, "
             "which runs several times a step, no other goes")),
            (pp > 1 and self.batch % pp,
             (f"--batch={self.batch} with --pp={pp}; expected a multiple of {pp}: the pipeline "
             "runs so many parts of a batch at once")),
        ):  # fmt: skip
            if is_wrong:
                raise UsageError(said)


OPTIONS: Final = fields(Settings)
_TAKES: Final = {f"--{one.name}": one.metadata["value"] for one in OPTIONS}


def parse(words: Sequence[str]) -> Settings:
    found: dict[str, Any] = {}
    for word in words:
        name, _, text = word.removeprefix("--").partition("=")
        default = getattr(Settings, name)
        if name == "sizes":
            found[name] = _sizes(text)
        elif type(default) is int:
            found[name] = _number(name, text)
        else:
            found[name] = text if type(default) is str else True
    return Settings(**found)


def _number(name: str, text: str) -> int:
    fewest = _FEWEST.get(name, 1)
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not fewest <= number <= _LARGEST:
        raise UsageError(f"--{name}={text}; expected a whole number, {fewest} or more")
    return number


def _sizes(text: str) -> tuple[int, ...] | None:
    """Return the bytes of ``4K,1M``, in order; None of nothing, none of ``none``."""
    if not text or text == "none":
        return () if text else None
    found = []
    for one in text.split(","):
        digits, unit = (one[:-1], _UNITS[one[-1]]) if one[-1:] in _UNITS else (one, 1)
        if not (digits.isascii() and digits.isdecimal() and len(digits) < 16):
            raise UsageError(f"--sizes={text}: {one!r}; expected sizes in bytes such as 4K,1M,64M")
        size = int(digits) * unit
        if size < 4 or size % 4:
            raise UsageError(f"--sizes={text}: {one}; expected a multiple of 4 bytes (float32)")
        found.append(size)
    return tuple(sorted(set(found)))


_NAME: Final = "ezpz test"
_HEAD: Final = f"""\
usage: {_NAME} [OPTION...] [LAUNCH OPTION...]

Train a small Llama on text that is already here (the Python standard library's
sources), on every rank of this job, or of this host. It ends with the loss
curve, the throughput, and the bandwidth of all-reduce by message size. Nothing
is downloaded, and nothing written without --outdir.

options:"""

_TAIL: Final = """
launch options: those of ezpz-launch, such as
  -n N, --ppn N, -N N      ranks in all, on each host; hosts
  --launcher KIND          auto, pals, mpiexec, openmpi, srun, torchrun, spawn
  --idle-timeout TIME      end a test that hangs, with the stacks of all ranks
  --dry-run                print what would be run, and why, and stop

examples:
  ezpz test                                one rank a device
  ezpz test -n 4 --tp=2 --pp=2             tensor parallel in a pipeline
  ezpz test --wrap=fsdp2 --steps=100       sharded over all ranks
  ezpz test --pairs --sizes=64M --steps=4  which pair of nodes is slow?
  ezpz test --json > result.json           for programs
  ezpz-launch -m ezpz.test_dist --tp=2     the same, by your own launcher

exit status: 0 the loss fell, all ranks agree and all values are finite; 1 one
of these is not so, and one line says which; 2 wrong usage; else as of
ezpz-launch."""


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
    flags = (f"{flag}={takes}" if takes else flag for flag, takes in _TAKES.items())
    helps = (one.metadata["help"] for one in OPTIONS)
    lines = (f"  {flag:<15} {said}" for flag, said in zip(flags, helps, strict=True))
    return "\n".join([_HEAD, *lines, _TAIL])


def complain(text: str) -> None:
    _streams.complain(text, _NAME)


def _launch(words: Sequence[str]) -> int:
    import ezpz_launch  # noqa: PLC0415  # a page of help does not need it

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
    return ezpz_launch.main([*others, *_width(), "-m", "ezpz.test_dist", *ours])


def _with_hint(said: str, words: Sequence[str]) -> str:
    """Return what the launcher said of its options, with ours in mind."""
    import re  # noqa: PLC0415  # only a wrong word needs it

    theirs = re.findall(r"did you mean (\S+)\?", said)
    for word in words:
        if f"unknown option {word!r}" in said and (hint := closest(word, theirs)):
            return f"unknown option {word!r}; did you mean {hint}?"
    return said.replace("ezpz-launch --help", "ezpz test --help")


def _width() -> list[str]:
    """Return what tells the ranks, who have no terminal, how wide ours is."""
    if "COLUMNS" in os.environ or sys.stdout is None or not sys.stdout.isatty():
        return []
    columns = os.get_terminal_size(sys.stdout.fileno()).columns
    # Some pseudo-terminals are 0 columns wide.
    return ["--env", f"COLUMNS={min(columns, 120)}"] if columns else []
