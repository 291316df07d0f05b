"""The command ``ezpz test``: its options, and the start of the test on every rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, Final

from ezpz import _streams
from ezpz._version import __version__


class UsageError(Exception):
    """The words of the command line make no sense, or not together."""


WRAPS: Final = ("auto", "ddp", "fsdp2", "zero1", "none")
# What goes around a pipeline's part: of the others each backward pass would reduce.
_AROUND_PIPELINE: Final = ("auto", "none", "fsdp2")
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_FEWEST: Final = {"steps": 4, "seed": 0}
_LARGEST: Final = 2**31 - 1


def option(default: Any, value: str, said: str, read: Callable[[str], Any] | None = None) -> Any:
    """Return the field of an option: what it takes, its help, and what makes a value of a word."""
    return field(default=default, metadata={"value": value, "help": said, "read": read})


def dtype_of(text: str) -> str:
    if text not in ("fp32", "bf16"):
        raise UsageError(f"--dtype={text}; expected fp32 or bf16")
    return text


def _sizes(text: str) -> tuple[int, ...]:
    """Return the bytes of ``4K,1M``, in order; none of ``none``."""
    if text == "none":
        return ()
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


@dataclass(frozen=True)
class Settings:
    """A test, as asked. A number that is 0 is chosen by the device, as are empty texts and None."""

    tp: int = option(1, "N", "ranks that share each layer: tensor parallel (default 1)")
    pp: int = option(1, "N", "ranks that share the layers out: pipeline (1)")
    cp: int = option(1, "N", "ranks that share each sequence: context parallel (1)")
    wrap: str = option("auto", "KIND", "ddp, fsdp2, zero1, none (ddp; with --pp none)")
    steps: int = option(40, "N", "steps to train (40)")
    batch: int = option(8, "N", "sequences a step of each data-parallel rank (8)")
    seq: int = option(0, "N", "tokens of a sequence (128; on accelerators 1024)")
    layers: int = option(0, "N", "layers of the Llama (4; on accelerators 12)")
    dim: int = option(0, "N", "its width (128; on accelerators 1024); --tp may raise it")
    dtype: str = option(
        "", "TYPE", "fp32 or bf16, to compute in (fp32; on accelerators bf16)", dtype_of
    )
    seed: int = option(42, "N", "of weights and data (42)")
    sizes: tuple[int, ...] | None = option(  # in bytes
        None, "LIST", "all-reduce messages such as 4K,1M,64M; none: do not measure", _sizes
    )
    pairs: bool = option(False, "", "all-reduce within each pair of nodes as well: which is slow?")
    json: bool = option(False, "", "the result for programs, on standard output")
    outdir: str = option("", "DIR", "keep the run there: metrics.jsonl, result.json")

    def __post_init__(self) -> None:
        wrap, pp = self.wrap, self.pp
        if wrap not in WRAPS:
            raise UsageError(f"--wrap={wrap}; expected one of {', '.join(WRAPS)}")
        if pp > 1 and wrap not in _AROUND_PIPELINE:
            raise UsageError(
                f"--wrap={wrap} with --pp={pp}; expected none or fsdp2: around a pipeline's part, "
                "which runs several times a step, no other goes"
            )
        if pp > 1 and self.batch % pp:
            raise UsageError(
                f"--batch={self.batch} with --pp={pp}; expected a multiple of {pp}: the pipeline "
                "runs so many parts of a batch at once"
            )


# Its words, and those of the launcher.


def options_of(settings: type[Any]) -> dict[str, Field[Any]]:
    return {f"--{one.name}": one for one in fields(settings)}


def take(words: Sequence[str], settings: type[Any] = Settings) -> tuple[list[str], list[str]]:
    """Part the words that are ours, as ``--name=value`` or ``--name``, from all others."""
    options = options_of(settings)
    ours: dict[str, str] = {}
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in options:
            others.append(word)
            continue
        takes = options[flag].metadata["value"]
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


def part_words(
    words: Sequence[str], settings: type[Any], name: str
) -> tuple[list[str], list[str], Mapping[str, Any]]:
    """Return a command's own words, the launcher's, and what these say."""
    import ezpz_launch  # noqa: PLC0415  # a page of help does not need it

    ours, others = take(words, settings)
    try:
        launch, command = ezpz_launch.split(others)
    except ezpz_launch.UsageError as error:
        said = _with_hint(str(error), others, list(options_of(settings)))
        raise UsageError(said.replace("ezpz-launch --help", f"{name} --help")) from error
    if command or "module" in launch or "code" in launch:
        raise UsageError(
            f"{' '.join(others)!r} has a command in it; expected options only; a script of yours "
            "is started by ezpz launch"
        )
    return ours, others, launch


def _with_hint(said: str, words: Sequence[str], options: Sequence[str]) -> str:
    """Return what the launcher said of its options, with ours in mind."""
    import difflib  # noqa: PLC0415  # only a wrong word needs it
    import re  # noqa: PLC0415  # as above

    every = [*options, *re.findall(r"did you mean (\S+)\?", said)]
    for word in words:
        close = difflib.get_close_matches(word.partition("=")[0], every, n=1)
        if close and f"unknown option {word!r}" in said:
            return f"unknown option {word!r}; did you mean {close[0]}?"
    return said


def parse(words: Sequence[str], settings: type[Any] = Settings) -> Any:
    """Return the settings that words of `take` make."""
    options, found = options_of(settings), dict[str, Any]()
    for word in words:
        flag, _, text = word.partition("=")
        one = options[flag]
        if read := one.metadata["read"]:
            found[one.name] = read(text)
        elif type(one.default) is int:
            found[one.name] = _number(one.name, text)
        else:
            found[one.name] = text if type(one.default) is str else True
    return settings(**found)


def _number(name: str, text: str) -> int:
    fewest = _FEWEST.get(name, 1)
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not fewest <= number <= _LARGEST:
        raise UsageError(f"--{name}={text}; expected a whole number, {fewest} or more")
    return number


def run_command(
    argv: Sequence[str] | None, name: str, page: str, run: Callable[[Sequence[str]], int]
) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if {"-h", "--help"} & set(words):
            return _streams.print_page(page, name)
        if words == ["--version"]:
            return _streams.print_page(__version__, name)
        return run(words)
    except UsageError as error:
        _streams.complain(str(error), name)
        return 2
    except KeyboardInterrupt:
        return 130


def page_of(head: str, settings: type[Any], tail: str) -> str:
    """Return a page of help, with a line for each option."""
    lines = []
    for flag, one in options_of(settings).items():
        value = f"={one.metadata['value']}" if one.metadata["value"] else ""
        lines.append(f"  {flag + value:<15} {one.metadata['help']}")
    return "\n".join([head, *lines, tail])


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
    return run_command(argv, _NAME, page_of(_HEAD, Settings, _TAIL), _launch)


def complain(text: str) -> None:
    _streams.complain(text, _NAME)


def _launch(words: Sequence[str]) -> int:
    import ezpz_launch  # noqa: PLC0415  # a page of help does not need it

    ours, others, options = part_words(words, Settings, _NAME)
    settings: Settings = parse(ours)
    if "dry-run" in options and settings.json:
        others = [*others, "--json"]
    return ezpz_launch.main([*others, *_width(), "-m", "ezpz.test_dist", *ours])


def _width() -> list[str]:
    """Return what tells the ranks, who have no terminal, how wide ours is."""
    if "COLUMNS" in os.environ or sys.stdout is None or not sys.stdout.isatty():
        return []
    columns = os.get_terminal_size(sys.stdout.fileno()).columns
    # Some pseudo-terminals are 0 columns wide.
    return ["--env", f"COLUMNS={min(columns, 120)}"] if columns else []
