"""A plan, seen through: its hostfile, its port, its signal, and as many attempts as are allowed."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from ezpz_launch._errors import LaunchError, StageError, UsageError, say
from ezpz_launch._nodes import bad_nodes
from ezpz_launch._plan.launchers import SHIM, hostfile_of, needs_hostfile, pack_env
from ezpz_launch._plan.launchers import argv as argv_of
from ezpz_launch._plan.plan import LaunchPlan, free_port
from ezpz_launch._run.launch import (
    NEVER,
    NODE_TIMEOUT,
    PROGRAMS,
    VARIABLE,
    Control,
    Launch,
    Outcome,
)
from ezpz_launch._run.loop import REQUEUE, run
from ezpz_launch._run.record import Keeper, duration, read_progress, why_not_written
from ezpz_launch._run.signals import Inbox, collect_signals, pause
from ezpz_launch._run.states import SETTLE_SECONDS
from ezpz_topo import Allocation, TopoError, Topology, get_allocation, same_host

_LOOK = 0.1  # seconds between two looks for the first step
_LOOKED_UP = 1000  # so many hosts are looked up, to find whose an address is
_PORTS = 5  # so many ports are tried where another program holds the first ones on rank 0's host


class Preparation(Protocol):
    """What is done on the hosts before the first attempt, and undone after the last one."""

    @property
    def planned(self) -> LaunchPlan:
        """The launch, with what its ranks need then."""

    def bring(self, inbox: Inbox) -> int:
        """Do it; return 0, or the exit status of a launch that is not to be."""

    def end(self) -> None: ...

    def moved(self, path: str) -> str:
        """Return where the ranks find a program of ours."""
        return path


class Attempts:
    def __init__(
        self, planned: LaunchPlan, topology: Topology, env: Mapping[str, str],
        before: int = 0, progress_file: str = "", *, replan: bad_nodes.Replan | None = None,
        prepare: Callable[[LaunchPlan], Preparation] | None = None,
    ) -> None:  # fmt: skip
        """See a plan through; ``before`` attempts were earlier jobs', with a file for all."""
        self._pool, self._suspects = bad_nodes.Pool(planned, replan), bad_nodes.Suspects()
        self._began = self._first_step = self._failed = self._ended = 0.0
        self._allocation = bad_nodes.allocation_of(topology.allocation, planned.request, env)
        self._fault = ""  # the last attempt's, as people read it
        self._sweeps: list[Callable[[], object]] = []
        self._has_successor = bool(progress_file)
        self._topology, self._env = topology, env
        self._before = before
        self._prepare = prepare
        self._preparation: Preparation | None = None
        self._request = planned.request
        self._keeper = Keeper(env)
        self._terminal: Terminal | None = None
        if os.isatty(1) and os.isatty(2) and not self._request.log_dir:
            self._terminal = Terminal(planned, env, self._keeper.run_file)
        self._planned = self._fit(planned)
        self._retries = Retries(self._request.retries)
        self._number = 0
        self._inbox = Inbox([], -1)
        self._sizes: Mapping[str, int] = {}
        self._tmpdir = os.path.abspath(env.get("TMPDIR") or "/tmp")
        given = env.get("EZPZ_NODE_TIMEOUT")
        self._node_timeout = _node_timeout(given) if given else NODE_TIMEOUT
        if self._request.log_dir:
            _make_folder("--log-dir", self._request.log_dir)
        self._signal_at: Callable[[], float] = lambda: NEVER
        if self._request.signal_before:
            self._signal_at = _signal_at(self._request.signal_before, topology.allocation, env)
        self._progress_file = progress_file
        if not progress_file and (self._request.retries or self._pool.replaces):
            self._progress_file = self._keeper.progress_file
        for warning in planned.warnings:
            say(warning)
        if self._pool.replaces:
            # The ranks do not wait for the scheduler's answer.
            job = topology.allocation, env
            threading.Thread(target=bad_nodes.warn_of_the_scheduler, args=job, daemon=True).start()

    def _fit(self, planned: LaunchPlan) -> LaunchPlan:
        """Return a plan whose ranks are told of a terminal; make ready to prepare its hosts."""
        if self._prepare:
            self._end_preparation()
            self._preparation = self._prepare(planned)
        return self._with_terminal(planned)

    def _with_terminal(self, planned: LaunchPlan) -> LaunchPlan:
        if self._terminal:
            added = {**self._terminal.environment, **planned.environment}
            planned = replace(planned, environment=added)
        return planned

    @property
    def launch_id(self) -> str:
        return self._keeper.launch_id

    @property
    def count(self) -> int:
        """So many attempts were made, those of earlier jobs included."""
        return self._before + self._number + 1

    def run(self) -> int:
        """Attempt until it succeeds or must not be tried again; return the exit status."""
        with collect_signals() as self._inbox, ExitStack() as stack:
            stack.callback(self._end_preparation)
            if status := self._begin():
                return status
            while True:
                folder = self._request.log_dir
                self._sizes = _sizes(folder) if folder else {}
                outcome = self._attempt()
                told: int | None = outcome.end_signal
                if outcome.failure and folder:
                    self._say_what_is_in_the_files(outcome.failure[0])
                status, seconds, found = outcome.exit_status, None, self._judge(outcome)
                if found and found.whose == bad_nodes.NODE and self._pool.replaces:
                    seconds = self._replace(found)
                elif status and self._request.retries:
                    seconds = self._pause_after(outcome, found)
                if seconds is not None:
                    told = pause(seconds, self._inbox)
                    if not told:
                        self._planned = _with_new_port(self._planned)
                        self._number += 1
                        continue
                    status = 128 + told
                elif self._has_successor and found and found.whose == bad_nodes.NODE:
                    say(f"exit status {REQUEUE} instead of {status}: the next job has other nodes")
                    status = REQUEUE
                self._end(status, outcome)
                return status

    def _begin(self) -> int:
        """Prepare the hosts; return 0, or the exit status of a launch that is not to be."""
        if self._terminal:
            self._terminal.begin()
        failed = list[str]()
        while self._preparation:
            try:
                if status := self._preparation.bring(self._inbox):
                    return status
                self._planned = self._with_terminal(self._preparation.planned)
                if failed:  # it was theirs: on the others it succeeds
                    bad_nodes.remember(failed, "staging failed", self._allocation, self._env)
                return 0
            except StageError as error:
                if error.is_shared or not self._pool.replaces:
                    raise
                planned, done = self._pool.without(list(error.hosts), self._planned)
                if planned is None:
                    raise
                say(f"{error}; {done}")
                failed += error.hosts
                self._planned = self._fit(planned)
        return 0

    def _end_preparation(self) -> None:
        if self._preparation:
            self._preparation.end()

    def _end(self, status: int, outcome: Outcome) -> None:
        for wait in self._sweeps:
            wait()
        self._keeper.finish(status, outcome.failure)
        if self._terminal:
            self._terminal.end(status)
        if outcome.goes_with_job:
            # Wait for its end: its script shall not go on, and perhaps submit another.
            self._inbox.arrived.clear()
            if pause(_LONGEST_PAUSE, self._inbox):
                time.sleep(SETTLE_SECONDS)  # the script has the same signal

    def _judge(self, outcome: Outcome) -> bad_nodes.Verdict | None:
        """Say whose fault it was, and keep it; None where it did not fail by itself."""
        if outcome.evidence is None or outcome.port_taken or outcome.exit_status == REQUEUE:
            return None
        self._failed, self._ended = outcome.evidence.detected_at, time.time()
        words = self._last_words(outcome)
        found = bad_nodes.verdict(outcome, words, self._host_at)
        several = len(outcome.evidence.hosts) > 1 or self._pool.replaces
        if several:
            found = self._suspects.judge(found, outcome.failure)
        if gone := [outcome.evidence.hosts[node] for node in sorted(outcome.evidence.dead_agents)]:
            launch = f"{self._keeper.launch_id}.{self._number}"
            self._sweeps.append(bad_nodes.sweep(gone, launch, self._planned, self._env))
        # Of a line of the ranks' it may hold anything.
        self._fault = "".join(c if c.isprintable() else "?" for c in bad_nodes.describe(found))
        if several:
            say(self._fault)
            bad_nodes.forget(self._suspects.cleared, self._env)
            if found.whose == bad_nodes.NODE:
                bad_nodes.remember(found.hosts, found.why, self._allocation, self._env)
        told = {"whose": found.whose, "bad": list(found.hosts), "why": found.why}
        self._keeper.note(
            outcome, told, began=self._began, first_step=self._first_step,
            failed=self._failed, ended=self._ended,
        )  # fmt: skip
        return found

    def _replace(self, found: bad_nodes.Verdict) -> float | None:
        """Plan the next attempt without these nodes; return the seconds to wait for it, or None."""
        try:
            planned, done = self._pool.without(found.hosts, self._planned)
            if planned and time.time() >= self._signal_at():
                planned, done = None, "the job's end is near (--signal-before)"
            if planned:
                say(f"{done}; attempt {self._number + 2} begins")
                self._planned = self._fit(planned)
                return None if self._begin() else 0.0
        except (LaunchError, TopoError) as error:  # the end of what failed is still to be seen to
            done = str(error)
        say(f"no other attempt: {done}")
        return None

    def _attempt(self) -> Outcome:
        """Run the plan once, on another port if a program holds the first one."""
        for _ in range(_PORTS):
            outcome = self._run()
            if not outcome.port_taken or outcome.end_signal:
                return outcome
            port = self._planned.environment["MASTER_PORT"]
            taken = f"port {port} is taken on {self._planned.placement.hosts[0]}"
            if self._planned.sources["MASTER_PORT"] == "--env":
                say(f"{taken}; expected a free one; leave --env MASTER_PORT out, or name another")
                return outcome
            say(f"{taken}; trying another")
            self._planned = _with_new_port(self._planned)
        return outcome

    def _run(self) -> Outcome:
        request = self._request
        moved = self._preparation.moved if self._preparation else str
        with launch_of(
            self._planned, self._env, self._tmpdir, shim=moved(SHIM),
            control=self._control(moved), grace=request.grace, idle_timeout=request.idle_timeout,
            signal_at=self._signal_at, end_file=self._keeper.end_file,
        ) as (ready, launch):  # fmt: skip
            return run(launch, self._inbox, lambda: self._on_start(ready, launch.argv))

    def _on_start(self, ready: LaunchPlan, argv: tuple[str, ...]) -> None:
        self._keeper.start(ready, argv, self._topology.allocation)
        self._began, self._first_step = time.time(), 0.0
        if self._number and self._progress_file:
            threading.Thread(target=self._watch_the_first_step, daemon=True).start()
        if not ready.on_this_host and ready.placement.nproc > 1 and not self._number:
            # A name server that does not answer must not hold us up.
            threading.Thread(target=_look_up, args=(ready,), daemon=True).start()

    def _watch_the_first_step(self) -> None:
        """Say how long the launch was not at work, and with what."""
        path, number = self._progress_file, self._number
        while number == self._number and not self._first_step:
            time.sleep(_LOOK)
            with suppress(OSError):
                if os.stat(path).st_mtime > self._began:
                    self._first_step = time.time()
        if self._first_step and self._failed:
            parts = [self._failed, self._ended, self._began, self._first_step]
            spans = [f"{late - early:.1f} s" for early, late in pairwise(parts)]
            say(
                f"attempt {number + 1} is at work {self._first_step - self._failed:.1f} s after "
                f"the failure was seen: {spans[0]} to end the ranks, {spans[1]} to start again, "
                f"{spans[2]} to the first step"
            )

    def _host_at(self, address: str) -> str:
        """Return the host of the launch that has this address, else the address."""
        for host in self._planned.placement.hosts[:_LOOKED_UP]:
            with suppress(OSError):
                if address in {each[4][0] for each in socket.getaddrinfo(host, None)}:
                    return host
        return address

    def _control(self, moved: Callable[[str], str]) -> Control:
        planned, request, job = self._planned, self._request, self._topology.allocation
        first = planned.placement.hosts[0]
        here = planned.on_this_host or same_host(first, job.node_name or "")
        return Control(
            launch_id=f"{self._keeper.launch_id}.{self._number}", attempt=self.count - 1,
            hold_seconds=SETTLE_SECONDS + request.grace + 10, node_timeout=self._node_timeout,
            log_dir=os.path.abspath(request.log_dir) if request.log_dir else "",
            prefix=request.prefix, whole_lines=planned.placement.nproc > 1,
            tee=request.tee, one_device=request.one_device,
            # Ours has been looked at; another host's is looked at there.
            port=0 if here else int(planned.environment["MASTER_PORT"]),
            device_type="" if planned.device_type in ("cpu", "mps") else planned.device_type,
            devices=self._topology.accelerators.count, job_id=job.job_id or "",
            progress_file=self._progress_file, run_file=self._keeper.run_file,
            last_fault=self._fault,
            python=moved(sys.executable), programs=moved(PROGRAMS),
        )  # fmt: skip

    def _pause_after(self, outcome: Outcome, found: bad_nodes.Verdict | None) -> float | None:
        """Return the seconds to wait before the next attempt, and say why; None for no other."""
        # On one node alone it may be the node's, and then another attempt may succeed.
        may_be_nodes = (
            found and found.whose == bad_nodes.UNKNOWN and found.hosts and self._pool.replaces
        )
        seconds, why = self._retries.decide(
            outcome.exit_status,
            told=outcome.end_signal is not None,
            import_error=not may_be_nodes and ends_with_import_error(self._last_words(outcome)),
            progress=read_progress(self._progress_file),
        )
        if seconds is None:
            why = f"no retry: {why}"
        elif time.time() + seconds >= self._signal_at():
            seconds, why = None, "no retry: the job's end is near (--signal-before)"
        say(why)
        return seconds

    def _last_words(self, outcome: Outcome) -> bytes:
        """Return the end of what the rank that failed first wrote to standard error."""
        if outcome.failure and self._request.log_dir:
            return _tail(self._request.log_dir, outcome.failure[0], self._sizes)
        return outcome.tail

    def _say_what_is_in_the_files(self, rank: int) -> None:
        folder = self._request.log_dir
        text = b"" if self._request.tee else _tail(folder, rank, self._sizes)
        if lines := text.decode(errors="replace").splitlines()[-_LINES:]:
            path = os.path.join(folder, f"rank-{rank}.err")
            say("\n".join([f"the end of {path}:", *(f"  {line}" for line in lines)]))
        if why := why_not_written(folder):
            say(f"--log-dir {folder}: {why}; the ranks' last words may be missing there")


def _node_timeout(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 3 <= int(text[:6]) <= 86400):
        raise UsageError(
            f"EZPZ_NODE_TIMEOUT={text!r}: expected whole seconds, from 3 to 86400, after which a "
            f"node that does not answer is lost; unset it for {NODE_TIMEOUT}"
        )
    return int(text)


def _with_new_port(planned: LaunchPlan) -> LaunchPlan:
    """Return the plan with another port, unless the user chose it."""
    if planned.sources["MASTER_PORT"] == "--env":
        return planned
    return replace(planned, environment={**planned.environment, "MASTER_PORT": str(free_port())})


def _look_up(planned: LaunchPlan) -> None:
    """Say early that MASTER_ADDR cannot be looked up: the ranks would say so late."""
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
def launch_of(
    planned: LaunchPlan, env: Mapping[str, str], directory: str, shim: str = SHIM, **more: Any
) -> Iterator[tuple[LaunchPlan, Launch]]:
    """Return a plan as it is run, and what runs it; ``more`` is what a plan does not say."""
    environment = {name: value for name, value in env.items() if name not in planned.removed}
    environment |= planned.environment
    packed = pack_env(environment)
    with _hostfile(replace(planned, control=(VARIABLE, *packed)), directory) as ready:
        placement = ready.placement
        yield ready, Launch(
            argv=tuple(shim if word == SHIM else word for word in argv_of(ready)),
            nproc=placement.nproc, hosts=placement.hosts, ppn=placement.ppn,
            on_this_host=ready.on_this_host, environment=environment | packed,
            scratch="" if ready.hostfile == planned.hostfile else ready.hostfile, **more,
        )  # fmt: skip


@contextmanager
def _hostfile(planned: LaunchPlan, directory: str) -> Iterator[LaunchPlan]:
    """Write the hostfile that the launcher reads, if it reads one, for as long as it may."""
    if not needs_hostfile(planned):
        yield planned
        return
    path = os.path.join(directory, f"ezpz-hosts-{os.urandom(8).hex()}")
    lines = hostfile_of(planned)  # none: the launcher makes a folder there
    try:
        if lines:
            with open(path, "x", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise LaunchError(
            f"cannot make a file in {directory} ({error.strerror}); expected a directory for the "
            "launcher's hostfile; set TMPDIR to one"
        ) from error
    try:
        yield replace(planned, hostfile=path)
    finally:
        if lines:
            with suppress(FileNotFoundError):  # what cleans /tmp found it old
                os.unlink(path)
        else:
            shutil.rmtree(path, ignore_errors=True)


# A launch whose output is shown on a terminal: what its ranks are told, and what people are.


class Terminal:
    def __init__(self, planned: LaunchPlan, env: Mapping[str, str], run_file: str) -> None:
        self._planned, self._run_file = planned, run_file
        self._began = time.monotonic()
        columns, lines = os.get_terminal_size(1)
        if planned.request.prefix:
            placement = planned.placement
            columns -= len(f"[{placement.nproc - 1}@{max(placement.hosts, key=len)}] ")
        # Ours is read by the rank's pump and by ezpz_obs. FORCE_COLOR is read by rich, structlog,
        # termcolor, pytest, and Python from 3.13 on (docs.python.org/3/using/cmdline.html,
        # "Controlling color"); COLUMNS and LINES by Python's shutil and rich; TQDM_NCOLS by tqdm,
        # which leaves a column free and else asks the pipe that it has (tqdm/utils.py, 4.70).
        told = {"EZPZ_TERMINAL": "1", "TERM": "xterm", "FORCE_COLOR": "1"}
        if columns > 20 and lines > 0:  # some pseudo-terminals have no size
            told |= {"COLUMNS": f"{columns}", "LINES": f"{lines}", "TQDM_NCOLS": f"{columns - 1}"}
        if env.get("NO_COLOR") or env.get("TERM") == "dumb":
            del told["FORCE_COLOR"]
        # What is added to the ranks' environment; what the user has set, stays.
        self.environment = {name: env.get(name, value) for name, value in told.items()}

    def begin(self) -> None:
        """Say what is started: it may take a rank a minute to import torch."""
        launcher, placement = self._planned.launcher, self._planned.placement
        program, count = os.path.basename(launcher.path), len(placement.hosts)
        own = program.startswith(("python", launcher.kind))
        how = launcher.kind if own else f"{program} ({launcher.kind})"
        first = os.uname().nodename if self._planned.on_this_host else placement.hosts[0]
        ranks = f"{placement.nproc} rank{'s' * (placement.nproc > 1)}"
        say(f"{ranks} on {first if count == 1 else f'{count} hosts'} by {how}")

    def end(self, status: int) -> None:
        """Say that all is well, and in any case where the metrics are."""
        words = [f"ok in {duration(time.monotonic() - self._began)}"] if not status else []
        with suppress(OSError):  # no History of rank 0's, or on a host that does not share the file
            with open(self._run_file, encoding="utf-8", errors="surrogateescape") as file:
                folder = os.path.relpath(os.path.dirname(file.read().strip()))
            words.append(f"metrics: ezpz-obs report {folder}")
        if words:
            say("; ".join(words))


# The ranks' files, in --log-dir.

_TAIL, _LINES = 1 << 13, 20
"""Bytes, and lines, of a rank's file that are looked at when it has failed."""


def _make_folder(option: str, folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        why = why_not_written(folder)
    except OSError as error:
        why = str(error.strerror)
    if why:
        raise LaunchError(f"{option} {folder}: {why}; expected a folder that can be written")


def _sizes(folder: str) -> dict[str, int]:
    """Return how long the files of a folder are: what is there is of another launch, or attempt."""
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def _tail(folder: str, rank: int, before: Mapping[str, int]) -> bytes:
    name = f"rank-{rank}.err"
    try:
        with open(os.path.join(folder, name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(before.get(name, 0), size - _TAIL))
            return file.read()
    except OSError:
        return b""  # on a disk of another host


# Whether a launch that failed is started again, and after how long: pure policy.

_LONGEST_PAUSE = 60.0  # seconds; the pauses before it are 1, 2, 4, ...
_WITHOUT_PROGRESS = 2  # so many attempts in a row without progress are the last

_NEVER_AGAIN = {
    2: "exit status 2 is a usage error, which another attempt repeats",
    75: "exit status 75 means checkpointed, to be requeued",
    126: "exit status 126: the program cannot be executed",
    127: "exit status 127: the program was not found",
}

_FAILED_IMPORT = re.compile(r"(?:[\w.]+\.)?(?:ModuleNotFoundError|ImportError)\s*(?::|$)")


class Progress(NamedTuple):
    """What attempts in a row have come to, be they of one launch, or jobs of a chain."""

    best: int = -1  # the highest step that one reported; -1 for none
    idle: int = 0  # attempts since then

    def after(self, step: int | None) -> Progress:
        step = -1 if step is None else step
        return Progress(max(self.best, step), 0 if step > self.best else self.idle + 1)

    def why_stop(self, attempts: str = "attempts") -> str:
        """Say why there should be no other; empty where there may be."""
        if self.idle < _WITHOUT_PROGRESS:
            return ""
        best = f"step {self.best} is the highest" if self.best >= 0 else "none reported any"
        return (
            f"{self.idle} {attempts} in a row without progress ({best}); expected a higher "
            "step in EZPZ_PROGRESS_FILE; see the error above, or let the script report it"
        )


class Retries:
    """How often a launch may be started again; call `decide` once after each attempt."""

    def __init__(self, allowed: int) -> None:
        self._allowed, self._done = allowed, 0
        self._progress = Progress()

    def decide(
        self, exit_status: int, *, told: bool = False, import_error: bool = False,
        progress: int | None = None,
    ) -> tuple[float | None, str]:  # fmt: skip
        """Return the seconds to wait before the next attempt, None for no other; and why."""
        self._progress = self._progress.after(progress)
        if told:
            return None, "it was told to end"
        if exit_status in _NEVER_AGAIN:
            return None, _NEVER_AGAIN[exit_status]
        if import_error:
            return None, "a failed import, which another attempt repeats"
        if self._done >= self._allowed:
            return None, f"all retries are used ({self._allowed})"
        if why := self._progress.why_stop():
            return None, why
        seconds = min(_LONGEST_PAUSE, 2.0 ** min(self._done, 10))
        self._done += 1
        why = f"exit status {exit_status}: retry {self._done} of {self._allowed} in {seconds:g} s"
        return seconds, why


def ends_with_import_error(stderr: bytes) -> bool:
    """Whether a rank's last words are Python's traceback of an import that failed."""
    *_, (_, raised, _) = [(0, "", b""), *bad_nodes.tracebacks(stderr)]
    return _FAILED_IMPORT.match(raised) is not None


# When the job ends, and so when --signal-before has to tell the ranks.

_END, _START = "SLURM_JOB_END_TIME", "SLURM_JOB_START_TIME"
_REMEDY = "leave --signal-before out, or"

_ANSWER = 3.0  # seconds that the scheduler has to tell the job's end before the ranks start without
_ASK_AGAIN = 60.0  # seconds, at most, between two questions to a scheduler that does not answer


class UnansweredError(LaunchError):
    """The scheduler, whose job this is, did not tell its end: it may do so later."""


def _signal_at(before: float, job: Allocation, env: Mapping[str, str]) -> Callable[[], float]:
    """Return what tells when --signal-before is due, in seconds since 1970."""
    limit, due, errors = time_limit(env), [NEVER], list[LaunchError]()
    asked, late = threading.Event(), threading.Event()

    def ask() -> None:
        pause = 1.0
        while True:
            try:
                now = time.time()
                wait, note = when_to_signal(job_end(job, env, now), before, now, limit=limit)
                due.append(now + wait)
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
    if due[-1] == NEVER:
        why = errors[0] if errors else f"--signal-before: {job.scheduler} does not answer"
        say(f"{why}; the ranks start, and it is asked again until it tells")
    return lambda: due[-1]


def job_end(job: Allocation, env: Mapping[str, str], now: float) -> float:
    if job.ends_at is not None and job.ends_at.timestamp() > now:
        return job.ends_at.timestamp()
    try:
        asked = get_allocation({**env, _END: ""}, ask=True)
    except TopoError as error:
        kind = LaunchError if job.scheduler == "none" else UnansweredError
        raise kind(f"--signal-before: the job's end is not known: {error}") from error
    if asked.ends_at is not None:
        return asked.ends_at.timestamp()
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


def time_limit(env: Mapping[str, str]) -> float | None:
    """Return the job's time limit in seconds, where its variables tell."""
    start, end = env.get(_START, ""), env.get(_END, "")
    if not all(re.fullmatch("[1-9][0-9]{8,9}", text) for text in (start, end)):
        return None
    seconds = int(end) - int(start)
    # Without a limit the end is 2**32 - 1 or thereabouts.
    return float(seconds) if seconds > 0 and int(end) < 2**32 - 16 else None


def when_to_signal(
    end: float, before: float, now: float, *, limit: float | None = None
) -> tuple[float, str]:
    """Return the seconds to wait for the signal, and what people should know."""
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
