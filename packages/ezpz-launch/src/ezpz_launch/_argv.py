"""Split a command line into our options and the user's command, which is never parsed.

Fire alone would swallow the user's flags, lose what follows ``--`` and turn ``1e-4`` into
a float, so it only ever sees what stands before the first word of the command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from ._errors import UsageError


class Option(NamedTuple):
    """One option of ours.

    Attributes:
        name: Its long name.
        short: Its letter, if it has one.
        value: What it takes; empty for a switch.
        help: What it does, in one line.
        many: Whether it can be repeated.
        last: Whether the user's command begins with it, as with Python's own -m.
    """

    name: str
    short: str = ""
    value: str = ""
    help: str = ""
    many: bool = False
    last: bool = False


OPTIONS: tuple[Option, ...] = (
    Option("nproc", "n", "N", "ranks in all; default: one a device, else one per two cores"),
    Option("ppn", value="N", help="ranks on each host; default: one a device"),
    Option("nodes", "N", "N", "use the first N hosts; default: all of the job"),
    Option("hostfile", value="FILE", help="the hosts to use, one a line; default: the job's"),
    Option("include", value="LIST", help="use these hosts only, such as nid[001-004]"),
    Option("exclude", value="LIST", help="do not use these hosts"),
    Option("launcher", value="KIND", help="auto, pals, mpiexec, openmpi, srun, torchrun, spawn"),
    Option("machine", value="NAME", help="plan for this machine (ezpz-topo machines lists them)"),
    Option("option", value="NAME", help="use this option of the machine; repeatable", many=True),
    Option("cpu-bind", value="LIST", help="none, a list of the machine's, or cores: 0-7:8-15"),
    Option("env", value="K=V", help="set this variable for every rank; repeatable", many=True),
    Option("one-device", help="each rank sees one device only, its own"),
    Option("log-dir", value="DIR", help="write each rank's output to files of its own in DIR"),
    Option("tee", help="with --log-dir: show the output here as well"),
    Option("only-ranks", value="LIST", help="show the output of these ranks only, such as 0,4-7"),
    Option("prefix", help="begin each line of output with [rank@host]"),
    Option("idle-timeout", value="TIME", help="end a launch that is silent for so long: 600, 10m"),
    Option("grace", value="TIME", help="from SIGTERM to SIGKILL; default: 7 seconds"),
    Option("signal-before", value="TIME", help="send SIGUSR1 so long before the job's end"),
    Option("retries", value="N", help="start again after a failure, up to N times"),
    Option("nested", help="allow a launch inside a rank of another"),
    Option("launcher-args", value="TEXT", help="words for the launcher itself, quoted as one"),
    Option("module", "m", "MODULE", "run python -m MODULE; what follows belongs to it", last=True),
    Option("code", "c", "CODE", "run python -c CODE; what follows belongs to it", last=True),
    Option("dry-run", help="print what would be run, and why, and stop"),
    Option("json", help="with --dry-run: the same for programs"),
    Option("version", help="print the version and stop"),
    Option("help", "h", help="print this page and stop"),
)

_BY_FLAG = {f"--{option.name}": option for option in OPTIONS} | {
    f"-{option.short}": option for option in OPTIONS if option.short
}

_HABITS = {
    "-np": "-n",
    "--np": "-n",
    "--ntasks": "-n",
    "-ppn": "--ppn",
    "-npernode": "--ppn",
    "--npernode": "--ppn",
    "--nproc-per-node": "--ppn",
    "--nproc_per_node": "--ppn",
    "--ntasks-per-node": "--ppn",
    "--nnodes": "-N",
    "-f": "--hostfile",
    "--machinefile": "--hostfile",
    "-x": "--env",
    "-genv": "--env",
}
"""What other launchers call it, to the flag that is meant."""

Options = dict[str, str | bool | list[str]]
"""By long name: a string, True for a switch, or a list of what can be repeated."""


def split(argv: Sequence[str]) -> tuple[Options, tuple[str, ...]]:
    """Split ``argv`` at the first word that is not ours, or at ``--``.

    Returns:
        Our options by long name, and the user's command, as it is; but for ``-c``, see `_unquoted`.

    Raises:
        UsageError: An option is unknown, is given twice, lacks its value, or has one that
            it does not take.
    """
    options: Options = {}
    words = list(argv)
    while words:
        word = words[0]
        if word == "--":
            return options, tuple(words[1:])
        if not word.startswith("-") or word == "-":
            break
        flag, attached, text = _flag_of(words.pop(0))
        option = _BY_FLAG[flag]
        if option.name in options and not option.many:
            raise UsageError(f"{flag} is given twice; expected once")
        value = _value_of(option, flag, text if attached else None, words)
        if option.last:
            text = _unquoted(str(value)) if option.name == "code" else str(value)
            return options, (sys.executable, f"-{option.short}", text, *words)
        if option.many:
            held = options.setdefault(option.name, [])
            assert isinstance(held, list)
            held.append(str(value))
        else:
            options[option.name] = value
    return options, tuple(words)


def _unquoted(code: str) -> str:
    """Take off quotes that are left around the whole code.

    Who writes ``-c "'import ezpz'"`` means what is within: Python would take it for a mere text,
    do nothing, and end with 0.
    """
    quote, within = code[:1], code[1:-1]
    is_quoted = quote in ("'", '"') and len(code) > 1 and code.endswith(quote)
    return within if is_quoted and quote not in within and "\\" not in within else code


def _flag_of(word: str) -> tuple[str, bool, str]:
    flag, attached, text = word.partition("=")
    if flag in _BY_FLAG:
        return flag, bool(attached), text
    if not word.startswith("--") and _is_attached(flag):
        # -n4, as mpiexec and srun users write it
        return word[:2], True, word[2:]
    raise UsageError(
        f"unknown option {word!r}; {_hint(flag)} options of the command go after its name"
    )


def _is_attached(flag: str) -> bool:
    option = _BY_FLAG.get(flag[:2])
    # -np is mpiexec's, and no number of ranks; -env is a slip, and no code.
    if option is None or flag in _HABITS or f"-{flag}" in _BY_FLAG:
        return False
    return option.value != "N" or not flag[2:3].isalpha()


def _hint(flag: str) -> str:
    meant = _HABITS.get(flag) or (f"-{flag}" if f"-{flag}" in _BY_FLAG else "")
    if not meant:
        import difflib  # noqa: PLC0415  # only a wrong word needs it

        close = difflib.get_close_matches(flag, _BY_FLAG, n=1)
        meant = close[0] if close else ""
    return f"did you mean {meant}?" if meant else "see ezpz-launch --help;"


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
