"""Start a plan, see it through, and say how it ended."""

from __future__ import annotations

import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

from ._errors import LaunchError
from ._launch import (
    ENDING,
    NEVER,
    USAGE,
    VARIABLE,
    Heard,
    Launch,
    Outcome,
    Status,
    describe,
    exit_status_of,
    name_ranks,
    signals,
)
from ._nodes import LauncherProcess, Nodes, OtherHosts, ThisHost
from ._output import Output, Reports

# When the ranks of a launch are told to end, are killed, and their launcher is ended.

SETTLE = 1.0
"""Seconds that the other ranks have to end by themselves after the first failure.

Ranks that stop together (all check-pointed and exit 75, say) end at nearly the same time.
"""

_LAUNCHER_ENDS = 2.0
"""Seconds that a launcher has to end after its last rank, and again after SIGTERM."""

_KILLED = 0.5
"""Seconds that it has once its ranks have been killed."""

_LINGER = 10.0
"""Seconds that a launcher has to end after ranks that all ended well."""


class Ending:
    """The end of one launch; all times are `time.monotonic`'s seconds.

    Args:
        grace: Seconds between SIGTERM and SIGKILL.

    Attributes:
        begun: Whether the ranks are to end: told by somebody, failed or hanging.
        killed: Whether SIGKILL was sent.
    """

    def __init__(self, grace: float) -> None:
        self.begun = self.killed = False
        self._grace = grace
        self._terminate_at = self._kill_at = self._end_launcher_at = NEVER
        self._end_left_at = NEVER

    @property
    def next(self) -> float:
        """When the next of these is due."""
        return min(self._terminate_at, self._kill_at, self._end_left_at, self._end_launcher_at)

    def told(self, now: float, grace: float) -> None:
        """Let the ranks, which have heard the signal themselves, be killed after a grace."""
        self.begun = True
        self._terminate_at = NEVER
        self._kill_at = min(self._kill_at, now + grace)

    def settle(self, now: float) -> None:
        """Let the ranks end by themselves for a moment; then SIGTERM, then after the grace more."""
        self.begun = True
        self._terminate_at = now + SETTLE
        self._kill_at = now + SETTLE + self._grace

    def forgive(self, seconds: float) -> None:
        """Let those seconds not count for the ranks."""
        self._terminate_at += seconds
        self._kill_at += seconds

    def look(self, now: float, status: Status, nodes: Nodes) -> None:
        """See whether the launcher is what is left."""
        if status.all_ended and not self.begun and self._end_launcher_at == NEVER:
            self._end_left_at = now + SETTLE
            self._end_launcher_at = now + _LINGER
        if self.begun and not self.killed:
            if status.has_running:
                self._end_launcher_at = NEVER
            elif self._end_launcher_at == NEVER:
                patience = _LAUNCHER_ENDS if status.all_ended else SETTLE
                unreached = nodes.unreached(status.held)
                self._end_launcher_at = now + (0.0 if unreached else patience)

    def terminates(self, now: float) -> bool:
        """Whether the ranks are to have SIGTERM: true once."""
        due = now >= self._terminate_at
        if due:
            self._terminate_at = NEVER
        return due

    def kills(self, now: float) -> bool:
        """Whether they are to have SIGKILL: true again and again, for those that come late."""
        due = now >= self._kill_at
        if due:
            self._kill_at = now + SETTLE
            self.killed = True
            self._end_launcher_at = min(self._end_launcher_at, now + _KILLED)
        return due

    def ends_left(self, now: float) -> bool:
        """Whether a launcher waits for what its ranks left running: again and again, as above."""
        due = now >= self._end_left_at
        if due:
            self._end_left_at = now + _LAUNCHER_ENDS
        return due

    def ends_launcher(self, now: float) -> bool:
        """Whether the launcher is to be ended: true again and again, until it has."""
        due = now >= self._end_launcher_at
        if due:
            self._end_launcher_at = now + (_KILLED if self.killed else _LAUNCHER_ENDS)
        return due


# Ranks that write nothing any more: who they are, and where each of them is.

_PATIENCE = 15.0
"""Seconds that the nodes have to tell where their ranks are."""


class Hang:
    """Looks for a hang of one launch.

    Args:
        launch: The launch.
        output: What the ranks write.
        wake: Called, from another thread, when an answer has come.

    Attributes:
        declared: Whether the ranks hang.
    """

    def __init__(self, launch: Launch, output: Output, wake: Callable[[], None]) -> None:
        self.declared = False
        self._launch, self._output, self._wake = launch, output, wake
        self._until = NEVER
        self._unanswered = 0
        self._answers: deque[bytes] = deque()

    @property
    def next_look(self) -> float:
        """When to look again, in `time.monotonic`'s seconds."""
        idle = self._launch.idle_timeout
        return self._output.last + idle if idle and not self.declared else NEVER

    def is_one(self, now: float, status: Status) -> bool:
        """Whether no rank has written anything for too long."""
        idle, files = self._launch.idle_timeout, self._launch.control.files
        if not idle or status.all_ended:
            return False
        if now - self._output.last >= idle and files and status.has_running:
            # Of what goes to files we see nothing but their times.
            age = time.time() - _newest(files, status.running)
            self._output.last = max(self._output.last, now - max(age, 0.0))
        return now - self._output.last >= idle

    def declare(self, now: float, status: Status, nodes: Nodes) -> None:
        """Name the ranks that have not ended, and ask them where they are."""
        self.declared = True
        running, unstarted = status.running, status.unstarted
        self._unanswered = len({rank // self._launch.ppn for rank in running})
        self._until = now + _PATIENCE
        silence = f"no output for {self._launch.idle_timeout:g} s"
        if unstarted:
            named = name_ranks(self._launch, unstarted)
            self._output.say(f"{silence}; ranks that never started: {named}")
        if running:
            named = name_ranks(self._launch, running)
            self._output.say(f"{silence}; ranks that had not ended: {named}; where they are:")
            nodes.stacks(running)

    def answer(self, text: bytes) -> None:
        """Take what one node says of its ranks; called from other threads, too."""
        self._answers.append(text)
        self._wake()

    def is_told(self, now: float) -> bool:
        """Say what has been answered; whether that was all, or nobody waits any longer."""
        while self._answers:
            text = self._answers.popleft().decode(errors="replace").rstrip()
            self._unanswered -= 1
            if text:
                self._output.say(f"stacks\n{text}")
        over = self._until != NEVER and (self._unanswered <= 0 or now >= self._until)
        if over:
            self._until = NEVER
        return over


def _newest(folder: str, ranks: Sequence[int]) -> float:
    """Return when one of these ranks wrote to its files last, in seconds since the epoch.

    Files that are not seen from here, on disks of other hosts, may be written to at any time.
    """
    newest = 0.0
    for rank in ranks:
        for name in (f"rank-{rank}.out", f"rank-{rank}.err"):
            try:
                newest = max(newest, os.stat(os.path.join(folder, name)).st_mtime)
            except OSError:
                return time.time()
    return newest


# Start the launcher, watch its ranks, pass signals on, and find out how it ended.

_REACHED = 2.0
"""Seconds after which ranks whose node has no agent yet are signalled through the launcher."""

_ABSENT = 60.0
"""Seconds after which ranks that have not started are named."""

_RELEASE = 0.2
"""Seconds between two words to ranks that failed, to go."""

_STOPPED = 1.0
"""Seconds that the loop may oversleep, on a machine that is busy."""

_AWAKE = 0.5
"""Seconds after which the loop looks around, though nothing woke it."""

_DRAINED = 0.3
"""Seconds without a byte after which what an ended launcher left in its pipes has been read."""


def run(
    launch: Launch, heard: Heard | None = None, on_start: Callable[[], None] | None = None
) -> Outcome:
    """Run one launch to its end.

    The launcher gets a session of its own and no standard input (mpiexec would swallow ours);
    what it writes is passed on byte for byte. SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and
    SIGUSR2 reach the ranks themselves, whatever the launcher would make of them. When a rank
    fails, the others are given a moment to end, then SIGTERM, then after the grace SIGKILL.

    Args:
        launch: What to run.
        heard: What collects the signals, if somebody does already.
        on_start: Called once the launcher runs, while its ranks start.

    Raises:
        LaunchError: The launcher cannot be started.
    """
    if heard is not None:
        return _Run(launch, heard).to_its_end(on_start)
    with signals() as ours:
        return _Run(launch, ours).to_its_end(on_start)


class _Run:
    """One run: what has been seen, and what is to be done when."""

    def __init__(self, launch: Launch, heard: Heard) -> None:
        self.launch = launch
        self._arrived, wake = heard
        self.status = Status(launch.nproc)
        self.told: signal.Signals | None = None
        self.port_taken = False
        self._ending = Ending(launch.grace)
        self._said = self._announced = False
        self._on_lost_nodes: set[int] = set()
        # When what is due, in time.monotonic's seconds.
        self._look_at = self._release_at = 0.0
        self._absent_at = time.monotonic() + _ABSENT
        self._forward_at = NEVER
        self._signal_at = launch.signal_at
        self._forwarded = signal.SIGTERM
        self._poll = select.poll()
        self._poll.register(wake, select.POLLIN)
        self._wakes = {wake}
        self._wake_write = -1

    def to_its_end(self, on_start: Callable[[], None] | None) -> Outcome:
        """Start the launcher, and see it through."""
        launch_id = self.launch.control.launch_id
        read, self._wake_write = os.pipe()
        for end in (read, self._wake_write):
            os.set_blocking(end, False)
        self._poll.register(read, select.POLLIN)
        self._wakes.add(read)
        self.output = Output((Reports(launch_id), Reports(launch_id)), self._wake)
        self.hang = Hang(self.launch, self.output, self._wake)
        self.nodes: Nodes = self._nodes(launch_id)
        try:
            self.process = self._start()
            # Before there are threads: it is a fork of this process.
            self.nodes.watch(self.process.pid, self.launch.scratch)
            self.output.copy(self.process.stdout, self.process.stderr)
            if on_start:
                on_start()
            while self.process.poll() is None:
                self._step()
            self._finish()
        finally:
            write, self._wake_write = self._wake_write, -1
            os.close(write)
            os.close(read)
        outcome = self._outcome()
        self.output.close(self._is_told)
        return outcome

    def _is_told(self) -> bool:
        return self.told is not None or bool(self._arrived)

    def _nodes(self, launch_id: str) -> Nodes:
        launch = self.launch
        if launch.on_this_host:
            return ThisHost(launch_id, self._answer)
        hosts, ppn, timeout = launch.hosts, launch.ppn, launch.control.node_timeout
        return OtherHosts(hosts, ppn, launch_id, self._poll, self._answer, timeout=timeout)

    def _answer(self, text: bytes) -> None:
        """Take what a node says of its ranks: where they hang, or what they left running."""
        if self.hang.declared:
            self.hang.answer(text)
        elif text:
            self.output.say(
                f"a rank left {text.decode(errors='replace')} running; ended, as all of a launch "
                "ends with it but what has no EZPZ_LAUNCH_ID in its environment"
            )

    def _start(self) -> LauncherProcess:
        launch = self.launch
        where, secret = self.nodes.where(), self.nodes.secret()
        control = launch.control._replace(where=where, secret=secret)
        environment = {**launch.environment, VARIABLE: control.value()}
        try:
            return LauncherProcess(launch.argv, environment)
        except LaunchError:
            self.nodes.close(farewell=True)
            raise

    def _wake(self) -> None:
        """Let the loop look around; called from other threads."""
        if self._wake_write >= 0:
            try:
                os.write(self._wake_write, b"!")
            except OSError:
                return  # it is awake already, or has ended

    def _step(self) -> None:
        """Sleep until something happens, then look at all of it."""
        now = time.monotonic()
        patience = max(0.0, min(_AWAKE, self._next(now) - now))
        self._serve(patience)
        self._take_reports()
        self._hear()
        stopped = time.monotonic() - now - patience
        if stopped > _STOPPED:
            self._forgive(stopped)
        now = time.monotonic()
        self._look_for_the_lost(now)
        self._look_for_an_end(now)
        self._do_what_is_due(now)

    def _serve(self, patience: float) -> None:
        for fd, _ in self._poll.poll(1000 * patience):
            if fd in self._wakes:
                os.read(fd, 4096)
            else:
                self.nodes.handle(fd)

    def _forgive(self, seconds: float) -> None:
        """Count the time for nothing in which we were stopped (Ctrl-Z, a suspended job)."""
        # What the ranks wrote meanwhile may not have been read yet: their silence begins anew.
        self.output.last = time.monotonic()
        self._ending.forgive(seconds)

    def _next(self, now: float) -> float:
        return min(
            self._look_at if self.status.has_running else NEVER,
            self._ending.next,
            self._forward_at,
            NEVER if self._ending.begun else self.hang.next_look,
            now + self._signal_at() - time.time() if self._all_started else NEVER,
        )

    @property
    def _all_started(self) -> bool:
        return len(self.status.pids) == self.launch.nproc

    def _take_reports(self) -> None:
        for report in self.output.take_reports():
            what, rank, value = report
            if what == "taken":
                self.port_taken = True
            elif self.status.take(report):
                if what == "start":
                    self.nodes.start(rank, value)
                else:
                    self.nodes.end(rank)

    def _look_for_the_lost(self, now: float) -> None:
        """Count ranks as killed that nobody would report the end of."""
        if now < self._look_at:
            return
        self._look_at = now + self.nodes.next_look()
        for rank in self.nodes.lost():
            if self.status.take(("end", rank, 128 + signal.SIGKILL)) and not self._ending.killed:
                where = self.launch.host_of(rank)
                self.output.say(f"rank {rank} on {where} is lost: what started it is gone")
        silent = set(self.nodes.silent())
        lost = [rank for rank in self.status.running if rank // self.launch.ppn in silent]
        if lost:
            self._on_lost_nodes.update(lost)
            hosts = list(dict.fromkeys(map(self.launch.host_of, lost)))
            self.output.say(
                f"{', '.join(hosts[:16])}{f' and {len(hosts) - 16} more' * (len(hosts) > 16)} "
                f"{'is' if len(hosts) == 1 else 'are'} lost: no answer within "
                f"{self.launch.control.node_timeout} s (EZPZ_NODE_TIMEOUT)"
            )
            for rank in lost:
                self.status.take(("end", rank, 128 + signal.SIGKILL))

    def _hear(self) -> None:
        """Pass on what has arrived for the ranks."""
        while self._arrived:
            number = self._arrived.pop(0)
            if number in ENDING:
                # A second Ctrl-C means: now.
                self._ending.told(time.monotonic(), 0.0 if self.told else self.launch.grace)
                self.told = self.told or number
            self._signal(number)
        if self.output.nobody_reads and self.told is None:
            self.told = signal.SIGPIPE
            self._ending.told(time.monotonic(), self.launch.grace)
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        self.nodes.signal(number)
        if self.nodes.unreached(self.status.running):
            patience = min(_REACHED, self.launch.grace / 2)
            self._forward_at = min(self._forward_at, time.monotonic() + patience)
            self._forwarded = number

    def _look_for_an_end(self, now: float) -> None:
        if not self._ending.begun:
            if self.port_taken:
                self._ending.told(now, 0.0)
            elif self.status.first_failure:
                self._ending.settle(now)
            elif self.hang.is_one(now, self.status):
                self._ending.begun = True
                self.hang.declare(now, self.status, self.nodes)
        self._ending.look(now, self.status, self.nodes)

    def _do_what_is_due(self, now: float) -> None:
        if self._signal_at() <= time.time() and self._all_started:
            self._signal_at = lambda: NEVER
            self.output.say("the job's end is near (--signal-before): SIGUSR1 to every rank")
            self._signal(signal.SIGUSR1)
        if self.hang.is_told(now):
            # Those that could not be read print their stacks themselves now.
            self._ending.settle(now)
        if self._ending.terminates(now) and self.status.has_running:
            self._announced = True
            self._say_who_failed("; ending the other ranks")
            self._signal(signal.SIGTERM)
        if now >= self._forward_at:
            self._forward_at = NEVER
            self._forward()
        if self._ending.kills(now):
            self.output.killed = True
            self.nodes.kill()
        if self._ending.ends_left(now):
            self.nodes.end_left()
        if now >= self._absent_at:
            self._absent_at = NEVER
            self._say_who_is_absent()
        self._end_launcher(now)

    def _say_who_is_absent(self) -> None:
        absent = self.status.unstarted
        if absent and not self._ending.begun:
            self.output.say(
                f"after {_ABSENT:g} s {len(absent)} of {self.launch.nproc} ranks have not started: "
                f"{name_ranks(self.launch, absent)}"
            )

    def _end_launcher(self, now: float) -> None:
        """Let the launcher end by itself, then end it."""
        if self._ending.begun and not self.status.has_running and now >= self._release_at:
            # Again and again, but not at every step: the first word may have come too early.
            self._release_at = now + _RELEASE
            for rank in self.status.held:
                self.nodes.release(rank, self.status.pids.get(rank, 0))
        if self._ending.ends_launcher(now):
            self.process.end()

    def _forward(self) -> None:
        """Let the launcher pass a signal on to ranks that we do not reach."""
        lost = self.nodes.unreached(self.status.running)
        if lost:
            hosts = sorted({self.launch.host_of(rank) for rank in lost})
            self.output.say(
                f"no agent on {', '.join(hosts[:4])}{' ...' * (len(hosts) > 4)}"
                f"{f' ({self.nodes.why_not})' * bool(self.nodes.why_not)}: "
                f"{self._forwarded.name} goes through the launcher, which may kill at once"
            )
            self.process.pass_on(self._forwarded)

    def _say_who_failed(self, more: str = "") -> None:
        failure = self.status.first_failure
        if failure and not self.hang.declared and self.told is None and not self._said:
            self._said = True
            rank, said = failure[0], describe(self.launch, *failure)
            if rank in self._on_lost_nodes:
                said = f"rank {rank} on {self.launch.host_of(rank)} is lost with its node"
            self.output.say(f"{said}{more}")

    def _finish(self) -> None:
        """Read what is left in the pipes, and see that no rank is left."""
        # A stopped terminal holds us up as long as nobody tells us to end.
        self.output.drain(_DRAINED, self._is_told)
        self._take_reports()
        complete = self.status.all_ended and not self._ending.begun
        if complete:
            self._serve(0)  # what agents have said last
            self.nodes.end_all_left()
        self.nodes.close(farewell=complete)
        if not complete:
            self.process.kill()
            self.output.drain(_DRAINED, self._is_told)
            self._take_reports()
        late = next((number for number in self._arrived if number in ENDING), None)
        self.told = self.told or late

    def _outcome(self) -> Outcome:
        if self.port_taken:
            # Whoever asked for this run chooses another, or says so.
            return Outcome(USAGE, None, self.told, port_taken=True)
        self._say_who_failed()
        failure = self.status.first_failure
        status = exit_status_of(
            self.launch,
            self.status,
            self.process.poll() or 0,
            told=self.told,
            hang=self.hang.declared,
            say=self.output.say,
        )
        if failure and self._announced and status == failure[1]:
            # Launchers say a lot meanwhile; the last line is the one that people read.
            rank = f"rank {failure[0]} on {self.launch.host_of(failure[0])}"
            self.output.say(f"exit status {status}, that of {rank}")
        where = (failure[0], self.launch.host_of(failure[0]), failure[1]) if failure else None
        return Outcome(status, where, self.told, self.port_taken, self.output.tail)
