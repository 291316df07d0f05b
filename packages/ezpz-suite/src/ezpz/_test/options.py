"""The options of ``ezpz test``, and the words of a command line that are theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple


class UsageError(Exception):
    """The words of the command line make no sense, or not together."""


class Option(NamedTuple):
    """One option of ours.

    Attributes:
        name: Its name, after ``--``.
        value: What it takes; empty for a switch.
        help: What it does, in one line.
    """

    name: str
    value: str
    help: str


OPTIONS: Final = (
    Option("tp", "N", "ranks that share each layer: tensor parallel (default 1)"),
    Option("pp", "N", "ranks that share the layers out: pipeline (1)"),
    Option("cp", "N", "ranks that share each sequence: context parallel (1)"),
    Option("wrap", "KIND", "ddp, fsdp, fsdp2, zero1, deepspeed, none (ddp; with --pp none)"),
    Option("steps", "N", "steps to train (40)"),
    Option("batch", "N", "sequences a step of each data-parallel rank (8)"),
    Option("seq", "N", "tokens of a sequence (128; on accelerators 1024)"),
    Option("layers", "N", "layers of the Llama (4; on accelerators 12)"),
    Option("dim", "N", "its width (128; on accelerators 1024; or the next that --tp divides)"),
    Option("dtype", "TYPE", "fp32 or bf16, what is computed in (fp32; on accelerators bf16)"),
    Option("seed", "N", "of weights and data (42)"),
    Option("sizes", "LIST", "all-reduce messages such as 4K,1M,64M; none: do not measure"),
    Option("pairs", "", "all-reduce within each pair of nodes as well: which one is slow?"),
    Option("json", "", "the result for programs, on standard output"),
    Option("outdir", "DIR", "keep the run there: metrics.jsonl, result.json"),
)

_BY_FLAG: Final = {f"--{option.name}": option for option in OPTIONS}


def take(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the words that are ours from those that are not.

    Returns:
        Ours, each as ``--name=value`` or ``--name``; and all others in their order.

    Raises:
        UsageError: One of ours is given twice, lacks its value, or has one and takes none.
    """
    ours: dict[str, str] = {}
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        option = _BY_FLAG.get(flag)
        if option is None:
            others.append(word)
            continue
        if flag in ours:
            raise UsageError(f"{flag} is given twice; expected once")
        if option.value and not equals:
            if not left or left[0].startswith("--"):
                raise UsageError(f"{flag} needs a value; expected {flag}={option.value}")
            value = left.pop(0)
        if equals and not option.value:
            raise UsageError(f"{word}: {flag} takes no value")
        if option.value and not value:
            raise UsageError(f"{flag}= is empty; expected {flag}={option.value}")
        ours[flag] = f"{flag}={value}" if option.value else flag
    return list(ours.values()), others


def closest(word: str, others: Sequence[str] = ()) -> str:
    """Return the option, of ours or of others, that a misspelt word probably means; or nothing."""
    import difflib  # noqa: PLC0415  # only a wrong word needs it

    close = difflib.get_close_matches(word.partition("=")[0], [*_BY_FLAG, *others], n=1)
    return close[0] if close else ""
