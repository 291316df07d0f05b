"""`ezpz-launch history`: past launches."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ._errors import LaunchError, UsageError
from ._record import ID, process_start, records_folder

if TYPE_CHECKING:
    from typing import Any

    Stored = dict[str, Any]


_TYPES: dict[str, type | tuple[type, ...]] = {
    "id": str, "command": list, "cwd": str, "machine": str, "scheduler": str,
    "job_id": (str, type(None)), "hosts": str, "nproc": int, "host": str, "pid": int,
    "pid_start": (int, type(None)), "start": str, "end": (str, type(None)),
    "exit_status": (int, type(None)), "attempt": int,
}  # fmt: skip
"""What a record must have to be told of; what else it has is passed on."""

_JOB = {"pbs": "PBS_JOBID", "slurm": "SLURM_JOB_ID"}
_OF_A_JOB = ("PBS_JOB", "PBS_NODE", "PBS_ENV", "SLURM_JOB", "SLURM_STEP", "SLURM_NODE", "SLURM_HET")
_NOT_RUNNING = ("that runs; ", "Invalid job id specified")
"""What ezpz_topo's errors say of a job that does not run: in its own words, and in scontrol's."""

_TITLES = ("when", "took", "exit", "ranks", "hosts", "job", "command")
_WIDEST = {"hosts": 24, "job": 30, "command": 60}


USAGE = "ezpz-launch history [-n N] [--json]: the newest N launches, by default 20, newest last"

PAGE = f"""\
usage: {USAGE}

examples:
  ezpz-launch history             a table: when, how long, exit status, ranks, hosts, job, command
  ezpz-launch history -n 3        the last three
  ezpz-launch history --json      as they were recorded, for programs"""


def command(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return what ``ezpz-launch history`` with these words prints.

    Raises:
        UsageError: A word is none of its options.
        LaunchError: See `history`.
    """
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
    if not (limit.isascii() and limit.isdecimal()):
        raise UsageError(f"history: -n {limit}: expected a whole number of launches, such as 20")
    return history(env, limit=int(limit[:9]), as_json=as_json)


def history(env: Mapping[str, str], *, limit: int = 20, as_json: bool = False) -> str:
    """Return the newest launches as a table for people, newest last; or as JSON.

    The column ``exit`` has the exit status, or for one without an end: ``running``; ``never
    ended`` where ezpz-launch was killed or its host went down; and where it was started on another
    host, whose processes cannot be seen from here, ``ended by the scheduler`` if its job is over,
    else ``unknown``. JSON has the records as they were written, a list, each with ``state``:
    ``ended`` or one of these four. Files that do not
    read as records are left out, and counted below the table.

    Args:
        env: The environment, which tells the folder.
        limit: So many launches at most.
        as_json: For programs.

    Raises:
        UsageError: ``limit`` is less than 1.
        LaunchError: The folder cannot be read, or this user has no home.
    """
    if limit < 1:
        raise UsageError(f"history: limit {limit}; expected at least 1 launch")
    import json  # noqa: PLC0415  # 1.5 ms

    folder = records_folder(env)
    found, damaged = _read(folder, limit)
    for stored in found:
        stored["state"] = _state(stored)
    _look_for_jobs([stored for stored in found if stored["state"] == "unknown"], env)
    if as_json:
        return json.dumps(found, indent=1)
    lines = _table(found) if found else [f"no launches so far; they are recorded in {folder}"]
    if damaged:
        what = "1 file" if damaged == 1 else f"{damaged} files"
        lines.append(f"left out, no record that can be read: {what} in {folder}")
    return "\n".join(lines)


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
    import json  # noqa: PLC0415

    if not os.path.isfile(path):  # a FIFO would wait for its writer
        return None
    try:
        with open(path, encoding="utf-8") as file:
            stored = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(stored, dict):
        return None
    if not all(isinstance(stored.get(name, ...), kind) for name, kind in _TYPES.items()):
        return None
    if not all(isinstance(word, str) for word in stored["command"]):
        return None
    started, ended = _moment(stored["start"]), _moment(stored["end"])
    return None if started is None or (stored["end"] and ended is None) else stored


def _state(stored: Stored) -> str:
    """Say whether it has ended; one that was killed could not write that it had."""
    from ezpz_topo import get_hostname, same_host  # noqa: PLC0415

    if stored["end"] is not None:
        return "ended"
    if not same_host(stored["host"], get_hostname()):
        return "unknown"
    if stored["pid_start"] is not None:
        # Another process may have its number by now, but did not start at the same tick.
        alive = process_start(stored["pid"]) == stored["pid_start"]
    else:
        alive = _is_ours(stored["pid"])
    return "running" if alive else "never ended"


def _look_for_jobs(unknown: Sequence[Stored], env: Mapping[str, str]) -> None:
    """Say which of these ended with their jobs: killed with one, a launch cannot write its end."""
    from ezpz_topo import TopoError, get_allocation  # noqa: PLC0415

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


def _is_ours(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):
        return False
    return pid > 0


def _table(found: Sequence[Stored]) -> list[str]:
    rows = [_TITLES, *map(_row, found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(stored: Stored) -> tuple[str, ...]:
    import shlex  # noqa: PLC0415  # 1 ms

    start = _moment(stored["start"])
    end = _moment(stored["end"])
    status = stored["state"]
    if status == "ended":
        status = str(stored["exit_status"])
    if stored["attempt"]:
        status += f", attempt {stored['attempt'] + 1}"
    job = stored["machine"]
    if stored["job_id"]:
        job += f" {stored['job_id']}"
    cells = {
        "hosts": stored["hosts"],
        "job": job,
        "command": shlex.join(stored["command"]),
    }
    short = {name: _shortened(text, _WIDEST[name]) for name, text in cells.items()}
    took = "" if start is None or end is None else _duration(end - start)
    # In the zone of who reads it.
    import time  # noqa: PLC0415

    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start))
    ranks = str(stored["nproc"])
    return (when, took, status, ranks, short["hosts"], short["job"], short["command"])


def _moment(text: str | None) -> float | None:
    """Return seconds since 1970, or None where that is no time of ours."""
    from datetime import datetime  # noqa: PLC0415  # 1 ms

    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except (ValueError, OverflowError):
        return None


def _duration(seconds: float) -> str:
    """Return such as 0:07, 12:34 or 26:03:04; a clock that was set back gives 0:00."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _shortened(text: str, width: int) -> str:
    """Return one line of printable text: no command may move the reader's cursor."""
    shown = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text[: width + 1]
    )
    return shown if len(shown) <= width else f"{shown[: width - 3]}..."
