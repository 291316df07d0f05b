"""A plan, seen through: its hostfile, its port, its signal, and as many attempts as are allowed."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from ezpz_launch._errors import LaunchError, StageError, UsageError, say
from ezpz_launch._nodes import bad_nodes
from ezpz_launch._nodes.job_end import find_signal_time
from ezpz_launch._nodes.retries import Retries, ends_with_import_error
from ezpz_launch._plan.plan import LaunchPlan
from ezpz_launch._plan.ports import reserve_port
from ezpz_launch._plan.shim import PROGRAMS, SHIM
from ezpz_launch._run.launch import (
    NEVER,
    NODE_TIMEOUT,
    Outcome,
    RankSettings,
)
from ezpz_launch._run.loop import REQUEUE, run
from ezpz_launch._run.prepare import prepare_launch
from ezpz_launch._run.rank_files import TAIL_LINES, file_sizes, make_log_dir, read_tail
from ezpz_launch._run.record import Keeper, read_progress, why_not_written
from ezpz_launch._run.signals import Inbox, collect_signals, pause
from ezpz_launch._run.states import SETTLE_SECONDS
from ezpz_launch._run.terminal import Terminal
from ezpz_topo import TopoError, Topology, same_host

_JOB_END_SECONDS = 60.0  # for the end of a job that was requested to end with its launch
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
            make_log_dir("--log-dir", self._request.log_dir)
        self._signal_at: Callable[[], float] = lambda: NEVER
        if self._request.signal_before:
            self._signal_at = find_signal_time(
                self._request.signal_before, topology.allocation, env
            )
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
                self._sizes = file_sizes(folder) if folder else {}
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
            self._terminal.print_start()
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
            self._terminal.print_end(status)
        if outcome.goes_with_job:
            # Wait for its end: its script shall not go on, and perhaps submit another.
            self._inbox.arrived.clear()
            if pause(_JOB_END_SECONDS, self._inbox):
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
        with prepare_launch(
            self._planned, self._env, self._tmpdir, shim=moved(SHIM),
            settings=self._settings(moved), grace=request.grace, idle_timeout=request.idle_timeout,
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

    def _settings(self, moved: Callable[[str], str]) -> RankSettings:
        planned, request, job = self._planned, self._request, self._topology.allocation
        first = planned.placement.hosts[0]
        here = planned.on_this_host or same_host(first, job.node_name or "")
        return RankSettings(
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
            return read_tail(self._request.log_dir, outcome.failure[0], self._sizes)
        return outcome.tail

    def _say_what_is_in_the_files(self, rank: int) -> None:
        folder = self._request.log_dir
        text = b"" if self._request.tee else read_tail(folder, rank, self._sizes)
        if lines := text.decode(errors="replace").splitlines()[-TAIL_LINES:]:
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
    return replace(planned, environment={**planned.environment, "MASTER_PORT": str(reserve_port())})


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
