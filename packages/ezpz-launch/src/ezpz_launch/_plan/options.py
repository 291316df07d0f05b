"""The options of ezpz-launch, as one table: parsed, checked, hinted at and explained from it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ezpz_launch._errors import UsageError

# Whole numbers as people list them: cores as ``4-7``, or ``0-7,104-111``.

# As many as there can be, and few enough that a slip of the finger fills no memory.
_RANGE = r"([0-9]{1,6})(?:-([0-9]{1,6}))?"


def read_ranges(text: str) -> list[int]:
    """Return the cores of a list of ranges."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(_RANGE, part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if high < low:
            raise UsageError(f"cores {text!r}: {part!r}; expected ranges such as 0-7,104-111")
        numbers += range(low, high + 1)
    return numbers


# How the text of an option is read: each of these takes its flag and the text.


def _text(_flag: str, text: str) -> str:
    return text


def _number(flag: str, text: str) -> int:
    if not re.fullmatch("-?[0-9]{1,9}", text):
        raise UsageError(f"{flag} {text}: expected a whole number")
    return int(text)


def _seconds(flag: str, text: str) -> float:
    # Not float() alone, which also takes nan, 1e9 and 1_0.
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([smh]?)", text)
    if not match:
        raise UsageError(f"{flag} {text!r}: expected a time of 0 or more: 90, 1.5, 90s, 10m, 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _words(flag: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"{flag} {text!r}: {error}; expected words quoted as in a shell"
        ) from error


# The table.


class Option(NamedTuple):
    name: str  # its long name
    help: str
    value: str = ""  # what it takes; empty for a switch
    short: str = ""  # its letter
    implied: str = ""  # its value where none is attached to it, nor a number follows
    also: str = ""  # what other launchers call it, which is understood as well
    read: Callable[[str, str], object] = _text
    many: bool = False  # whether it can be repeated: a tuple
    last: bool = False  # whether the user's command begins with it, as with Python's own -m
    check: Callable[[Any], bool] | None = None
    """Whether a value other than the default is one (of what can be repeated: each)."""
    expected: str = ""  # what the check expects, in words
    needs: str = ""  # an option without which it means nothing
    says: tuple[str, str] | None = None
    """How a dry run says it, unless a decision does: a label, and a format of the value."""
    field: str = ""  # its attribute of `Request`; empty where there is none
    default: object = None

    @property
    def flag(self) -> str:
        return f"-{self.short}" if self.short else f"--{self.name}"


def _row(what: str, value: str = "", *, name: str = "", default: Any = "", **more: Any) -> Any:
    """Make a field of `Request` that is a row of the table; ``what`` is its help."""
    return field(default=default, metadata={"row": Option(name, what, value, **more)})


_count = partial(_row, value="N", default=None, read=_number, check=lambda n: n >= 1)
_time = partial(
    _row, value="TIME", default=0.0, read=_seconds, expected="0 seconds or more",
    # Not "< 0": a NaN is no time either.
    check=lambda seconds: 0 <= seconds < float("inf"),
)  # fmt: skip


def _is_pair(pair: str) -> bool:
    name, equals, _ = pair.partition("=")
    return bool(name and equals)


_HERE = os.path.dirname(os.path.abspath(__file__))

PYTHON = re.compile("(pypy|python)[0-9.]*t?")  # how an interpreter is called

_FILES = os.listdir(os.path.join(_HERE, "launchers"))
KINDS = tuple(sorted(f[:-3] for f in _FILES if f.endswith(".py") and not f.startswith("_")))
"""The kinds of launchers: each has a file of its own."""

_LAUNCHERS = ("auto", "mpiexec", *KINDS)
_STAGES = ("python", "all")

GRACE = 7.0
"""Seconds from SIGTERM to SIGKILL. PBS kills all of a job 8 to 10 s after SIGTERM (measured)."""


@dataclass(frozen=True, slots=True)
class Request:
    """One launch, as requested.

    Attributes:
        command: The user's words, verbatim.

    Each other attribute is the option of its name, as ``ezpz-launch --help`` describes it. Times
    are in seconds. An option that can be listed or repeated is a tuple (``options`` of names,
    ``env`` of ``NAME=VALUE``). None leaves the choice to the launch.

    Raises:
        UsageError: A value is not what its option takes, or options contradict each other.
    """

    command: tuple[str, ...]
    # fmt: off
    nproc: int | None = _count("ranks in all; default: one a device, else one per 2 cores",
        expected="at least 1 rank", short="n", also="-np --np --nprocs --ntasks")
    ppn: int | None = _count("ranks on each host; default: one a device",
        expected="at least 1 rank",
        also="-ppn -npernode --npernode --nproc-per-node --nproc_per_node --ntasks-per-node")
    nodes: int | None = _count("use the first N hosts; default: all of the job",
        expected="at least 1 host", short="N", also="-nh --nhosts --nnodes")
    hostfile: str = _row("the hosts to use, one a line; default: the job's",
        "FILE", also="-f --machinefile")
    include: str = _row("use these hosts only, such as nid[001-004]", "LIST")
    exclude: str = _row("do not use these hosts", "LIST")
    launcher: str = _row("|".join(_LAUNCHERS), "KIND", default="auto",
        check=_LAUNCHERS.__contains__, expected=f"one of {', '.join(_LAUNCHERS)}")
    machine: str = _row("plan for this machine (ezpz-topo machines lists them)", "NAME")
    options: tuple[str, ...] = _row("use this option of the machine; repeatable",
        "NAME", name="option", default=(), many=True)
    cpu_bind: str = _row("none, a list of the machine's, or cores: 0-7:8-15", "LIST")
    env: tuple[str, ...] = _row("set this variable for every rank; repeatable",
        "K=V", default=(), many=True, check=_is_pair, expected="NAME=VALUE", also="-x -genv")
    one_device: bool = _row("each rank sees one device only, its own", default=False,
        says=("devices of a rank", "its own only"))
    log_dir: str = _row("write each rank's output to files of its own in DIR", "DIR",
        says=("output", "{0}, there only"))
    tee: bool = _row("with --log-dir: show the output here as well", default=False,
        needs="log-dir", says=("output", "{request.log_dir}, there and here"))
    prefix: bool = _row("begin each line of output with [rank@host]", default=False,
        says=("lines begin with", "[rank@host]"))
    idle_timeout: float = _time("end a launch that is silent for so long: 600, 10m",
        also="--timeout",
        says=("hung when silent", "{0:g} s"))
    grace: float = _time("from SIGTERM to SIGKILL; default: 7 seconds", default=GRACE,
        says=("SIGTERM to SIGKILL", "{0:g} s"))
    signal_before: float = _time("send SIGUSR1 so long before the job's end",
        says=("SIGUSR1 before end", "{0:g} s"))
    retries: int = _row("start again after a failure, up to N times", "N", default=0, read=_number,
        check=lambda n: n >= 0, expected="0 or more", says=("retries", "up to {0}"))
    spares: int = _row("keep N hosts aside, to replace those that fail", "N",
        default=0, read=_number, check=lambda n: n >= 1, expected="at least 1 host",
        says=("spare hosts", "{0}"))
    preflight: bool = _row("look at every host first, and leave the bad out", default=False,
        says=("looked at first", "every host"))
    min_nodes: int | None = _count("go on with fewer hosts after a node's fault, at least N",
        expected="at least 1 host", says=("goes on with", "{0} hosts at least"))
    stage: str = _row("start from the nodes' own disks: python or all",
        "WHAT", default="", implied="python", check=_STAGES.__contains__,
        expected=f"one of {', '.join(_STAGES)}", says=("staged first", "{0}"))
    stage_data: tuple[str, ...] = _row("with --stage: this file or folder as well; repeatable",
        "PATH", default=(), many=True, needs="stage")
    nested: bool = _row("allow a launch inside a rank of another", default=False,
        says=("inside a launch", "allowed"))
    launcher_args: tuple[str, ...] = _row("words for the launcher itself, quoted as one",
        "TEXT", default=(), read=_words)
    dry_run: bool = _row("print what would be run, and why, and stop", default=False)
    json: bool = _row("with --dry-run: the same for programs", default=False, needs="dry-run")
    # fmt: on

    def __post_init__(self) -> None:
        rows = flags_of(rows_of(type(self)))
        for option in rows.values():
            value: Any = getattr(self, option.field)
            if value == option.default:
                continue
            for each in value if option.many else [value]:
                if option.check and not option.check(each):
                    what = repr(each) if option.many else each
                    raise UsageError(f"{option.flag} {what}: expected {option.expected}")
            if option.needs and not getattr(self, option.needs.replace("-", "_")):
                beside = f"--{option.needs} {rows[f'--{option.needs}'].value}".rstrip()
                raise UsageError(f"{option.flag}: expected {beside} beside it")
        if not self.command:
            raise UsageError(
                "no command; expected one after the options, such as: "
                "ezpz-launch -n 2 python train.py"
            )


def rows_of(kind: type[Request]) -> tuple[Option, ...]:
    return tuple(
        each._replace(name=each.name or f.name.replace("_", "-"), field=f.name, default=f.default)
        for f in fields(kind)
        if (each := f.metadata.get("row"))
    )


OPTIONS: tuple[Option, ...] = (
    *rows_of(Request),
    Option("module", "run python -m MODULE; what follows belongs to it", "MODULE", "m", last=True),
    Option("code", "run python -c CODE; what follows belongs to it", "CODE", "c", last=True),
    Option("version", "print the version and stop"),
    Option("help", "print this page and stop", short="h"),
)


def flags_of(table: Sequence[Option]) -> dict[str, Option]:
    also = {word: each for each in table for word in each.also.split()}
    by_name = {f"--{each.name}": each for each in table}
    return also | by_name | {f"-{each.short}": each for each in table if each.short}


def help_row(words: str, column: int, what: str) -> str:
    """Return a row of a table of options, no wider than 80."""
    import textwrap  # noqa: PLC0415  # only a page needs it

    start = f"  {words:<{column}} "
    return textwrap.fill(what, 80, initial_indent=start, subsequent_indent=" " * (column + 3))


def settings(request: Request) -> list[tuple[str, str, str]]:
    """Return label, value and flags of the options that a dry run shows; not of defaults."""
    rows = {}
    for option in OPTIONS:
        value = getattr(request, option.field) if option.field else option.default
        if option.says and value != option.default:
            label, said = option.says
            flags = f"--{option.needs}, {option.flag}" if option.needs else option.flag
            rows[label] = (label, said.format(value, request=request), flags)
    return list(rows.values())


# A command line, split into our options and the user's command, which is never parsed.

Options = dict[str, str | bool | list[str]]
"""By long name: a string, True for a switch, or a list of what can be repeated."""


def split(
    argv: Sequence[str], table: Sequence[Option] = OPTIONS
) -> tuple[Options, tuple[str, ...]]:
    """Split ``argv`` at the first word that is not ours, or at ``--``.

    Returns:
        Our options by long name, and the user's command, as it is; but for ``-c``, of which quotes
        around the whole code are taken off.

    Raises:
        UsageError: An option is unknown, is given twice, lacks its value, or has one that
            it does not take.
    """
    options: Options = {}
    words, by_flag = list(argv), flags_of(table)
    while words and words[0][:1] == "-" and words[0] not in ("-", "--"):
        word = words.pop(0)
        flag, is_attached, value = word.partition("=")
        if flag not in by_flag:
            # -n4, as mpiexec and srun users write it.
            flag, is_attached, value = _letter_of(word, by_flag), "=", word[2:]
        option = by_flag[flag]
        if option.name in options and not option.many:
            raise UsageError(f"{flag} is given twice; expected once")
        if not option.value and is_attached:
            raise UsageError(f"{flag}={value!r}: {flag} takes no value")
        if option.value and not is_attached:
            value = _value_of(option, flag, words)
        if option.last:
            value = _unquoted(value) if option.name == "code" else value
            return options, (sys.executable, f"-{option.short}", value, *words)
        if option.many:
            held = options.setdefault(option.name, [])
            assert isinstance(held, list)
            held.append(value)
        else:
            options[option.name] = value if option.value else True
    return options, tuple(words[1:] if words[:1] == ["--"] else words)


def _value_of(option: Option, flag: str, words: list[str]) -> str:
    """Take an option's value off the words behind it."""
    if option.implied:
        follows = option.value == "N" and words and words[0].isdecimal()
        return words.pop(0) if follows else option.implied
    if not words or words[0] == "--":
        raise UsageError(f"{flag} needs a value; expected {flag} {option.value}")
    value = words.pop(0)
    if flag == "-genv" and "=" not in value and words:  # Hydra's: -genv NAME VALUE
        value += f"={words.pop(0)}"
    return value


def _letter_of(word: str, by_flag: Mapping[str, Option]) -> str:
    """Return the flag that a value is attached to without ``=``; else say what is meant."""
    flag = word.partition("=")[0]
    option = by_flag.get(word[:2])
    other = f"-{flag}" if f"-{flag}" in by_flag else ""
    # But -env is a slip.
    if option and not other and not (option.value == "N" and flag[2:3].isalpha()):
        return word[:2]
    if not other:
        import difflib  # noqa: PLC0415  # only a wrong word needs it

        other = next(iter(difflib.get_close_matches(flag, by_flag, n=1)), "")
    hint = f"did you mean {other}?" if other else "see ezpz-launch --help;"
    raise UsageError(f"unknown option {word!r}; {hint} options of the command go after its name")


def _unquoted(code: str) -> str:
    # Who writes -c "'import ezpz'" means what is within: to Python it would be a mere text.
    quote, within = code[:1], code[1:-1]
    is_quoted = quote in ("'", '"') and len(code) > 1 and code.endswith(quote)
    return within if is_quoted and quote not in within and "\\" not in within else code


_Kind = TypeVar("_Kind", bound=Request)


def request_of(
    options: Options,
    command: tuple[str, ...],
    kind: type[_Kind] = Request,  # type: ignore[assignment]
) -> _Kind:
    """Turn our own options, as `split` returns them, into a request; `UsageError` as `Request`."""
    values: dict[str, Any] = {}
    by_flag = flags_of(rows_of(kind))
    for name, value in options.items():
        option = by_flag[f"--{name}"]
        if isinstance(value, str):
            values[option.field] = option.read(option.flag, value)
        else:
            values[option.field] = tuple(value) if isinstance(value, list) else value
    return kind(command, **values)
