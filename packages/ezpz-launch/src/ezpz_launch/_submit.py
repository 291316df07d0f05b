"""Jobs: what was submitted, as one record a chain, kept by the jobs themselves as they run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ._errors import LaunchError
from ._record import ID, dump, records_folder, write
from ._version import __version__

# The record of a job, or of a chain of them: one JSON file, beside the batch script.


class Chain(NamedTuple):
    """What is known of a job that was submitted, and of its successors; the fields of the file."""

    id: str  # the job's name, "-", and an id as a launch has it, which sorts by time
    name: str  # as the scheduler knows it
    kind: str  # job, array, until-done (each submits the next) or chain (submitted beforehand)
    command: tuple[str, ...]  # the user's, without what is secret; the script has it whole
    cwd: str  # where it was submitted, and runs
    machine: str
    scheduler: str  # slurm or pbs
    submit: tuple[str, ...]  # the words that submit one more of it, from any host
    script: str  # path of the batch script
    output: str  # path of a job's output, in which %j is the number of its id
    options: Mapping[str, object]  # nodes, time (seconds), queue, account: None where left out
    limit: int  # so many jobs at most
    start: str  # when it was submitted: ISO 8601, UTC
    jobs: tuple[Mapping[str, Any], ...] = ()  # in order; `job_entry` has the keys of each
    attempts: int = 0  # launches that were started, retries and requeues included
    progress_file: str = ""  # where ranks report their progress, the same for all jobs
    best: int = -1  # the highest step that a job reported; -1 for none
    idle: int = 0  # jobs in a row without progress
    end: str | None = None  # when the outcome was known
    outcome: str | None = None  # done, failed, stopped or killed; None while it goes on
    why: str = ""  # of the outcome, in words for people
    version: str = __version__


def job_entry(job_id: str, submitted: str) -> dict[str, Any]:
    """Return the entry of a job that was submitted; the job writes the rest as it runs."""
    return {
        "id": job_id,  # the scheduler's, whole: 12, 12.pbs-0001, 40[].pbs-0001
        "submitted": submitted,
        "start": None,  # the last time that it began
        "end": None,  # None also where it was killed before it could write
        "exit_status": None,  # of ezpz-launch
        "launch": None,  # id of its record in launches; None where it was surplus
    }


_NAMES = rf"[A-Za-z][\w.+-]*-{ID}"
"""The names of our files, and of their batch scripts."""

_TYPES: dict[str, type | tuple[type, ...]] = {
    "id": str, "name": str, "kind": str, "command": list, "cwd": str, "machine": str,
    "scheduler": str, "submit": list, "script": str, "output": str, "options": dict, "limit": int,
    "start": str, "jobs": list, "attempts": int, "progress_file": str, "best": int, "idle": int,
    "end": (str, type(None)), "outcome": (str, type(None)), "why": str, "version": str,
}  # fmt: skip


def jobs_folder(env: Mapping[str, str]) -> str:
    """Return the folder of these records, beside that of launches; it need not exist."""
    return records_folder(env, "jobs")


def read_chain(path: str) -> Chain | None:
    """Return the record in a file; None where there is none that can be read."""
    import json  # noqa: PLC0415 - only jobs that were submitted need it

    if not os.path.isfile(path):  # a FIFO would wait for its writer
        return None
    try:
        with open(path, encoding="utf-8") as file:
            stored = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    is_record = (
        isinstance(stored, dict)
        and all(isinstance(stored.get(name, ...), kind) for name, kind in _TYPES.items())
        and all(isinstance(job, dict) and isinstance(job.get("id"), str) for job in stored["jobs"])
    )
    if not is_record:
        return None
    values = {name: stored[name] for name in Chain._fields}
    lists = {name: tuple(values[name]) for name in ("command", "submit", "jobs")}
    return Chain(**{**values, **lists})


def read_chains(env: Mapping[str, str], limit: int) -> tuple[list[Chain], int]:
    """Return the newest records, newest last, and how many files among them are none."""
    folder = jobs_folder(env)
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".json")]
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise LaunchError(
            f"{folder} cannot be read ({error.strerror}); expected the folder of submitted jobs; "
            "make it readable, or set EZPZ_STATE_DIR to another"
        ) from error
    ours = [(match[1], name) for name in names if (match := re.fullmatch(_NAMES, name))]
    newest = sorted(ours)[-limit:]
    found = [read_chain(os.path.join(folder, name)) for _, name in newest]
    read = [chain for chain in found if chain is not None]
    return read, len(found) - len(read)


def change_chain(path: str, **values: Any) -> Chain | None:
    """Read the record again, and write it with these fields changed; None where it is gone."""
    chain = read_chain(path)
    if chain is not None:
        chain = chain._replace(**values)
        write(path, dump(chain._asdict()))
    return chain
