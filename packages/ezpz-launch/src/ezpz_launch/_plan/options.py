"""The options of ezpz-launch, as one table: parsed, checked, hinted at and explained from it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

from ezpz_launch._errors import UsageError

# How the text of an option is parsed: each of these takes its flag and the text.


def _parse_text(_flag: str, text: str) -> str:
    return text


def parse_number(flag: str, text: str) -> int:
    if not re.fullmatch("-?[0-9]{1,9}", text):
        raise UsageError(f"{flag} {text}: expected a whole number")
    return int(text)


_SECONDS_PER_UNIT = {"": 1, "s": 1, "m": 60, "h": 3600}


def _parse_seconds(flag: str, text: str) -> float:
    # Not float() alone, which also takes nan, 1e9 and 1_0.
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([smh]?)", text)
    if match is None:
        raise UsageError(f"{flag} {text!r}: expected a time of 0 or more: 90, 1.5, 90s, 10m, 2h")
    number = float(match[1])
    return number * _SECONDS_PER_UNIT[match[2]]


def parse_words(flag: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"{flag} {text!r}: {error}; expected words quoted as in a shell"
        ) from error


# As many as there can be, and few enough that a slip of the finger fills no memory.
_RANGE = r"([0-9]{1,6})(?:-([0-9]{1,6}))?"


def parse_core_ranges(text: str) -> list[int]:
    """Return the cores of a list such as ``4-7`` or ``0-7,104-111``."""
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(_RANGE, part)
        if match is not None:
            first = int(match[1])
            last = int(match[2] or match[1])
        if match is None or last < first:
            raise UsageError(f"cores {text!r}: {part!r}; expected ranges such as 0-7,104-111")
        cores += range(first, last + 1)
    return cores


# How a value other than the default is checked.


def is_positive(number: int) -> bool:
    return number >= 1


def _is_zero_or_more(number: int) -> bool:
    return number >= 0


def _is_time(seconds: float) -> bool:
    # Not "seconds < 0": a NaN is no time either.
    return 0 <= seconds < float("inf")


def _is_assignment(text: str) -> bool:
    name, equals, _ = text.partition("=")
    return bool(name and equals)


# The table.


class Option(NamedTuple):
    """One option: a row of the table."""

    name: str  # its long name
    help: str
    value: str = ""  # the kind of its value; empty for a switch
    short: str = ""  # its letter
    bare_value: str = ""  # its value if none is attached to it and no number follows
    aliases: str = ""  # names that it has in other launchers
    parse: Callable[[str, str], object] = _parse_text
    repeatable: bool = False  # if so its value is a tuple
    ends_options: bool = False  # whether the user's command begins with it, as with Python's -m
    check: Callable[[Any], bool] | None = None
    """Whether a value other than the default is valid (for a repeatable option: each value)."""
    expected: str = ""  # what the check expects, in words
    requires: str = ""  # an option without which it has no effect
    dry_run_row: tuple[str, str] | None = None
    """Its row in a dry run, unless a decision has one: a label, and a format of the value."""
    needed_by: str = ""  # the users for whom it is here
    field: str = ""  # its attribute of `Request`; empty if there is none
    default: object = None

    @property
    def flag(self) -> str:
        """Its short flag, or its long one if there is no letter."""
        if self.short:
            return f"-{self.short}"
        return f"--{self.name}"


def option_field(
    help_text: str, value: str = "", *, name: str = "", default: Any = "", **more: Any
) -> Any:
    """Make a field of `Request` that is a row of the table."""
    return field(default=default, metadata={"option": Option(name, help_text, value, **more)})


def count_field(help_text: str, **more: Any) -> Any:
    """Make a field for a number of at least 1; None leaves the choice to the launch."""
    return option_field(help_text, "N", default=None, parse=parse_number, check=is_positive, **more)


def _time_field(help_text: str, default: float = 0.0, **more: Any) -> Any:
    return option_field(
        help_text,
        "TIME",
        default=default,
        parse=_parse_seconds,
        check=_is_time,
        expected="0 seconds or more",
        **more,
    )


def _list_launcher_kinds() -> tuple[str, ...]:
    """List the files of the folder ``launchers``: each kind has one."""
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launchers")
    kinds: list[str] = []
    for file in os.listdir(folder):
        stem, extension = os.path.splitext(file)
        if extension == ".py" and not stem.startswith("_"):
            kinds.append(stem)
    return tuple(sorted(kinds))


KINDS = _list_launcher_kinds()

PYTHON = re.compile("(pypy|python)[0-9.]*t?")  # how an interpreter is called

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
    nproc: int | None = count_field(
        "ranks in all; default: one a device, else one per 2 cores",
        expected="at least 1 rank",
        short="n",
        aliases="-np --np --nprocs --ntasks",
        needed_by="everyone; -np, --np, --nprocs: users of mpiexec and of the earlier ezpz; "
        "--ntasks: those of srun",
    )
    ppn: int | None = count_field(
        "ranks on each host; default: one a device",
        expected="at least 1 rank",
        aliases="-ppn --nproc-per-node --nproc_per_node --ntasks-per-node",
        needed_by="users of mpiexec; --nproc-per-node, --nproc_per_node: those of torchrun; "
        "--ntasks-per-node: those of srun",
    )
    nodes: int | None = count_field(
        "use the first N hosts; default: all of the job",
        expected="at least 1 host",
        short="N",
        aliases="-nh --nhosts --nnodes",
        needed_by="users of srun; -nh and --nhosts: those of the earlier ezpz; --nnodes: torchrun",
    )
    hostfile: str = option_field(
        "the hosts to use, one a line; default: the job's",
        "FILE",
        needed_by="users of hosts that no scheduler lends, such as two workstations",
    )
    include: str = option_field(
        "use these hosts only, such as nid[001-004]",
        "LIST",
        needed_by="several launches beside each other in one job; ezpz preflight",
    )
    exclude: str = option_field(
        "do not use these hosts",
        "LIST",
        needed_by="users with a bad node in their job",
    )
    launcher: str = option_field(
        "|".join(_LAUNCHERS),
        "KIND",
        default="auto",
        check=_LAUNCHERS.__contains__,
        expected=f"one of {', '.join(_LAUNCHERS)}",
        needed_by="users of more than one MPI, and of torchrun",
    )
    machine: str = option_field(
        "plan for this machine (ezpz-topo machines lists them)",
        "NAME",
        needed_by="people who look at a machine's command line from elsewhere, by --dry-run",
    )
    options: tuple[str, ...] = option_field(
        "use this option of the machine; repeatable",
        "NAME",
        name="option",
        default=(),
        repeatable=True,
        needed_by="users of Aurora's --no-vni, Polaris' --depth and the like",
    )
    cpu_bind: str = option_field(
        "none, a list of the machine's, or cores: 0-7:8-15",
        "LIST",
        needed_by="users of machines whose devices are near to some cores; of CPU_BIND before",
    )
    env: tuple[str, ...] = option_field(
        "set this variable for every rank; repeatable",
        "K=V",
        default=(),
        repeatable=True,
        check=_is_assignment,
        expected="NAME=VALUE",
        aliases="-x",
        needed_by="users of mpirun -x and of the earlier ezpz",
    )
    one_device: bool = option_field(
        "each rank sees one device only, its own",
        default=False,
        dry_run_row=("devices of a rank", "its own only"),
        needed_by="users of programs that always take the first device",
    )
    log_dir: str = option_field(
        "write each rank's output to files of its own in DIR",
        "DIR",
        dry_run_row=("output", "{0}, there only"),
        needed_by="users of many ranks; those of torchrun --log-dir and of submitit",
    )
    tee: bool = option_field(
        "with --log-dir: show the output here as well",
        default=False,
        requires="log-dir",
        dry_run_row=("output", "{request.log_dir}, there and here"),
        needed_by="users of torchrun --tee",
    )
    prefix: bool = option_field(
        "begin each line of output with [rank@host]",
        default=False,
        dry_run_row=("lines begin with", "[rank@host]"),
        needed_by="people who search a failure in the output; users of mpirun --tag-output",
    )
    idle_timeout: float = _time_field(
        "end a launch that is silent for so long: 600, 10m",
        aliases="--timeout",
        dry_run_row=("hung when silent", "{0:g} s"),
        needed_by="users whose jobs hang unattended; --timeout: those of the earlier ezpz",
    )
    grace: float = _time_field(
        "from SIGTERM to SIGKILL; default: 7 seconds",
        default=GRACE,
        dry_run_row=("SIGTERM to SIGKILL", "{0:g} s"),
        needed_by="users whose program saves a checkpoint when it is ended",
    )
    signal_before: float = _time_field(
        "send SIGUSR1 so long before the job's end",
        dry_run_row=("SIGUSR1 before end", "{0:g} s"),
        needed_by="users of sbatch --signal, of submitit, and of Lightning's auto_requeue",
    )
    retries: int = option_field(
        "start again after a failure, up to N times",
        "N",
        default=0,
        parse=parse_number,
        check=_is_zero_or_more,
        expected="0 or more",
        dry_run_row=("retries", "up to {0}"),
        needed_by="users of torchrun --max-restarts and of the earlier ezpz",
    )
    spares: int = option_field(
        "keep N hosts aside, to replace those that fail",
        "N",
        default=0,
        parse=parse_number,
        check=is_positive,
        expected="at least 1 host",
        dry_run_row=("spare hosts", "{0}"),
        needed_by="users of so many nodes that one fails; of --spare-nodes before",
    )
    preflight: bool = option_field(
        "look at every host first, and leave the bad out",
        default=False,
        dry_run_row=("looked at first", "every host"),
        needed_by="users of so many nodes that one is bad when the job begins",
    )
    min_nodes: int | None = count_field(
        "go on with fewer hosts after a node's fault, at least N",
        expected="at least 1 host",
        dry_run_row=("goes on with", "{0} hosts at least"),
        needed_by="users without spares; those of torchrun --nnodes=MIN:MAX",
    )
    stage: str = option_field(
        "start from the nodes' own disks: python or all",
        "WHAT",
        default="",
        bare_value="python",
        check=_STAGES.__contains__,
        expected=f"one of {', '.join(_STAGES)}",
        dry_run_row=("staged first", "{0}"),
        needed_by="users of hundreds of nodes; those of ezpz yeet before",
    )
    stage_data: tuple[str, ...] = option_field(
        "with --stage: this file or folder as well; repeatable",
        "PATH",
        default=(),
        repeatable=True,
        requires="stage",
        needed_by="users whose data set fits on a node's disk",
    )
    nested: bool = option_field(
        "allow a launch inside a rank of another",
        default=False,
        dry_run_row=("inside a launch", "allowed"),
        needed_by="sweeps of which each rank starts launches of its own",
    )
    launcher_args: tuple[str, ...] = option_field(
        "words for the launcher itself, quoted as one",
        "TEXT",
        default=(),
        parse=parse_words,
        needed_by="users of a launcher's flag that has no option here; of the earlier ezpz",
    )
    dry_run: bool = option_field(
        "print what would be run, and why, and stop",
        default=False,
        needed_by="everyone who asks why; people who port to a machine",
    )
    json: bool = option_field(
        "with --dry-run: the same for programs",
        default=False,
        requires="dry-run",
        needed_by="scripts that start the command by themselves",
    )

    def __post_init__(self) -> None:
        for option in list_options(type(self)):
            value: Any = getattr(self, option.field)
            if value != option.default:
                self._check(option, value)
        if not self.command:
            raise UsageError(
                "no command; expected one after the options, such as: "
                "ezpz-launch -n 2 python train.py"
            )

    def _check(self, option: Option, value: Any) -> None:
        if option.check is not None:
            if option.repeatable:
                for each in value:
                    if not option.check(each):
                        raise UsageError(f"{option.flag} {each!r}: expected {option.expected}")
            elif not option.check(value):
                raise UsageError(f"{option.flag} {value}: expected {option.expected}")
        if option.requires and not getattr(self, option.requires.replace("-", "_")):
            required = map_flags(list_options(type(self)))[f"--{option.requires}"]
            words = f"--{required.name} {required.value}".rstrip()
            raise UsageError(f"{option.flag}: expected {words} beside it")


def list_options(kind: type[Request]) -> tuple[Option, ...]:
    """List the options that are fields of `Request`, or of a class derived from it."""
    options: list[Option] = []
    for each in fields(kind):
        option = each.metadata.get("option")
        if option is not None:
            name = option.name or each.name.replace("_", "-")
            options.append(option._replace(name=name, field=each.name, default=each.default))
    return tuple(options)


OPTIONS: tuple[Option, ...] = (
    *list_options(Request),
    Option(
        "module",
        "run python -m MODULE; what follows belongs to it",
        "MODULE",
        "m",
        ends_options=True,
        needed_by="users of torchrun -m",
    ),
    Option(
        "code",
        "run python -c CODE; what follows belongs to it",
        "CODE",
        "c",
        ends_options=True,
        needed_by="people who try a line on every rank",
    ),
    Option("version", "print the version and stop", needed_by="everyone who reports a fault"),
    Option("help", "print this page and stop", short="h", needed_by="everyone"),
)


def map_flags(table: Sequence[Option]) -> dict[str, Option]:
    """Map each spelling of each option to it; an option's name has precedence over an alias."""
    flags: dict[str, Option] = {}
    for option in table:
        for alias in option.aliases.split():
            flags[alias] = option
    for option in table:
        flags[f"--{option.name}"] = option
        if option.short:
            flags[f"-{option.short}"] = option
    return flags


def format_help_row(flags: str, column: int, help_text: str) -> str:
    """Format a row of a help page, no wider than 80."""
    import textwrap  # noqa: PLC0415  # only a page needs it

    start = f"  {flags:<{column}} "
    indent = " " * (column + 3)
    return textwrap.fill(help_text, 80, initial_indent=start, subsequent_indent=indent)


def list_settings(request: Request) -> list[tuple[str, str, str]]:
    """List label, value and flags of the options that a dry run shows; not of defaults."""
    rows: dict[str, tuple[str, str, str]] = {}
    for option in list_options(Request):
        value = getattr(request, option.field)
        if option.dry_run_row is None or value == option.default:
            continue
        label, value_format = option.dry_run_row
        flags = option.flag
        if option.requires:
            flags = f"--{option.requires}, {flags}"
        rows[label] = (label, value_format.format(value, request=request), flags)
    return list(rows.values())


# A command line, split into our options and the user's command, which is never parsed.

Options = dict[str, str | bool | list[str]]
"""By long name: a string, True for a switch, or a list for a repeatable option."""


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
    words = list(argv)
    by_flag = map_flags(table)
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        is_attached = bool(equals)
        if flag not in by_flag:
            # -n4, as mpiexec and srun users write it.
            flag = _find_attached_letter(word, by_flag)
            value = word[2:]
            is_attached = True
        option = by_flag[flag]
        if option.name in options and not option.repeatable:
            raise UsageError(f"{flag} is given twice; expected once")
        if not option.value and is_attached:
            raise UsageError(f"{flag}={value!r}: {flag} takes no value")
        if option.value and not is_attached:
            value = _take_value(option, flag, words)
        if option.ends_options:
            if option.name == "code":
                value = _strip_quotes(value)
            return options, (sys.executable, f"-{option.short}", value, *words)
        _store(options, option, value)
    if words and words[0] == "--":
        words.pop(0)
    return options, tuple(words)


def _store(options: Options, option: Option, value: str) -> None:
    if option.repeatable:
        values = options.setdefault(option.name, [])
        assert isinstance(values, list)
        values.append(value)
    elif option.value:
        options[option.name] = value
    else:
        options[option.name] = True


def _take_value(option: Option, flag: str, words: list[str]) -> str:
    """Remove an option's value from the words behind it, and return it."""
    if option.bare_value:
        if option.value == "N" and words and words[0].isdecimal():
            return words.pop(0)
        return option.bare_value
    if not words or words[0] == "--":
        raise UsageError(f"{flag} needs a value; expected {flag} {option.value}")
    return words.pop(0)


def _find_attached_letter(word: str, by_flag: Mapping[str, Option]) -> str:
    """Return the flag that a value is attached to without ``=``; else raise with a hint."""
    flag = word.partition("=")[0]
    option = by_flag.get(word[:2])
    long_flag = f"-{flag}"
    hint = f"did you mean {long_flag}?"
    if long_flag not in by_flag:
        # But -nfour is a slip.
        is_slip = option is not None and option.value == "N" and flag[2:3].isalpha()
        if option is not None and not is_slip:
            return word[:2]
        import difflib  # noqa: PLC0415  # only a wrong word needs it

        similar = difflib.get_close_matches(flag, by_flag, n=1)
        hint = "see ezpz-launch --help;"
        if similar:
            hint = f"did you mean {similar[0]}?"
    raise UsageError(f"unknown option {word!r}; {hint} options of the command go after its name")


def _strip_quotes(code: str) -> str:
    # In -c "'import ezpz'" the inner text is meant: Python would take all of it for a string.
    quote = code[:1]
    if quote not in ("'", '"') or len(code) < 2 or not code.endswith(quote):
        return code
    inner = code[1:-1]
    if quote in inner or "\\" in inner:
        return code
    return inner


_Kind = TypeVar("_Kind", bound=Request)


def build_request(
    options: Options,
    command: tuple[str, ...],
    kind: type[_Kind] = Request,  # type: ignore[assignment]
) -> _Kind:
    """Build a request from our own options, as `split` returns them; `UsageError` as `Request`."""
    values: dict[str, Any] = {}
    by_flag = map_flags(list_options(kind))
    for name, value in options.items():
        option = by_flag[f"--{name}"]
        if isinstance(value, str):
            values[option.field] = option.parse(option.flag, value)
        elif isinstance(value, list):
            values[option.field] = tuple(value)
        else:
            values[option.field] = value
    return kind(command, **values)
