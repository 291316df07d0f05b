"""Split a command line into our options and the user's command, which is never parsed.

Fire alone would swallow the user's flags, lose what follows ``--`` and turn ``1e-4`` into
a float, so it only ever sees what stands before the first word of the command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ._errors import UsageError


@dataclass(frozen=True, slots=True)
class Option:
    """One option of ours; ``value`` names what it takes, and is empty for a switch."""

    name: str
    short: str = ""
    value: str = ""
    help: str = ""


OPTIONS: tuple[Option, ...] = (
    Option("nproc", "n", "N", "ranks to start; default: one a device, else one per two cores"),
    Option("dry-run", help="print what would be run, and why, and stop"),
    Option("version", help="print the version and stop"),
    Option("help", "h", help="print this page and stop"),
)

_BY_FLAG = {f"--{option.name}": option for option in OPTIONS} | {
    f"-{option.short}": option for option in OPTIONS if option.short
}


def split(argv: Sequence[str]) -> tuple[dict[str, str | bool], tuple[str, ...]]:
    """Split ``argv`` at the first word that is not ours, or at ``--``.

    Returns:
        Our options by long name (a string, or True for a switch), and the user's command.

    Raises:
        UsageError: An option is unknown, is given twice, lacks its value, or has one that
            it does not take.
    """
    options: dict[str, str | bool] = {}
    words = list(argv)
    while words:
        word = words[0]
        if word == "--":
            return options, tuple(words[1:])
        if not word.startswith("-") or word == "-":
            break
        flag, attached, text = _flag_of(words.pop(0))
        option = _BY_FLAG[flag]
        if option.name in options:
            raise UsageError(f"{flag} is given twice; expected once")
        options[option.name] = _value_of(option, flag, text if attached else None, words)
    return options, tuple(words)


def _flag_of(word: str) -> tuple[str, bool, str]:
    flag, attached, text = word.partition("=")
    if flag in _BY_FLAG:
        return flag, bool(attached), text
    if not word.startswith("--") and word[:2] in _BY_FLAG:
        # -n4, as mpiexec and srun users write it
        return word[:2], True, word[2:]
    import difflib  # noqa: PLC0415  # only a wrong word needs it

    close = difflib.get_close_matches(flag, _BY_FLAG, n=1)
    hint = f"did you mean {close[0]}?" if close else "see ezpz-launch --help;"
    raise UsageError(f"unknown option {word!r}; {hint} options of the command go after its name")


def _value_of(option: Option, flag: str, attached: str | None, words: list[str]) -> str | bool:
    if not option.value:
        if attached is not None:
            raise UsageError(f"{flag}={attached!r}: {flag} takes no value")
        return True
    if attached is not None:
        return attached
    if not words or words[0] == "--":
        raise UsageError(f"{flag} needs a value; expected {flag} {option.value}")
    return words.pop(0)
