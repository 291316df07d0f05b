"""The record that a launch leaves: one JSON file, in the user's state folder, as others of ours."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

from ezpz_launch._errors import LaunchError, say
from ezpz_launch._plan.explain import wrap_last_cell
from ezpz_launch._plan.plan import LaunchPlan
from ezpz_launch._run.launch import Outcome, describe_exit_status
from ezpz_launch._run.processes import is_running, start_time_of
from ezpz_launch._version import __version__
from ezpz_topo import Allocation, fold_nodelist, get_hostname, same_host


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
    attempts: tuple[Mapping[str, object], ...] = ()  # those that have ended: how, where, when
    version: str = __version__


def record_of(launch_id: str, planned: LaunchPlan, argv: Sequence[str], job: Allocation) -> Record:
    cwd, placement = "", planned.placement
    with suppress(OSError):
        cwd = os.getcwd()
    return Record(
        id=launch_id, command=planned.request.command, cwd=cwd, machine=planned.machine.name,
        scheduler=job.scheduler, job_id=job.job_id, hosts=fold_nodelist(placement.hosts),
        nproc=placement.nproc, ppn=placement.ppn, launcher=planned.launcher.kind, argv=tuple(argv),
        environment=dict(planned.environment), host=get_hostname(), pid=os.getpid(),
        pid_start=int(start_time_of(os.getpid()) or 0) or None, start=iso_time(time.time()),
        retries=planned.request.retries,
    )  # fmt: skip


def name_of(command: Sequence[str]) -> str:
    """Return a job's name: that of the script, the module or the program."""
    named = next((word for word in command if word.endswith((".py", ".sh"))), (*command, "")[0])
    if command[1:2] in (("-m",), ["-m"]):
        named = command[2].rpartition(".")[2]
    name = re.sub(r"[^\w.+-]", "_", os.path.splitext(os.path.basename(named))[0], flags=re.ASCII)
    return name[:60] if re.match("[A-Za-z]", name) else f"job-{name}"[:60]


ID = "([0-9]{8}T[0-9]{6,12}Z-[0-9]+-[0-9a-f]+)"
NAMES = rf"(?:[A-Za-z][\w.+-]*-)?{ID}\.(json|json\.new|sh|progress.*|run.*|end.*)"
"""The names of our files: of a launch, or, behind the job's name, of a job, with its script."""


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
    from ezpz_topo import redact  # noqa: PLC0415 - 3 ms: while the ranks start

    values = redact(record._asdict())
    argv = list(record.argv)
    # Behind --escaped each word begins with the shim's "+".
    split = argv.index("--escaped") + 1 if "--escaped" in argv else len(argv)
    words = redact([*argv[:split], *(word.removeprefix("+") for word in argv[split:])])
    values["argv"] = [*words[:split], *(f"+{word}" for word in words[split:])]
    return dump(values)


def dump(values: Mapping[str, object]) -> str:
    """Return valid UTF-8 JSON of values, in which a word of the user's may be none."""
    text = json.dumps(values, indent=1, ensure_ascii=False)
    return re.sub("[\ud800-\udfff]", _escaped, text) + "\n"


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    # Python holds a byte 0x80 to 0xff that is no UTF-8 as 0xdc80 to 0xdcff.
    return rf"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else rf"\\u{code:04x}"


# The folder.

KEPT = 1000  # so many records are kept, the newest; older ones go when there are a tenth more


def records_folder(env: Mapping[str, str], kind: str = "launches") -> str:
    """Return a folder in ``EZPZ_STATE_DIR`` or the user's state folder; it need not exist.

    Args:
        env: The environment to read.
        kind: What the folder is called there.

    Raises:
        LaunchError: The environment names neither, and no home directory.
    """
    if given := env.get("EZPZ_STATE_DIR"):
        return os.path.join(os.path.abspath(given), kind)
    base = env.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        if sys.platform != "linux":
            from platformdirs import user_state_path  # noqa: PLC0415 - 9 ms, and needless on Linux

            return str(user_state_path("ezpz") / kind)
        base = os.path.join(env.get("HOME") or os.path.expanduser("~"), ".local", "state")
    if not os.path.isabs(base):  # never into the working directory
        raise LaunchError(
            f"HOME={env.get('HOME', '')!r}; expected the home directory of this user; set HOME, "
            "or EZPZ_STATE_DIR to a folder for ezpz's records"
        )
    return os.path.join(base, "ezpz", kind)


def make_folder(folder: str) -> None:
    """Make it and what is above it, all for this user only; makedirs does so with the last only."""
    if os.path.isdir(folder):
        return
    if not os.path.isdir(above := os.path.dirname(folder)):
        make_folder(above)
    with suppress(FileExistsError):  # another launch was quicker
        os.mkdir(folder, 0o700)


def type_of(path: str, mounts: str = "/proc/self/mountinfo") -> str:
    """Return the type of the file system that a path is on; empty where the kernel does not say."""
    path, found = os.path.realpath(path), ("", "")
    with suppress(OSError), open(mounts, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            own, _, its = line.partition(" - ")
            # proc(5): the fifth field is the mount point, with \040 for a space.
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), own.split()[4])
            # Of two on the same point the later one is seen.
            if f"{path}/".startswith(f"{point.rstrip('/')}/") and len(point) >= len(found[0]):
                found = point, its.split()[0]
    return found[1]


def write(path: str, text: str, mode: int = 0o600) -> None:
    """Write a file for this user only; readers see it as it was or as it is, never half."""
    try:
        descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        os.replace(f"{path}.new", path)
    except OSError:
        _remove(f"{path}.new")
        raise


_TRIED = 1 << 20  # bytes that are written to see that they can be


def why_not_written(folder: str) -> str:
    """Write a nameless file; return what is wrong, empty where nothing is."""
    import tempfile  # noqa: PLC0415 - only --log-dir and the doctor need it

    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # A full disk takes a file, but no bytes; no figure tells of a quota.
            file.write(bytes(_TRIED))
            file.flush()
            # What a file system over the network or a quota thinks of it, it may tell only now.
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def unwritable(path: str, error: OSError) -> str:
    return (
        f"{path} cannot be written ({error.strerror or error}); expected a folder of this user "
        "for ezpz's records; set EZPZ_STATE_DIR to another, which the nodes of a job see too"
    )


def prune(folder: str) -> None:
    """Remove all but the newest records, once there are a tenth too many."""
    with suppress(OSError):
        ours = [match for name in os.listdir(folder) if (match := re.fullmatch(NAMES, name))]
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
        self._record: Record | None = None
        self._folder = ""
        try:
            self._folder = records_folder(env)
            make_folder(self._folder)
        except (LaunchError, OSError) as error:
            self._give_up(error)
        # Where scripts report their progress, a History says where its own file is, and other
        # hosts ask for the end; empty where nothing can be written.
        beside = os.path.join(self._folder, self.launch_id)
        self.progress_file, self.run_file, self.end_file = (
            f"{beside}.{name}" if self._folder else "" for name in ("progress", "run", "end")
        )

    def start(self, planned: LaunchPlan, argv: Sequence[str], job: Allocation) -> None:
        """Write that an attempt runs; the ranks do not wait for it."""
        record, before = record_of(self.launch_id, planned, argv, job), self._record
        if before is not None:
            record = record._replace(
                cwd=before.cwd, start=before.start, attempt=before.attempt + 1,
                attempts=before.attempts,
            )  # fmt: skip
        self._record = record
        self._write(record)

    def note(self, outcome: Outcome, verdict: Mapping[str, object], **when: float) -> None:
        """Keep how an attempt ended, to be written with what follows; times are since 1970."""
        if self._record is None:
            return
        ended: dict[str, object] = {
            "attempt": self._record.attempt, "hosts": self._record.hosts,
            "exit_status": outcome.exit_status, "first_failure": _first(outcome.failure),
            **verdict, **{name: iso_time(time) for name, time in when.items() if time},
        }  # fmt: skip
        self._record = self._record._replace(attempts=(*self._record.attempts, ended))

    def finish(self, exit_status: int, failure: tuple[int, str, int] | None) -> None:
        """Write how it ended: the exit status; rank, host and status of the first failure."""
        if self._record is None:
            return  # it has not started
        first = _first(failure)
        if first and self._record.attempts:
            last = self._record.attempts[-1]
            first |= {name: last[name] for name in ("whose", "why") if name in last}
        end = iso_time(time.time())
        self._write(self._record._replace(end=end, exit_status=exit_status, first_failure=first))
        _remove(self.progress_file)
        if self._folder:
            prune(self._folder)

    def _write(self, record: Record) -> None:
        if not self._folder:
            return
        try:
            write(os.path.join(self._folder, f"{record.id}.json"), to_json(record))
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: LaunchError | OSError) -> None:
        why = unwritable(self._folder, error) if isinstance(error, OSError) else error
        self._folder = ""
        say(f"no job record: {why}")


def _first(failure: tuple[int, str, int] | None) -> dict[str, object] | None:
    if failure is None:
        return None
    rank, host, status = failure
    return {"rank": rank, "host": host, "status": status, "how": describe_exit_status(status)}


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


_TAIL = 1 << 16  # bytes of a run's file in which its last record is looked for


def last_record(path: str) -> dict[str, Any]:
    """Return step, loss and time of the last whole record of a run's file (see ezpz-obs)."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        if line.startswith(b'{"step":'):
            try:
                record = json.loads(line)
                losses = [name for name in record if re.split("[/_]", name)[-1] == "loss"]
                loss = {"loss": record[losses[0]]} if losses else {}
                return {"step": record["step"], **loss, "time": record["time"], "run": path}
            except (KeyError, ValueError):
                continue  # a damaged line: the record before it
    return {}


# The records that there are: of launches, and of jobs.

Stored = dict[str, Any]  # a record as it was read; what a later version has written is passed on

_OF_JSON: dict[str, Any] = {"str": str, "int": int, "tuple": (list, tuple), "Mapping": dict}


def _fits(value: object, annotation: str) -> bool:
    """Return whether what was read is what a field of a record is annotated with."""
    if value is None:
        return annotation.endswith("| None")
    outer, _, inner = annotation.partition("[")
    outer = re.split(r"\W", outer)[0]
    if not isinstance(value, _OF_JSON[outer]):
        return False
    return not isinstance(value, list) or all(_fits(each, inner) for each in value)


def read_record(path: str, kind: Any = Record) -> Stored | None:
    """Return the record in a file, with the fields of its class; None where there is none."""
    if not os.path.isfile(path):  # a FIFO would wait for its writer
        return None
    try:
        with open(path, encoding="utf-8") as file:
            stored = {**kind._field_defaults, **json.load(file)}
        moment(stored["start"])
        moment(stored["end"] or stored["start"])
        # Of a NamedTuple they are text in a ForwardRef.
        types = {n: getattr(a, "__forward_arg__", a) for n, a in kind.__annotations__.items()}
        fits = [_fits(stored[name], annotation) for name, annotation in types.items()]
    except (OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None
    return stored if all(fits) else None


def read_records(
    folder: str, limit: int, since: str = "", kind: Any = Record
) -> tuple[list[Stored], int]:
    """Return the newest records since an id, newest last, and how many files of these are none."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise LaunchError(
            f"{folder} cannot be read ({error.strerror}); expected the folder of ezpz's records; "
            "make it readable, or set EZPZ_STATE_DIR to another"
        ) from error
    ours = [match for name in names if (match := re.fullmatch(NAMES, name)) and match[2] == "json"]
    found: list[Stored] = []
    damaged = 0
    for match in sorted(ours, key=lambda each: each[1], reverse=True):
        if len(found) == limit or match[1] < since:
            break
        stored = read_record(os.path.join(folder, match[0]), kind)
        found += [stored] if stored else []
        damaged += stored is None
    return found[::-1], damaged


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def state_of(stored: Stored) -> str:
    """Say ``ended``, ``running``, ``never ended``, or ``unknown`` of a launch on another host."""
    if stored["end"] is not None:
        return "ended"
    if not same_host(stored["host"], get_hostname()):
        return "unknown"
    pid, born = stored["pid"], stored["pid_start"]
    # Another process may have its number by now, but did not start at the same tick.
    is_there = is_running(pid) and (born is None or start_time_of(pid) == str(born))
    return "running" if is_there else "never ended"


# In tables.


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, whose last column a terminal's width breaks."""
    columns = os.get_terminal_size(1).columns if os.isatty(1) else 0
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for *row, last in rows:
        start = "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
        lines += wrap_last_cell(start, last, columns)
    return lines


def duration(seconds: float) -> str:
    """Return such as 0:07, 12:34 or 26:03:04; a clock that was set back gives 0:00."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shortened(text: str, width: int) -> str:
    """Return one line of printable text: no command may move the reader's cursor."""
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in text[: width + 1]
    )
    return shown if len(shown) <= width else f"{shown[: width - 3]}..."
