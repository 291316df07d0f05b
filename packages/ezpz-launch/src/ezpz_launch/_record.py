"""The record that a launch leaves, and `ezpz-launch history`, which lists them."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ezpz_topo import TopoError, fold_nodelist, get_allocation, get_hostname, same_host

from ._agent import birth_of, is_running
from ._errors import LaunchError, UsageError, say
from ._launch import how
from ._version import __version__

if TYPE_CHECKING:
    from ezpz_topo import Allocation

    from ._plan import LaunchPlan


# The record that a launch leaves: one JSON file, in the user's state folder.


class Record(NamedTuple):
    """What is known of one launch; the fields of the file."""

    id: str  # sorts by time, and is unique among hosts that share the folder
    command: tuple[str, ...]
    cwd: str  # empty where that folder is gone
    machine: str
    scheduler: str
    job_id: str | None
    hosts: str  # folded: nid[001-004]
    nproc: int
    ppn: int
    launcher: str
    argv: tuple[str, ...]  # the launcher's, of the last attempt
    environment: Mapping[str, str]  # what was added to the ranks', in the last attempt
    host: str  # of ezpz-launch itself, as are the next two
    pid: int
    pid_start: int | None  # in the kernel's ticks: another process may get its number
    start: str  # ISO 8601, UTC
    end: str | None = None
    exit_status: int | None = None
    first_failure: Mapping[str, object] | None = None  # rank, host, status, how
    attempt: int = 0  # the last one's number
    retries: int = 0  # how many were allowed
    version: str = __version__


def record_of(launch_id: str, planned: LaunchPlan, argv: Sequence[str], job: Allocation) -> Record:
    cwd, placement = "", planned.placement
    with suppress(OSError):
        cwd = os.getcwd()
    return Record(
        id=launch_id, command=planned.command, cwd=cwd, machine=planned.machine.name,
        scheduler=job.scheduler, job_id=job.job_id, hosts=fold_nodelist(placement.hosts),
        nproc=placement.nproc, ppn=placement.ppn, launcher=planned.launcher.kind, argv=tuple(argv),
        environment=dict(planned.environment), host=get_hostname(), pid=os.getpid(),
        pid_start=int(birth_of(os.getpid()) or 0) or None, start=iso_time(time.time()),
        retries=planned.request.retries,
    )  # fmt: skip


ID = r"([0-9]{8}T[0-9]{6,12}Z-[0-9]+-[0-9a-f]+)\.(json|json\.new|progress.*)"
"""The names of our files."""


def new_id(now: float) -> str:
    """Return an id for a launch that starts now, in seconds since 1970: when, who, chance."""
    second = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
    return f"{second}{int(now % 1 * 1e6):06}Z-{os.getpid()}-{os.urandom(3).hex()}"


def iso_time(when: float) -> str:
    """Return seconds since 1970 as ISO 8601 in UTC, such as 2026-11-21T02:10:43.250Z."""
    second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when))
    return f"{second}.{int(when % 1 * 1e3):03}Z"


def to_json(record: Record) -> str:
    """Return the record as JSON, without its secrets, and as valid UTF-8."""
    import json  # noqa: PLC0415 - 1.5 ms, and redact 3: while the ranks start

    from ezpz_topo import redact  # noqa: PLC0415 - as above

    values = redact(record._asdict())
    argv = list(record.argv)
    # Behind --escaped each word begins with the shim's "+".
    split = argv.index("--escaped") + 1 if "--escaped" in argv else len(argv)
    words = redact([*argv[:split], *(word.removeprefix("+") for word in argv[split:])])
    values["argv"] = [*words[:split], *(f"+{word}" for word in words[split:])]
    text = json.dumps(values, indent=1, ensure_ascii=False)
    return re.sub("[\ud800-\udfff]", _escaped, text) + "\n"


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    # Python holds a byte 0x80 to 0xff that is no UTF-8 as 0xdc80 to 0xdcff.
    return rf"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else rf"\\u{code:04x}"


# The folder.

KEPT = 1000
"""So many records are kept, the newest; older ones go when there are a tenth more."""


def records_folder(env: Mapping[str, str]) -> str:
    """Return ``launches`` in ``EZPZ_STATE_DIR`` or the user's state folder; it need not exist."""
    if given := env.get("EZPZ_STATE_DIR"):
        return os.path.join(os.path.abspath(given), "launches")
    base = env.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        if sys.platform != "linux":
            from platformdirs import user_state_path  # noqa: PLC0415 - 9 ms, and needless on Linux

            return str(user_state_path("ezpz") / "launches")
        base = os.path.join(env.get("HOME") or os.path.expanduser("~"), ".local", "state")
    if not os.path.isabs(base):  # never into the working directory
        raise LaunchError(
            f"HOME={env.get('HOME', '')!r}; expected the home directory of this user; set HOME, "
            "or EZPZ_STATE_DIR to a folder for ezpz's records"
        )
    return os.path.join(base, "ezpz", "launches")


def _make_folder(folder: str) -> None:
    """Make it and what is above it, all for this user only; makedirs does so with the last only."""
    if not os.path.isdir(above := os.path.dirname(folder)):
        _make_folder(above)
    with suppress(FileExistsError):  # another launch was quicker
        os.mkdir(folder, 0o700)


def _prune(folder: str) -> None:
    """Remove all but the newest records, once there are a tenth too many."""
    with suppress(OSError):
        ours = [match for name in os.listdir(folder) if (match := re.fullmatch(ID, name))]
        ids = sorted(match[1] for match in ours if match[2] == "json")
        if len(ids) > KEPT + KEPT // 10:
            for match in ours:
                if match[1] < ids[-KEPT]:
                    _remove(os.path.join(folder, match[0]))


def _remove(path: str) -> None:
    with suppress(OSError):  # it is not there, or stays until it is pruned
        os.unlink(path)


class Keeper:
    """Keeps the record of one launch; whatever fails is said once, and the launch goes on."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.launch_id = new_id(time.time())
        self.progress_file = ""
        """Where scripts report their progress; empty where nothing can be written."""
        self.metrics_file = ""
        """Where rank 0's metrics say in which folder they are, for a launch on a terminal."""
        self._record: Record | None = None
        self._folder = ""
        try:
            self._folder = records_folder(env)
            if not os.path.isdir(self._folder):
                _make_folder(self._folder)
            self.progress_file = os.path.join(self._folder, f"{self.launch_id}.progress")
            self.metrics_file = f"{self.progress_file}-metrics"
        except LaunchError as error:
            self._give_up(str(error))
        except OSError as error:
            self._give_up(self._why_not(error))

    def start(self, planned: LaunchPlan, argv: Sequence[str], job: Allocation) -> None:
        """Write that an attempt runs; the ranks do not wait for it."""
        if self._record is None:
            self._record = record_of(self.launch_id, planned, argv, job)
        else:
            number, added = self._record.attempt + 1, dict(planned.environment)
            self._record = self._record._replace(
                attempt=number, argv=tuple(argv), environment=added
            )
        self._write(self._record)

    def finish(self, exit_status: int, failure: tuple[int, str, int] | None) -> None:
        """Write how it ended: the exit status; rank, host and status of the first failure."""
        if self._record is None:
            return  # it has not started
        first: dict[str, object] | None = None
        if failure:
            rank, host, status = failure
            first = {"rank": rank, "host": host, "status": status, "how": how(status)}
        end = iso_time(time.time())
        self._write(self._record._replace(end=end, exit_status=exit_status, first_failure=first))
        if self._record.retries:
            _remove(self.progress_file)
        if self._folder:
            _prune(self._folder)

    def _write(self, record: Record) -> None:
        if not self._folder:
            return
        path = os.path.join(self._folder, f"{record.id}.json")
        try:
            # Readers see it as it was or as it is, never half.
            descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(to_json(record))
            os.replace(f"{path}.new", path)
        except OSError as error:
            _remove(f"{path}.new")
            self._give_up(self._why_not(error))

    def _why_not(self, error: OSError) -> str:
        return (
            f"{self._folder} cannot be written ({error.strerror or error}); expected a folder of "
            "this user; set EZPZ_STATE_DIR to another"
        )

    def _give_up(self, why: str) -> None:
        self._folder = ""
        say(f"no job record: {why}")


def read_progress(path: str) -> int | None:
    """Return the step that a script reported last (see the README); None for no whole number."""
    if not os.path.isfile(path):  # a FIFO would wait for its writer
        return None
    try:
        with open(path, "rb") as file:
            text = file.read(65)
    except OSError:
        return None
    step = re.fullmatch(rb"\s*([0-9]{1,18})\s*", text) if len(text) < 65 else None
    return int(step[1]) if step else None


# `ezpz-launch history`: past launches, as a table for people or as JSON.

USAGE = "ezpz-launch history [-n N] [--json]: the newest N launches, by default 20, newest last"

PAGE = f"""\
usage: {USAGE}

examples:
  ezpz-launch history             a table: when, how long, exit status, ranks, hosts, job, command
  ezpz-launch history -n 3        the last three
  ezpz-launch history --json      as they were recorded, for programs"""


def command(argv: Sequence[str], env: Mapping[str, str]) -> str:
    limit, as_json, words = "20", False, list(argv)
    while words:
        word = words.pop(0)
        name, attached, value = word.partition("=")
        if word in ("-h", "--help"):
            return PAGE
        if word == "--json":
            as_json = True
        elif name in ("-n", "--limit") and (attached or words):
            limit = value if attached else words.pop(0)
        elif word[:2] == "-n" and word[2:].isdecimal():
            limit = word[2:]
        else:
            raise UsageError(f"history: {word!r} is not known here; expected {USAGE}")
    if not (limit.isascii() and limit.isdecimal() and int(limit[:9])):
        expected = "a whole number of launches from 1, such as 20"
        raise UsageError(f"history: -n {limit}: expected {expected}")
    return _history(env, int(limit[:9]), as_json=as_json)


def _history(env: Mapping[str, str], limit: int, *, as_json: bool) -> str:
    folder = records_folder(env)
    found, damaged = _read(folder, limit)
    for stored in found:
        stored["state"] = _state(stored)
    _look_for_jobs([stored for stored in found if stored["state"] == "unknown"], env)
    if as_json:
        import json  # noqa: PLC0415 - as in to_json

        return json.dumps(found, indent=1)
    lines = _table(found) if found else [f"no launches so far; they are recorded in {folder}"]
    if damaged:
        what = "1 file" if damaged == 1 else f"{damaged} files"
        lines.append(f"left out, no record that can be read: {what} in {folder}")
    return "\n".join(lines)


# The records that there are.

Stored = dict[str, Any]

_TYPES: dict[str, type | tuple[type, ...]] = {
    "id": str, "command": list, "cwd": str, "machine": str, "scheduler": str,
    "job_id": (str, type(None)), "hosts": str, "nproc": int, "host": str, "pid": int,
    "pid_start": (int, type(None)), "start": str, "end": (str, type(None)),
    "exit_status": (int, type(None)), "attempt": int,
}  # fmt: skip
"""What a record must have; what else it has is passed on."""


def _read(folder: str, limit: int) -> tuple[list[Stored], int]:
    """Return the newest records, newest last, and how many files among them are none."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise LaunchError(
            f"{folder} cannot be read ({error.strerror}); expected the folder of launch records; "
            "make it readable, or set EZPZ_STATE_DIR to another"
        ) from error
    found: list[Stored] = []
    damaged = 0
    for name in reversed(names):
        if len(found) == limit:
            break
        if re.fullmatch(ID, name):
            stored = _stored(os.path.join(folder, name))
            if stored is None:
                damaged += 1
            else:
                found.append(stored)
    return found[::-1], damaged


def _stored(path: str) -> Stored | None:
    import json  # noqa: PLC0415 - as in to_json

    if not os.path.isfile(path):  # a FIFO would wait for its writer
        return None
    try:
        with open(path, encoding="utf-8") as file:
            stored = json.load(file)
        is_record = (
            isinstance(stored, dict)
            and all(isinstance(stored.get(name, ...), kind) for name, kind in _TYPES.items())
            and all(isinstance(word, str) for word in stored["command"])
        )
        if is_record:
            _moment(stored["start"])
            _moment(stored["end"] or stored["start"])
    except (OSError, ValueError, OverflowError, RecursionError):
        return None
    return stored if is_record else None


def _moment(text: str) -> float:
    from datetime import datetime  # noqa: PLC0415 - only history needs it

    return datetime.fromisoformat(text).timestamp()


# What became of each: who was killed could not write that it had ended.

_JOB = {"pbs": "PBS_JOBID", "slurm": "SLURM_JOB_ID"}
_OF_A_JOB = ("PBS_JOB", "PBS_NODE", "PBS_ENV", "SLURM_JOB", "SLURM_STEP", "SLURM_NODE", "SLURM_HET")
_NOT_RUNNING = ("that runs; ", "Invalid job id specified")
"""What ezpz_topo's errors say of a job that does not run: in its own words, and in scontrol's."""


def _state(stored: Stored) -> str:
    """Say ``ended``, ``running``, ``never ended``, or ``unknown`` of a launch on another host."""
    if stored["end"] is not None:
        return "ended"
    if not same_host(stored["host"], get_hostname()):
        return "unknown"
    pid, born = stored["pid"], stored["pid_start"]
    # Another process may have its number by now, but did not start at the same tick.
    is_there = is_running(pid) and (born is None or birth_of(pid) == str(born))
    return "running" if is_there else "never ended"


def _look_for_jobs(unknown: Sequence[Stored], env: Mapping[str, str]) -> None:
    """Put ``ended by the scheduler`` on the launches whose jobs are over."""
    mine = {name: value for name, value in env.items() if not name.startswith(_OF_A_JOB)}
    mine.setdefault("EZPZ_SCHEDULER_TIMEOUT", "3")
    over: dict[str, bool] = {}
    for stored in unknown:
        variable, job = _JOB.get(stored["scheduler"]), stored["job_id"]
        if variable is None or not job:
            continue
        if job not in over:
            try:
                get_allocation({**mine, variable: job}, ask=True)
                over[job] = False
            except TopoError as error:
                over[job] = any(words in str(error) for words in _NOT_RUNNING)
                if not over[job]:
                    return  # no answer
        if over[job]:
            stored["state"] = "ended by the scheduler"


# The table.

_TITLES = ("when", "took", "exit", "ranks", "hosts", "job", "command")


def _table(found: Sequence[Stored]) -> list[str]:
    rows = [_TITLES, *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(stored: Stored) -> tuple[str, ...]:
    from shlex import quote  # noqa: PLC0415 - only history needs it

    start, end = _moment(stored["start"]), stored["end"]
    status = str(stored["exit_status"]) if stored["state"] == "ended" else stored["state"]
    if stored["attempt"]:
        status += f", attempt {stored['attempt'] + 1}"
    job = " ".join(filter(None, (stored["machine"], stored["job_id"])))
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start)),
        duration(_moment(end) - start) if end else "", status, str(stored["nproc"]),
        _shortened(stored["hosts"], 24), _shortened(job, 30),
        _shortened(" ".join(map(quote, stored["command"])), 60),
    )  # fmt: skip


def duration(seconds: float) -> str:
    """Return such as 0:07, 12:34 or 26:03:04; a clock that was set back gives 0:00."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _shortened(text: str, width: int) -> str:
    """Return one line of printable text: no command may move the reader's cursor."""
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in text[: width + 1]
    )
    return shown if len(shown) <= width else f"{shown[: width - 3]}..."
