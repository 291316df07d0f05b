"""The options of ezpz-launch: told apart from the user's command, checked, explained."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ._errors import UsageError

# Whole numbers as people list them: cores and ranks as ``4-7``, or ``0-7,104-111``.

# As many as there can be, and few enough that a slip of the finger fills no memory.
_RANGE = r"([0-9]{1,6})(?:-([0-9]{1,6}))?"


def read_cores(text: str) -> list[int]:
    """Return the cores of a list of ranges.

    Raises:
        UsageError: It does not parse, or a range is reversed.
    """
    return read_ranges(text, "cores", "0-7,104-111")


def read_ranges(text: str, what: str, example: str) -> list[int]:
    """Return the numbers of a list of ranges.

    Args:
        text: The list.
        what: What they are, for the error.
        example: How they are written, for the error.

    Raises:
        UsageError: It does not parse, or a range is reversed.
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(_RANGE, part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if high < low:
            raise UsageError(f"{what} {text!r}: {part!r}; expected ranges such as {example}")
        numbers += range(low, high + 1)
    return numbers


def count_cores(text: str) -> int:
    """Return the number of cores of a list of ranges."""
    return len(set(read_cores(text)))


def mask_of(text: str) -> str:
    """Return the mask of a list of ranges: ``0xf0`` for ``4-7``."""
    mask = 0
    for core in read_cores(text):
        mask |= 1 << core
    return hex(mask)


def fold_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as ranges: ``0,4-7``."""
    ranges: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


# Split a command line into our options and the user's command, which is never parsed.


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


# What the user asked for: our own options, checked; the command, untouched.

LAUNCHERS = ("auto", "pals", "mpiexec", "hydra", "openmpi", "srun", "torchrun", "spawn")

GRACE = 7.0
"""Seconds from SIGTERM to SIGKILL, unless asked otherwise.

PBS kills all of a job 8 to 10 s after its SIGTERM (measured): until then the ranks have been
killed, and the end is on record.
"""


@dataclass(frozen=True, slots=True)
class Request:
    """One launch, as asked.

    Attributes:
        command: The user's words, verbatim.
        nproc: Number of ranks, or None to choose by device and cores.
        ppn: Ranks a host, or None to choose.
        nodes: Number of hosts, counted from the first; None for all.
        hostfile: A hostfile that comes before all others.
        include: A nodelist of the hosts to use.
        exclude: A nodelist of hosts not to use.
        launcher: One of `LAUNCHERS`.
        machine: A machine's name instead of the one that is found.
        options: Names of the machine's options to use.
        cpu_bind: A bind list's name, or cores as ``0-7:8-15``; ``"none"`` for no binding.
        env: Variables for every rank, as ``NAME=VALUE``.
        one_device: Whether each rank sees its own device only.
        log_dir: Folder for the output of each rank, instead of the terminal.
        tee: Whether the output is shown as well as written to ``log_dir``.
        only_ranks: The ranks whose output is shown, in order; None for all.
        prefix: Whether each line of output begins with its rank and host.
        idle_timeout: Seconds without output after which the launch has hung; 0 for never.
        grace: Seconds from SIGTERM to SIGKILL.
        signal_before: Seconds before the job's end at which the ranks get SIGUSR1; 0 for never.
        retries: How often a failed launch is started again.
        nested: Whether a rank of another launch may launch.
        launcher_args: Words for the launcher itself.
        dry_run: Explain the launch instead of starting it.
        json: Explain it for programs.
    """

    command: tuple[str, ...]
    nproc: int | None = None
    ppn: int | None = None
    nodes: int | None = None
    hostfile: str = ""
    include: str = ""
    exclude: str = ""
    launcher: str = "auto"
    machine: str = ""
    options: tuple[str, ...] = ()
    cpu_bind: str = ""
    env: tuple[str, ...] = ()
    one_device: bool = False
    log_dir: str = ""
    tee: bool = False
    only_ranks: tuple[int, ...] | None = None
    prefix: bool = False
    idle_timeout: float = 0.0
    grace: float = GRACE
    signal_before: float = 0.0
    retries: int = 0
    nested: bool = False
    launcher_args: tuple[str, ...] = ()
    dry_run: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.launcher not in LAUNCHERS:
            raise UsageError(f"--launcher {self.launcher}: expected one of {', '.join(LAUNCHERS)}")
        for pair in self.env:
            name, equals, _ = pair.partition("=")
            if not equals or not name.isidentifier():
                raise UsageError(f"--env {pair!r}: expected NAME=VALUE")
        if self.tee and not self.log_dir:
            raise UsageError("--tee: expected --log-dir DIR beside it, the files to write")
        if self.json and not self.dry_run:
            raise UsageError("--json: expected --dry-run beside it")
        if not self.command:
            raise UsageError(
                "no command; expected one after the options, such as: "
                "ezpz-launch -n 2 python train.py"
            )

    def _check_numbers(self) -> None:
        for flag, value, what in (
            ("-n", self.nproc, "rank"),
            ("--ppn", self.ppn, "rank"),
            ("-N", self.nodes, "host"),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{flag} {value}: expected at least 1 {what}")
        if self.retries < 0:
            raise UsageError(f"--retries {self.retries}: expected 0 or more")
        for flag, seconds in (
            ("--idle-timeout", self.idle_timeout),
            ("--grace", self.grace),
            ("--signal-before", self.signal_before),
        ):
            # Not "< 0": a NaN is no time either.
            if not 0 <= seconds < float("inf"):
                raise UsageError(f"{flag} {seconds}: expected 0 seconds or more")
        if self.only_ranks is not None and (not self.only_ranks or min(self.only_ranks) < 0):
            raise UsageError(f"--only-ranks {self.only_ranks}: expected ranks from 0")


# Our own options as a `Request`, by Fire where there is something for it to parse.

_NUMBERS = {"nproc": "-n", "ppn": "--ppn", "nodes": "-N", "retries": "--retries"}
_SWITCHES = ("one-device", "tee", "prefix", "nested", "dry-run", "json")
_UNITS = {"s": 1, "m": 60, "h": 3600}


def request_of(options: Options, command: tuple[str, ...]) -> Request:
    """Turn our own options into a request; the command is passed by.

    Raises:
        UsageError: A value is not what its option takes, or options contradict each other.
    """
    told = {name: str(options[name]) for name in _NUMBERS if name in options}
    if all(map(_is_plain, told.values())):
        # The common launch. Fire brings asyncio with it: as long as all the rest of the
        # launcher takes to start. A test holds this to what Fire makes of the same words.
        numbers = {name: int(text) for name, text in told.items()}
        return _request(options, command, numbers, {name: name in options for name in _SWITCHES})
    return _request_by_fire(options, command)


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and text[0] != "0"


def _request_by_fire(options: Options, command: tuple[str, ...]) -> Request:
    """Let Fire parse our own numbers and switches, and nothing else.

    Text stays text: Fire would make a list of nid[001-004] and a number of 0007.
    """
    import fire  # noqa: PLC0415  # see request_of

    def build(
        *,
        nproc: int | None = None,
        ppn: int | None = None,
        nodes: int | None = None,
        retries: int | None = None,
        one_device: bool = False,
        tee: bool = False,
        prefix: bool = False,
        nested: bool = False,
        dry_run: bool = False,
        json: bool = False,
    ) -> Request:
        numbers: dict[str, int] = {}
        parsed = {"nproc": nproc, "ppn": ppn, "nodes": nodes, "retries": retries}
        for name, value in parsed.items():
            if name in options:
                if type(value) is not int:
                    raise UsageError(f"{_NUMBERS[name]} {options[name]}: expected a whole number")
                numbers[name] = value
        set_to = (one_device, tee, prefix, nested, dry_run, json)
        return _request(options, command, numbers, dict(zip(_SWITCHES, set_to, strict=True)))

    parsed = {*_NUMBERS, *_SWITCHES}
    words = [f"--{name}={value}" for name, value in options.items() if name in parsed]
    # Fire prints what it returns unless it is serialised to nothing.
    request: Request = fire.Fire(build, command=words, name="ezpz-launch", serialize=_nothing)
    return request


def _nothing(_result: object) -> None:
    return None


def _request(
    options: Options,
    command: tuple[str, ...],
    numbers: Mapping[str, int],
    switches: Mapping[str, bool],
) -> Request:
    texts = {name: str(value) for name, value in options.items() if isinstance(value, str)}
    return Request(
        command,
        numbers.get("nproc"),
        numbers.get("ppn"),
        numbers.get("nodes"),
        hostfile=texts.get("hostfile", ""),
        include=texts.get("include", ""),
        exclude=texts.get("exclude", ""),
        launcher=texts.get("launcher", "auto"),
        machine=texts.get("machine", ""),
        cpu_bind=texts.get("cpu-bind", ""),
        log_dir=texts.get("log-dir", ""),
        options=_all_of(options, "option"),
        env=_all_of(options, "env"),
        only_ranks=_ranks(texts["only-ranks"]) if "only-ranks" in texts else None,
        idle_timeout=_seconds(texts, "idle-timeout", 0.0),
        grace=_seconds(texts, "grace", GRACE),
        signal_before=_seconds(texts, "signal-before", 0.0),
        retries=numbers.get("retries", 0),
        launcher_args=_words(texts["launcher-args"]) if "launcher-args" in texts else (),
        one_device=switches["one-device"],
        tee=switches["tee"],
        prefix=switches["prefix"],
        nested=switches["nested"],
        dry_run=switches["dry-run"],
        json=switches["json"],
    )


def _all_of(options: Options, name: str) -> tuple[str, ...]:
    held = options.get(name, [])
    return tuple(held) if isinstance(held, list) else ()


def _seconds(texts: Mapping[str, str], name: str, default: float) -> float:
    """Return a duration in seconds: ``90``, ``1.5``, ``90s``, ``10m`` or ``2h``."""
    if name not in texts:
        return default
    text = texts[name]
    unit = _UNITS.get(text[-1:], 0)
    number = text[:-1] if unit else text
    # Not float() alone, which also takes nan, 1e9 and 1_0.
    if not (number.isascii() and number.replace(".", "", 1).isdigit()):
        raise UsageError(f"--{name} {text!r}: expected a time of 0 or more: 90, 1.5, 90s, 10m, 2h")
    return float(number) * (unit or 1)


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(sorted(set(read_ranges(text, "--only-ranks", "0,4-7"))))


def _words(text: str) -> tuple[str, ...]:
    import shlex  # noqa: PLC0415  # few launches need it

    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"--launcher-args {text!r}: {error}; expected words quoted as in a shell"
        ) from error
