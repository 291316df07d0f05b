"""A plan, seen through: its hostfile, its port, and as many attempts as the user allows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from ezpz_launch._errors import LaunchError, UsageError
from ezpz_launch._planning.launchers import argv as argv_of
from ezpz_launch._planning.launchers import hostfile_of, needs_hostfile
from ezpz_launch._planning.plan import LaunchPlan
from ezpz_launch._planning.port import free_port
from ezpz_launch._records.keeper import Keeper
from ezpz_launch._request import Request
from ezpz_launch._running.control import NODE_TIMEOUT, Control
from ezpz_launch._running.ending import SETTLE
from ezpz_launch._running.launch import NEVER, Launch
from ezpz_launch._running.outcome import Outcome
from ezpz_launch._running.run import run
from ezpz_launch._running.signals import Heard, pause, signals
from ezpz_launch._say import say
from ezpz_topo import Topology, same_host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ezpz_launch._records.retry import Retries

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
        from ezpz_launch._records.progress import read_progress  # noqa: PLC0415
        from ezpz_launch._records.retry import Attempt, ends_with_import_error  # noqa: PLC0415

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
    from ezpz_launch._records.retry import Retries  # noqa: PLC0415  # few launches need it

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

    from ezpz_launch._records import walltime  # noqa: PLC0415

    job, limit = topology.allocation, walltime.time_limit(env)
    known, errors = [NEVER], list[LaunchError]()
    asked, late = threading.Event(), threading.Event()

    def ask() -> None:
        pause = 1.0
        while True:
            try:
                now = time.time()
                end, _ = walltime.job_end(job, env, now=now)
                wait, note = walltime.when_to_signal(end, before, now, limit=limit)
                known.append(now + wait)
                if note or late.is_set():
                    say(note or "--signal-before: the job's end is known now")
                break
            except walltime.UnansweredError as error:
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
    if errors and not isinstance(errors[0], walltime.UnansweredError):
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
