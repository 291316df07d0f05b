"""The record that a launch leaves."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ezpz_topo import Topology

from ._agent import birth_of, is_running
from ._errors import LaunchError, say
from ._launch import how
from ._plan import LaunchPlan
from ._version import __version__

if TYPE_CHECKING:
    from ezpz_topo import Allocation

    from ._plan import LaunchPlan


# The folder of the records, in the user's state folder; it need not exist.


def records_folder(env: Mapping[str, str]) -> str:
    """Return the folder of the records, which need not exist.

    It is ``launches`` in ``EZPZ_STATE_DIR``, else in the user's state folder for ezpz.

    Raises:
        LaunchError: This user has no home.
    """
    given = env.get("EZPZ_STATE_DIR")
    return os.path.join(os.path.abspath(given) if given else _state_folder(env), "launches")


def _state_folder(env: Mapping[str, str]) -> str:
    base = env.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        if sys.platform != "linux":
            from platformdirs import user_state_path  # noqa: PLC0415  # 9 ms

            return str(user_state_path("ezpz"))
        # What platformdirs says as well, without its 9 ms; a test holds us to it.
        base = os.path.join(env.get("HOME") or _home(), ".local", "state")
    if not os.path.isabs(base):
        # Never into the working directory.
        raise LaunchError(
            f"HOME={env.get('HOME', '')!r}; expected the home directory of this user; set HOME, "
            "or EZPZ_STATE_DIR to a folder for ezpz's records"
        )
    return os.path.join(base, "ezpz")


def _home() -> str:
    import pwd  # noqa: PLC0415

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def make_folder(folder: str) -> None:
    """Make it and what is above it, for this user only."""
    try:
        os.mkdir(folder, 0o700)
    except FileNotFoundError:
        make_folder(os.path.dirname(folder))
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise


def write_whole(path: str, data: bytes) -> None:
    """Write a file that readers see as it was or as it is, never half."""
    aside = f"{path}.new"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(aside, path)
    except OSError:
        remove(aside)
        raise


def remove(path: str) -> None:
    """Remove a file, if it can be."""
    # It is not there, or stays until it is pruned.
    with contextlib.suppress(OSError):
        os.unlink(path)


def why_no_folder(folder: str, error: OSError) -> str:
    """Say that the folder cannot be written, and what helps."""
    return (
        f"{folder} cannot be written ({error.strerror or error}); expected a folder of this user; "
        "set EZPZ_STATE_DIR to another"
    )


# How a script tells ezpz-launch that it got further: the contract of ``EZPZ_PROGRESS_FILE``.

PROGRESS_VARIABLE = "EZPZ_PROGRESS_FILE"
"""The variable that names the file."""

_LONGEST = 64
_STEP = re.compile(rb"\s*([0-9]{1,18})\s*")


def read_progress(path: str) -> int | None:
    """Return the step that was reported last, or None where there is none that can be read.

    Never an error: a report that is missing, damaged, negative or half written is no report.
    """
    if not os.path.isfile(path):  # a FIFO would wait for its writer
        return None
    try:
        with open(path, "rb") as file:
            text = file.read(_LONGEST + 1)
    except OSError:
        return None
    step = _STEP.fullmatch(text) if len(text) <= _LONGEST else None
    return int(step[1]) if step else None


# The record of a launch: one JSON file each, in the user's state folder.

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
    born = birth_of(pid) if is_running(pid) else ""
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


# What is kept of a launch while it runs, and after it.


class Keeper:
    """The record of one launch, written while its ranks start: they do not wait for it.

    Args:
        topology: Where we are.
        env: The environment, which tells the folder of the records.

    Attributes:
        launch_id: The launch's id.
    """

    def __init__(self, topology: Topology, env: Mapping[str, str]) -> None:
        self._topology, self._env = topology, env
        self.launch_id = new_id(time.time())
        self._recorder: Recorder | None = None

    @property
    def progress_file(self) -> str:
        """Where scripts report their progress; empty where nothing can be written."""
        from ._errors import LaunchError  # noqa: PLC0415  # only --retries needs it

        try:
            folder = records_folder(self._env)
            make_folder(folder)
        except (LaunchError, OSError):
            # The recorder says so.
            return ""
        return os.path.join(folder, f"{self.launch_id}.progress")

    def start(self, planned: LaunchPlan, argv: Sequence[str]) -> None:
        """Record that an attempt runs."""
        if self._recorder is None:
            job, retries = self._topology.allocation, planned.request.retries
            record = record_of(planned, argv, job, launch_id=self.launch_id, retries=retries)
            self._recorder = Recorder.start(record, self._env)
        else:
            self._recorder.next_attempt(argv, planned.environment)

    def finish(self, exit_status: int, failure: tuple[int, str, int] | None) -> None:
        """Record how it ended."""
        if self._recorder is not None:
            first: dict[str, str | int] | None = None
            if failure:
                rank, host, status = failure
                first = {"rank": rank, "host": host, "status": status, "how": how(status)}
            self._recorder.finish(exit_status, first)


def new_id(now: float) -> str:
    """Return an id for a launch that starts now, in seconds since the epoch: when, who, chance."""
    second = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
    return f"{second}{int(now % 1 * 1e6):06}Z-{os.getpid()}-{os.urandom(3).hex()}"
