"""`ezpz-launch history`: past launches, as a table for people or as JSON."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ezpz_topo import TopoError, get_allocation, get_hostname, same_host

from ._errors import LaunchError, UsageError
from ._record import ID, process_start, records_folder

USAGE = "ezpz-launch history [-n N] [--json]: the newest N launches, by default 20, newest last"

PAGE = f"""\
usage: {USAGE}

examples:
  ezpz-launch history             a table: when, how long, exit status, ranks, hosts, job, command
  ezpz-launch history -n 3        the last three
  ezpz-launch history --json      as they were recorded, for programs"""


def command(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return what ``ezpz-launch history`` with these words prints."""
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
        raise UsageError(
            f"history: -n {limit}: expected a whole number of launches from 1, such as 20"
        )
    return _history(env, int(limit[:9]), as_json=as_json)


def _history(env: Mapping[str, str], limit: int, *, as_json: bool) -> str:
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
    """Return seconds since 1970."""
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
    is_there = _is_ours(pid) if born is None else process_start(pid) == born
    return "running" if is_there else "never ended"


def _is_ours(pid: int) -> bool:
    """Whether this user has such a process, where there is no /proc to ask (macOS)."""
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):
        return False
    return pid > 0


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
    start, end = _moment(stored["start"]), stored["end"]
    status = str(stored["exit_status"]) if stored["state"] == "ended" else stored["state"]
    if stored["attempt"]:
        status += f", attempt {stored['attempt'] + 1}"
    job = " ".join(filter(None, (stored["machine"], stored["job_id"])))
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start)),
        _duration(_moment(end) - start) if end else "",
        status,
        str(stored["nproc"]),
        _shortened(stored["hosts"], 24),
        _shortened(job, 30),
        _shortened(shlex.join(stored["command"]), 60),
    )


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
