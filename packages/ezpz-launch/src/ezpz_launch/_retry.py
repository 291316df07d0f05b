"""Attempts: what is tried again, and what the end of the walltime asks for."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

from ezpz_topo import Allocation, TopoError, Topology, get_allocation, same_host

from ._environment import free_port
from ._errors import LaunchError, UsageError, say
from ._launch import NEVER, NODE_TIMEOUT, Control, Heard, Launch, Outcome, pause, signals
from ._options import Request
from ._plan import LaunchPlan
from ._record import Keeper
from ._run import SETTLE, run
from .launchers import argv as argv_of
from .launchers import hostfile_of, needs_hostfile

# Whether a launch that failed is started again, and after how long: pure policy.

LONGEST_PAUSE = 60.0
"""Seconds; the pauses before it are 1, 2, 4, ..."""

WITHOUT_PROGRESS = 2
"""So many attempts in a row without progress are the last."""

_NEVER = {
    0: "it succeeded",
    2: "exit status 2 is a usage error, which another attempt repeats",
    75: "exit status 75 means check-pointed, to be requeued",
    126: "exit status 126: the program cannot be executed",
    127: "exit status 127: the program was not found",
}

_TRACEBACK = b"Traceback (most recent call last):"
_ERROR_NAME = re.compile(rb"(?:[\w.]+\.)?(?:ModuleNotFoundError|ImportError)\s*(?::|$)")

_PREFIX = re.compile(rb"\[[0-9]+@[^\]\s]*\] ?")


class Attempt(NamedTuple):
    """How one attempt ended.

    Attributes:
        exit_status: The attempt's exit status, as `run` returns it.
        told: Whether a signal to the launcher ended it: the user or the scheduler wants an end.
        import_error: Whether the first failing rank died of a failed import.
        progress: The highest step reported so far; None if none was.
    """

    exit_status: int
    told: bool = False
    import_error: bool = False
    progress: int | None = None


class Decision(NamedTuple):
    """What follows.

    Attributes:
        retry: Whether to start again.
        pause: Seconds to wait before; 0 without another attempt.
        why: The reason, for people.
    """

    retry: bool
    pause: float
    why: str


class Retries:
    """The attempts of one launch: call `decide` once after each."""

    def __init__(self, allowed: int) -> None:
        """Allow so many attempts after the first.

        Args:
            allowed: Number of retries, from 0.

        Raises:
            ValueError: It is negative.
        """
        if allowed < 0:
            raise ValueError(f"allowed: got {allowed}; expected 0 or more")
        self.allowed = allowed
        self.done = 0
        """Retries decided on so far, which is the number of the attempt that runs, from 0."""
        self._best = -1
        self._idle = 0

    def decide(self, attempt: Attempt) -> Decision:
        """Say whether to start again after an attempt that ended so.

        Not after success, a signal to the launcher, exit status 2, 75, 126 or 127, or a failed
        import: the next attempt would end alike, or nobody wants it. A hang (124) is retried.
        An attempt has made progress when it reported a higher step than all before it.
        """
        progress = -1 if attempt.progress is None else attempt.progress
        self._idle = 0 if progress > self._best else self._idle + 1
        self._best = max(self._best, progress)
        against = self._against(attempt)
        if against:
            return Decision(retry=False, pause=0.0, why=against)
        pause = min(LONGEST_PAUSE, 2.0 ** min(self.done, 10))
        self.done += 1
        return Decision(
            retry=True,
            pause=pause,
            why=f"exit status {attempt.exit_status}: retry {self.done} of {self.allowed} "
            f"in {pause:g} s",
        )

    def _against(self, attempt: Attempt) -> str:
        """Return why there is no other attempt; empty if there is one."""
        if attempt.told:
            return "it was told to end"
        if attempt.exit_status in _NEVER:
            return _NEVER[attempt.exit_status]
        if attempt.import_error:
            return "a failed import, which another attempt repeats"
        if self.done >= self.allowed:
            return f"all retries are used ({self.allowed})" if self.allowed else "no --retries"
        if self._idle >= WITHOUT_PROGRESS:
            best = f"step {self._best} is the highest" if self._best >= 0 else "none reported any"
            return (
                f"{self._idle} attempts in a row without progress ({best}); expected a higher "
                "step in EZPZ_PROGRESS_FILE; see the error above, or let the script report it"
            )
        return ""


def ends_with_import_error(stderr: bytes) -> bool:
    """Whether a rank's last words are Python's traceback of an import that failed.

    Args:
        stderr: The end of its standard error; a prefix ``[rank@host] `` does no harm.
    """
    _, found, tail = stderr.rpartition(_TRACEBACK)
    if not found:
        return False
    lines = [_PREFIX.sub(b"", line) for line in tail.splitlines() if line.strip()]
    # The lines of a traceback are indented; the first that is not names the exception.
    named = next((line for line in lines if not line[:1].isspace()), b"")
    return _ERROR_NAME.match(named) is not None


# When the job ends, and so when ``--signal-before`` has to tell the ranks.

_END, _START = "SLURM_JOB_END_TIME", "SLURM_JOB_START_TIME"
_REMEDY = "leave --signal-before out, or"


class UnansweredError(LaunchError):
    """The scheduler, whose job this is, did not tell its end: it may do so later."""


def job_end(job: Allocation, env: Mapping[str, str], *, now: float) -> tuple[float, str]:
    """Return when the job's time limit ends, and by what that is known.

    A command of the scheduler is started only where the job's variables do not tell, or tell
    of an end that is past: the limit of a running job can be extended, its variables not.

    Args:
        job: The job that we are in, as a topology has it.
        env: The job's environment.
        now: Seconds since 1970.

    Returns:
        Seconds since 1970, and the source.

    Raises:
        UnansweredError: The scheduler does not tell now.
        LaunchError: There is no job, or it has no time limit.
    """
    if job.ends_at is not None and job.ends_at.timestamp() > now:
        return _told(job)
    try:
        asked = get_allocation({**env, _END: ""}, ask=True)
    except TopoError as error:
        kind = LaunchError if job.scheduler == "none" else UnansweredError
        raise kind(f"--signal-before: the job's end is not known: {error}") from error
    if asked.ends_at is not None:
        return _told(asked)
    if asked.scheduler == "none":
        raise LaunchError(
            f"--signal-before: no job here ({asked.sources['scheduler']}); expected one of Slurm "
            f"or PBS, which has an end; {_REMEDY} send SIGUSR1 to ezpz-launch yourself"
        )
    why = next((note for note in asked.notes if note.startswith("end of the walltime: ")), "")
    if why:
        raise UnansweredError(f"--signal-before: {why}; expected the end of job {asked.job_id}")
    raise LaunchError(
        f"--signal-before: job {asked.job_id} has no time limit, says {asked.scheduler}; expected "
        f"one; {_REMEDY} submit with a walltime"
    )


def _told(job: Allocation) -> tuple[float, str]:
    assert job.ends_at is not None
    return job.ends_at.timestamp(), job.sources.get("ends_at", job.scheduler)


def time_limit(env: Mapping[str, str]) -> float | None:
    """Return the job's time limit in seconds, where its variables tell; else None."""
    start, end = env.get(_START, ""), env.get(_END, "")
    if not all(re.fullmatch("[1-9][0-9]{8,9}", text) for text in (start, end)):
        return None
    seconds = int(end) - int(start)
    # Without a limit the end is 2**32 - 1 or thereabouts.
    return float(seconds) if seconds > 0 and int(end) < 2**32 - 16 else None


def when_to_signal(
    end: float, before: float, now: float, *, limit: float | None = None
) -> tuple[float, str]:
    """Return how long to wait for the signal, and what people should know.

    Where less is left than was asked for, the signal is due at once: what was to be done in
    that time may fit in what is left. It must still not come before the ranks have started,
    which a signal that they do not handle yet would end.

    Args:
        end: The job's end, seconds since 1970.
        before: So many seconds before it the signal is due.
        now: Seconds since 1970.
        limit: The job's whole time limit in seconds, where it is known.

    Returns:
        Seconds to wait from ``now``, 0 for at once; and a note, empty where all is as asked.

    Raises:
        UsageError: ``before`` is not above 0, or not below the limit.
    """
    if not 0 < before < float("inf"):
        raise UsageError(f"--signal-before {before:g}: expected a number of seconds above 0")
    if limit is not None and before >= limit:
        raise UsageError(
            f"--signal-before {before:g}: the whole job has {limit:g} s; expected less; submit "
            "with a longer walltime, or ask for the signal later"
        )
    left = end - now
    if left > before:
        return left - before, ""
    what = f"{left:.0f} s of the job are left" if left > 0 else f"its end was {-left:.0f} s ago"
    return 0.0, f"--signal-before {before:g}: {what}; SIGUSR1 is sent as soon as the ranks run"


# A plan, seen through: its hostfile, its port, and as many attempts as the user allows.

_PORTS = 5
"""So many ports are tried where another program holds the first ones on rank 0's host."""

_ANSWER = 3.0
"""Seconds that the scheduler has to tell the job's end before the ranks start without."""

_ASK_AGAIN = 60.0
"""Seconds, at most, between two questions to a scheduler that does not answer."""

_TAIL = 1 << 13
_LINES = 20
"""Bytes, and lines, of a rank's file that are looked at when it has failed."""


def see_through(planned: LaunchPlan, topology: Topology, env: Mapping[str, str]) -> int:
    """Run a plan to its end, again if it fails and the user allows it; return its exit status.

    Args:
        planned: The plan.
        topology: Where we are.
        env: The environment we were called with.

    Raises:
        LaunchError: It cannot be started.
    """
    return _Attempts(planned, topology, env).to_the_last()


class _Attempts:
    """The attempts of one launch."""

    def __init__(self, planned: LaunchPlan, topology: Topology, env: Mapping[str, str]) -> None:
        self._planned, self._topology, self._env = planned, topology, env
        self._request = planned.request
        self._keeper = Keeper(topology, env)
        self._retries = _retries(self._request.retries)
        self._progress_file = self._keeper.progress_file if self._retries else ""
        self._number = 0
        self._heard: Heard = ([], -1)
        self._node_timeout = _node_timeout(env)
        _make_log_dir(self._request.log_dir)
        self._signal_at = _signal_at(planned, topology, env)
        for warning in planned.warnings:
            say(warning)

    def to_the_last(self) -> int:
        """Attempt until it succeeds or must not be tried again; return the exit status."""
        with signals() as self._heard:
            return self._until_the_last()

    def _until_the_last(self) -> int:
        while True:
            self._sizes = _sizes(self._request.log_dir)
            outcome = self._attempt()
            if outcome.failure and self._request.log_dir:
                self._say_what_is_in_the_files(outcome.failure[0])
            status = outcome.exit_status
            told = self._wait_for_another(outcome)
            if told is None:
                self._keeper.finish(status, outcome.failure)
                return status
            if told:
                self._keeper.finish(128 + told, outcome.failure)
                return 128 + told
            self._planned, self._number = _with_new_port(self._planned), self._number + 1

    def _say_what_is_in_the_files(self, rank: int) -> None:
        folder = self._request.log_dir
        if not self._request.tee:
            _say_last_words(folder, rank, self._sizes)
        if why := _why_not_written(folder):
            say(f"--log-dir {folder}: {why}; the ranks' last words may be missing there")

    def _wait_for_another(self, outcome: Outcome) -> int | None:
        """Pause before the next attempt; return the signal that told us to end, 0 without one.

        None: there is no other attempt.
        """
        if not self._retries or not outcome.exit_status:
            return None
        from ._record import read_progress  # noqa: PLC0415

        words = _last_words(outcome, self._request, self._sizes)
        decision = self._retries.decide(
            Attempt(
                exit_status=outcome.exit_status,
                told=outcome.told is not None,
                import_error=ends_with_import_error(words),
                progress=read_progress(self._progress_file),
            )
        )
        if decision.retry and time.time() + decision.pause >= self._signal_at():
            say("no retry: the job's end is near (--signal-before)")
            return None
        say(decision.why if decision.retry else f"no retry: {decision.why}")
        return pause(decision.pause, self._heard) if decision.retry else None

    def _attempt(self) -> Outcome:
        """Run the plan once, on another port if a program holds the first one."""
        for _ in range(_PORTS):
            outcome = self._run()
            if not outcome.port_taken or outcome.told:
                return outcome
            port = self._planned.environment["MASTER_PORT"]
            taken = f"port {port} is taken on {self._planned.placement.hosts[0]}"
            if _is_users_port(self._planned):
                say(f"{taken}; expected a free one; leave --env MASTER_PORT out, or name another")
                return outcome
            say(f"{taken}; trying another")
            self._planned = _with_new_port(self._planned)
        return outcome

    def _run(self) -> Outcome:
        request, control = self._request, self._control()
        directory = self._env.get("TMPDIR") or "/tmp"
        with _hostfile(replace(self._planned, control=True), directory) as ready:
            argv = tuple(argv_of(ready))
            launch = Launch(
                argv=argv,
                nproc=ready.nproc,
                hosts=ready.placement.hosts,
                ppn=ready.placement.ppn,
                on_this_host=ready.on_this_host,
                environment=self._environment(ready),
                control=control,
                grace=request.grace,
                idle_timeout=request.idle_timeout,
                signal_at=self._signal_at,
                scratch="" if ready.hostfile == self._planned.hostfile else ready.hostfile,
            )
            return run(launch, self._heard, lambda: self._on_start(ready, argv))

    def _on_start(self, ready: LaunchPlan, argv: tuple[str, ...]) -> None:
        self._keeper.start(ready, argv)
        if not ready.on_this_host and ready.nproc > 1 and not self._number:
            import threading  # noqa: PLC0415

            # A name server that does not answer must not hold us up.
            threading.Thread(target=_look_up, args=(ready,), daemon=True).start()

    def _environment(self, ready: LaunchPlan) -> dict[str, str]:
        kept = {name: value for name, value in self._env.items() if name not in ready.removed}
        return {**kept, **ready.environment}

    def _control(self) -> Control:
        planned, request, job = self._planned, self._request, self._topology.allocation
        first = planned.placement.hosts[0]
        here = planned.on_this_host or same_host(first, job.node_name or "")
        return Control(
            launch_id=f"{self._keeper.launch_id}.{self._number}",
            hold=SETTLE + request.grace + 10,
            node_timeout=self._node_timeout,
            files=os.path.abspath(request.log_dir) if request.log_dir else "",
            only_ranks=request.only_ranks,
            prefix=request.prefix,
            # Into a file or a pipe, where no reader waits for half a line.
            whole_lines=planned.nproc > 1 and not (os.isatty(1) and os.isatty(2)),
            tee=request.tee,
            # Ours has been looked at; another host's is looked at there.
            port=0 if here else int(planned.environment["MASTER_PORT"]),
            device_type="" if planned.device_type in ("cpu", "mps") else planned.device_type,
            devices=self._topology.accelerators.count,
            one_device=request.one_device,
            attempt=self._number,
            progress_file=self._progress_file,
            job_id=job.job_id or "",
        )


def _node_timeout(env: Mapping[str, str]) -> int:
    """Return the seconds after which a node that does not answer is lost."""
    text = env.get("EZPZ_NODE_TIMEOUT") or str(NODE_TIMEOUT)
    if not (text.isascii() and text.isdigit() and 3 <= int(text[:6]) <= 86400):
        raise UsageError(
            f"EZPZ_NODE_TIMEOUT={text!r}: expected whole seconds, from 3 to 86400, after which a "
            f"node that does not answer is lost; unset it for {NODE_TIMEOUT}"
        )
    return int(text)


def _retries(allowed: int) -> Retries | None:
    if not allowed:
        return None

    return Retries(allowed)


def _is_users_port(planned: LaunchPlan) -> bool:
    """Whether the user chose the port."""
    return planned.sources["MASTER_PORT"] == "--env"


def _with_new_port(planned: LaunchPlan) -> LaunchPlan:
    """Return the plan with another port, unless the user chose it."""
    if _is_users_port(planned):
        return planned
    return replace(planned, environment={**planned.environment, "MASTER_PORT": str(free_port())})


def _look_up(planned: LaunchPlan) -> None:
    """Say once, early, that the ranks are to meet at a name that is none: they tell it late."""
    import socket  # noqa: PLC0415  # 6 ms

    name = planned.environment["MASTER_ADDR"]
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        say(
            f"MASTER_ADDR={name} ({planned.sources['MASTER_ADDR']}) cannot be looked up on this "
            f"host: {error}; expected a name that every rank finds, or they will not meet; name "
            "another: --env MASTER_ADDR=HOST"
        )


@contextmanager
def _hostfile(planned: LaunchPlan, directory: str) -> Iterator[LaunchPlan]:
    """Write the hostfile that the launcher reads, if it reads one, for as long as it may."""
    if not needs_hostfile(planned):
        yield planned
        return
    path = os.path.join(directory, f"ezpz-hosts-{os.urandom(8).hex()}")
    if planned.launcher.kind == "torchrun":
        try:
            yield replace(planned, hostfile=path)
        finally:
            import shutil  # noqa: PLC0415  # only torchrun leaves a folder

            shutil.rmtree(path, ignore_errors=True)
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise LaunchError(
            f"cannot make a file in {directory} ({error.strerror}); expected a directory for the "
            "launcher's hostfile; set TMPDIR to one"
        ) from error
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in hostfile_of(planned))
        yield replace(planned, hostfile=path)
    finally:
        with suppress(FileNotFoundError):  # what cleans /tmp found it old
            os.unlink(path)


def _signal_at(
    planned: LaunchPlan, topology: Topology, env: Mapping[str, str]
) -> Callable[[], float]:
    """Return what tells when --signal-before is due, in seconds since the epoch.

    A scheduler that does not answer is asked again, meanwhile the ranks run: the nodes are ours.
    """
    before = planned.request.signal_before
    if not before:
        return lambda: NEVER
    import threading  # noqa: PLC0415

    job, limit = topology.allocation, time_limit(env)
    known, errors = [NEVER], list[LaunchError]()
    asked, late = threading.Event(), threading.Event()

    def ask() -> None:
        pause = 1.0
        while True:
            try:
                now = time.time()
                end, _ = job_end(job, env, now=now)
                wait, note = when_to_signal(end, before, now, limit=limit)
                known.append(now + wait)
                if note or late.is_set():
                    say(note or "--signal-before: the job's end is known now")
                break
            except UnansweredError as error:
                errors.append(error)
                asked.set()
            except LaunchError as error:
                errors.append(error)
                if late.is_set():
                    say(str(error))
                break
            time.sleep(pause)
            pause = min(2 * pause, _ASK_AGAIN)
        asked.set()

    threading.Thread(target=ask, daemon=True).start()
    asked.wait(_ANSWER)
    late.set()
    if errors and not isinstance(errors[0], UnansweredError):
        raise errors[0]
    if known[-1] == NEVER:
        why = errors[0] if errors else f"--signal-before: {job.scheduler} does not answer"
        say(f"{why}; the ranks start, and it is asked again until it tells")
    return lambda: known[-1]


def _make_log_dir(folder: str) -> None:
    if folder:
        try:
            os.makedirs(folder, exist_ok=True)
            why = _why_not_written(folder)
        except OSError as error:
            why = str(error.strerror)
        if why:
            raise LaunchError(f"--log-dir {folder}: {why}; expected a folder that can be written")


def _why_not_written(folder: str) -> str:
    """Return why nothing can be written into a folder; a full disk takes a file, but no bytes."""
    path = os.path.join(folder, f".ezpz-{os.urandom(8).hex()}")
    try:
        with open(path, "xb", buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        return str(error.strerror)
    finally:
        with suppress(OSError):  # it may not even have been made
            os.unlink(path)
    return ""


def _sizes(folder: str) -> dict[str, int]:
    """Return how long the files of a folder are: what is there is of another launch, or attempt."""
    if not folder:
        return {}
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def _last_words(outcome: Outcome, request: Request, before: Mapping[str, int]) -> bytes:
    """Return the end of what the rank that failed first wrote to standard error."""
    if outcome.failure and request.log_dir:
        return _tail(request.log_dir, outcome.failure[0], before)
    if request.prefix:
        return b"\n".join(line.partition(b"] ")[2] for line in outcome.tail.splitlines())
    return outcome.tail


def _tail(folder: str, rank: int, before: Mapping[str, int]) -> bytes:
    name = f"rank-{rank}.err"
    try:
        with open(os.path.join(folder, name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(before.get(name, 0), size - _TAIL))
            return file.read()
    except OSError:
        return b""  # on a disk of another host


def _say_last_words(folder: str, rank: int, before: Mapping[str, int]) -> None:
    lines = _tail(folder, rank, before).decode(errors="replace").splitlines()[-_LINES:]
    if lines:
        path = os.path.join(folder, f"rank-{rank}.err")
        say("\n".join([f"the end of {path}:", *(f"  {line}" for line in lines)]))
