r"""The record of a launch: one JSON file each, in the user's state folder.

It is written before the ranks start and rewritten when they have ended, so that one without
an end tells of a launcher that runs still or was killed. Secrets are removed while it is
written, never later (see `ezpz_topo.redact`). A record is good to have and no more: where it
cannot be written (no home, a full or read-only disk), one line says so and the launch goes on.

Words of a command can be bytes that are no UTF-8, which JSON cannot hold: such a byte is
written as backslash, x and two digits (``\xff``), so that any reader of JSON takes the file.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ezpz_launch._errors import LaunchError
from ezpz_launch._running.proc import birth, is_running
from ezpz_launch._say import say
from ezpz_launch._version import __version__

from .keeper import new_id
from .state_folder import make_folder, records_folder, remove, why_no_folder, write_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ezpz_launch._planning.plan import LaunchPlan
    from ezpz_topo import Allocation

KEPT = 1000
"""So many records are kept, the newest; older ones go when there are a tenth more."""

ID = r"([0-9]{8}T[0-9]{6,12}Z-[0-9]+-[0-9a-f]+)\.(json|json\.new|progress.*)"
"""The names of our files: by them they sort as time went. Not compiled: few launches need it."""


class Record(NamedTuple):
    """What is known of one launch.

    Attributes:
        id: Sorts by time; unique also among hosts that share the folder.
        command: The user's words.
        cwd: Where it was started; empty where that folder is gone.
        machine: The machine's name.
        scheduler: ``"slurm"``, ``"pbs"`` or ``"none"``.
        job_id: The scheduler's id of the job.
        hosts: The hosts in use, folded: ``nid[001-004]``.
        nproc: Ranks in all.
        ppn: Ranks on a host, at most.
        launcher: Its kind, such as ``"srun"``.
        argv: The launcher's command line, of the last attempt.
        environment: What was added to the ranks' environment, in the last attempt.
        host: The host of ezpz-launch itself.
        pid: Its process id.
        pid_start: When that process started, in the kernel's ticks; None where untold (macOS).
        start: ISO 8601, UTC.
        end: The same; None while it runs.
        exit_status: None while it runs.
        first_failure: ``rank``, ``host``, ``status`` and ``how`` of the rank that failed first.
        attempt: Number of the last attempt, from 0.
        retries: How many more than the first were allowed.
        version: That of ezpz-launch.
    """

    id: str
    command: tuple[str, ...]
    cwd: str
    machine: str
    scheduler: str
    job_id: str | None
    hosts: str
    nproc: int
    ppn: int
    launcher: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    host: str
    pid: int
    pid_start: int | None
    start: str
    end: str | None = None
    exit_status: int | None = None
    first_failure: Mapping[str, object] | None = None
    attempt: int = 0
    retries: int = 0
    version: str = __version__


def record_of(
    planned: LaunchPlan,
    argv: Sequence[str],
    job: Allocation,
    *,
    launch_id: str = "",
    retries: int = 0,
) -> Record:
    """Return the record of a launch that starts now.

    Args:
        planned: What is started.
        argv: The launcher's command line.
        job: The job that we are in.
        launch_id: The launch's id, such as `new_id` gives; a new one if empty.
        retries: How many retries are allowed.
    """
    from ezpz_topo import fold_nodelist, get_hostname  # noqa: PLC0415  # loaded by then

    now = time.time()
    try:
        cwd = os.getcwd()
    except OSError:
        cwd = ""
    return Record(
        id=launch_id or new_id(now),
        command=planned.command,
        cwd=cwd,
        machine=planned.machine.name,
        scheduler=job.scheduler,
        job_id=job.job_id,
        hosts=fold_nodelist(planned.placement.hosts),
        nproc=planned.nproc,
        ppn=planned.placement.ppn,
        launcher=planned.launcher.kind,
        argv=tuple(argv),
        environment=dict(planned.environment),
        host=get_hostname(),
        pid=os.getpid(),
        pid_start=process_start(os.getpid()),
        start=iso_time(now),
        retries=retries,
    )


def iso_time(when: float) -> str:
    """Return seconds since 1970 as ISO 8601 in UTC, such as 2026-11-21T02:10:43.250Z."""
    second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(when))
    return f"{second}.{int(when % 1 * 1e3):03}Z"


def process_start(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None if it is gone, or no Linux."""
    # One that has ended but was not waited for does no more than one that is gone.
    born = birth(pid) if is_running(pid) else ""
    return int(born) if born else None


class Recorder:
    """Writes one launch's record; whatever fails is said once, on stderr, and no more.

    Attributes:
        record: What was written last, its secrets in it: keep it in this process.
        folder: Where; empty where nothing can be written.
        warning: What was said; empty if all went well.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.folder = self.warning = ""

    @classmethod
    def start(cls, record: Record, env: Mapping[str, str]) -> Recorder:
        """Write the record of a launch that starts."""
        recorder = cls(record)
        try:
            recorder.folder = records_folder(env)
            make_folder(recorder.folder)
        except LaunchError as error:
            recorder._warn(str(error))
        except OSError as error:
            recorder._warn(why_no_folder(recorder.folder, error))
        else:
            recorder._write()
        return recorder

    @property
    def progress_path(self) -> str:
        """The file for ``EZPZ_PROGRESS_FILE`` (see `_progress`); empty without a record."""
        return os.path.join(self.folder, f"{self.record.id}.progress") if self.folder else ""

    def next_attempt(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Write that the next attempt starts, with its own command line and environment."""
        self.record = self.record._replace(
            attempt=self.record.attempt + 1,
            argv=tuple(argv),
            environment=dict(environment),
        )
        self._write()

    def finish(
        self,
        exit_status: int,
        first_failure: Mapping[str, object] | None = None,
        when: float | None = None,
    ) -> None:
        """Write how it ended, remove the progress file, and prune if there are many records.

        Args:
            exit_status: What ezpz-launch returns.
            first_failure: ``rank``, ``host``, ``status`` and ``how``, if a rank failed.
            when: Seconds since 1970; now by default.
        """
        self.record = self.record._replace(
            end=iso_time(time.time() if when is None else when),
            exit_status=exit_status,
            first_failure=None if first_failure is None else dict(first_failure),
        )
        if self.folder:
            remove(self.progress_path)
        self._write()
        if self.folder:
            _prune(self.folder)

    def _write(self) -> None:
        if not self.folder:
            return
        path = os.path.join(self.folder, f"{self.record.id}.json")
        try:
            write_whole(path, to_json(self.record).encode())
        except OSError as error:
            self._warn(why_no_folder(self.folder, error))

    def _warn(self, why: str) -> None:
        self.folder = ""
        self.warning = f"no job record: {why}"
        say(self.warning)


def to_json(record: Record) -> str:
    """Return the record as JSON, without its secrets."""
    import json  # noqa: PLC0415  # 1.5 ms

    from ezpz_topo import redact  # noqa: PLC0415  # 3 ms

    values = {name: getattr(record, name) for name in Record._fields}
    values["command"] = redact(record.command)
    values["argv"] = _redacted(record.argv)
    values["environment"] = redact(dict(record.environment))
    if record.first_failure:
        values["first_failure"] = redact(dict(record.first_failure))
    return json.dumps(_readable(values), indent=1, ensure_ascii=False) + "\n"


def _redacted(argv: Sequence[str]) -> list[str]:
    """Return a command line without its secrets, where words may carry the shim's escape, too."""
    from ezpz_topo import redact  # noqa: PLC0415

    escaped = argv.index("--escaped") + 1 if "--escaped" in argv else len(argv)
    words = redact([word.removeprefix("+") for word in argv[escaped:]])
    return [*redact(list(argv[:escaped])), *(f"+{word}" for word in words)]


def _readable(value: object) -> object:
    """Replace what no UTF-8 can hold; lists and dictionaries are gone through."""
    if isinstance(value, str):
        return re.sub("[\ud800-\udfff]", _escaped, value)
    if isinstance(value, Mapping):
        return {str(_readable(name)): _readable(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(held) for held in value]
    return value


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    # Python holds a byte 0x80 to 0xff that is no UTF-8 as 0xdc80 to 0xdcff.
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def _prune(folder: str) -> None:
    """Remove all but the newest records, once there are a tenth too many."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    if len(names) <= KEPT + KEPT // 10:
        return
    matches = [re.fullmatch(ID, name) for name in names]
    ids = sorted(match[1] for match in matches if match and match[2] == "json")
    if len(ids) <= KEPT + KEPT // 10:
        return
    for name in names:
        match = re.fullmatch(ID, name)
        if match and match[1] < ids[-KEPT]:
            remove(os.path.join(folder, name))
