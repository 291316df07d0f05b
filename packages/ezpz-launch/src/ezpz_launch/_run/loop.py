"""Start a launch, see it through, and say how it ended: one loop, the ranks' status, the end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from ezpz_launch._errors import LaunchError
from ezpz_launch._run.agent import kill_launcher, send
from ezpz_launch._run.launch import (
    ENDING,
    NEVER,
    VARIABLE,
    Facts,
    Heard,
    Launch,
    Nodes,
    Outcome,
    how,
    signals,
)
from ezpz_launch._run.output import Output, Report

SETTLE = 1.0  # seconds that the other ranks have to end by themselves after the first failure
_LAUNCHER_ENDS = 2.0  # seconds that a launcher has after its last rank, and again after SIGTERM
_KILLED = 0.5  # seconds that it has once its ranks have been killed
_LINGER = 10.0  # seconds to end: of a launcher after its ranks, of ranks that have nothing to do
_STACKS = 15.0  # seconds that the nodes have to tell where their ranks hang
_REACHED = 2.0  # seconds after which the launcher signals ranks whose node has no agent yet
_ABSENT = 60.0  # seconds after which ranks that have not started are named
_RELEASE = 0.2  # seconds between two words to ranks that failed, to go
_GONE = 1.0  # seconds after which ranks without a report, or without an agent, are lost
_STOPPED = 1.0  # seconds that the loop may oversleep, on a machine that is busy
_AWAKE = 0.5  # seconds after which the loop looks around, though nothing woke it
_ASKED = 2.0  # seconds between two looks for a request to end
_DRAINED = 0.3  # seconds without a byte after which an ended launcher's pipes have been read
_NAMED = 16  # so many ranks or hosts are named


def run(
    launch: Launch, heard: Heard | None = None, on_start: Callable[[], None] | None = None
) -> Outcome:
    with ExitStack() as stack:
        heard = heard or stack.enter_context(signals())
        woken, waker = map(stack.enter_context, socket.socketpair())
        waker.setblocking(False)
        one = _Run(launch, heard, woken, waker)
        one.start()
        if on_start:
            on_start()
        while one.process.poll() is None:
            one.sleep()
            one.take_reports()
            one.take_answers()
            one.hear()
            one.decide_to_end()
            one.let_the_launcher_end()
            one.act()
        one.finish()
        outcome = one.outcome()
        one.output.close(one.is_told)
        return outcome


class _Run:
    """One run: what has been seen, and what is to be done when."""

    def __init__(
        self, launch: Launch, heard: Heard, woken: socket.socket, waker: socket.socket
    ) -> None:
        self.launch = launch
        self.arrived, self.wakes = heard[0], {heard[1], woken.fileno()}
        self.waker = waker
        self.poll = select.poll()
        for end in self.wakes:
            self.poll.register(end, select.POLLIN)
        self.status = Status(launch.nproc)
        self.told: signal.Signals | None = None  # the signal that ended it
        # Whether the ranks are to end: told by someone, failed or, as no one writes, hanging.
        self.ending = self.port_taken = False
        self.goes_with_job = self.killed = False
        self.unanswered = 0
        self.forwarded = signal.SIGTERM
        self.signal_at = launch.signal_at
        self.said = self.announced = self.by_hand = False
        self.on_lost_nodes: set[int] = set()
        self.facts = Facts(launch.hosts, launch.ppn, self.status.ended)
        self.launcher_signal = signal.SIGTERM
        self.now = time.monotonic()
        # When what is due.
        self.at: dict[str, float] = {"name the absent": self.now + _ABSENT}
        if launch.end_file:
            self.at["look for a request"] = self.now + _ASKED
        self.output = Output(launch.control.launch_id, self.wake)
        self.nodes = Nodes(launch, self.poll)

    def start(self) -> None:
        where, secret = self.nodes.where, self.nodes.secret
        control = self.launch.control._replace(where=where, secret=secret)
        try:
            self.process = subprocess.Popen(
                self.launch.argv, env={**self.launch.environment, VARIABLE: control.value()},
                bufsize=0, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self.nodes.close(farewell=True)
            why = f"{self.launch.argv[0]} cannot be started: {error.strerror}"
            raise LaunchError(why) from error
        # Before there are threads: it is a fork of this process.
        self.nodes.watch(self.process.pid)
        assert self.process.stdout
        assert self.process.stderr
        self.output.copy(self.process.stdout, self.process.stderr)

    def sleep(self) -> None:
        before = self.now
        begun = time.monotonic()
        due = min([begun + _AWAKE, *self.at.values()])
        if not self.ending and self.launch.idle_timeout:
            due = min(due, self.output.last + self.launch.idle_timeout)
        left = self.signal_at() - time.time()
        if left < _AWAKE and self.all_started():
            due = min(due, begun + left)
        patience = max(0.0, due - begun)
        self.serve(patience)
        self.now = time.monotonic()
        # Time for which we were stopped (Ctrl-Z, a suspended job) does not count. What the ranks
        # wrote meanwhile may not have been read yet: their silence begins again, also where we
        # were stopped between two sleeps.
        if self.now - before - patience > _STOPPED:
            self.output.last = self.now
        stopped = self.now - begun - patience
        if stopped > _STOPPED:
            for what in self.at.keys() & {"terminate", "kill"}:
                self.at[what] += stopped

    def serve(self, patience: float) -> None:
        for fd, _ in self.poll.poll(1000 * patience):
            if fd in self.wakes:
                os.read(fd, 4096)
            else:
                self.nodes.handle(fd)

    def wake(self) -> None:
        """Let the loop look around; called from other threads."""
        with contextlib.suppress(OSError):  # it is awake already, or has ended
            self.waker.send(b"!")

    def take_reports(self) -> None:
        for report in self.output.take_reports():
            what, rank, value = report
            if what == "taken":
                self.port_taken = True
            elif self.status.take(report):
                if what == "start":
                    self.nodes.start(rank, value)
                else:
                    self.nodes.end(rank)

    def take_answers(self) -> None:
        """Take what agents say: ranks and nodes that are lost, what is left running, stacks."""
        nodes, say = self.nodes, self.output.say
        self.take_lost_ranks()
        silent, nodes.silent = nodes.silent, []
        if silent:
            self.facts.silent.update(silent)
            timeout = self.launch.control.node_timeout
            self.lose(silent, f"no answer within {timeout} s (EZPZ_NODE_TIMEOUT)")
        gone, nodes.gone = nodes.gone, []
        if gone and not (self.launch.on_this_host or self.announced or self.is_told()):
            self.facts.gone.update(gone)
            self.at.setdefault("lose the gone", self.now + _GONE)
        if self.is_due("lose the gone"):
            # What it left running there no one would end, and no one would report.
            self.lose(self.facts.gone, "the agent there has ended")
        while nodes.stacks:
            self.unanswered -= 1
            if text := nodes.stacks.pop(0).rstrip():
                say(f"stacks\n{text}")
        self.say_what_was_left()

    def take_lost_ranks(self) -> None:
        nodes = self.nodes
        if nodes.unreported:
            self.at.setdefault("lose the unreported", self.now + _GONE)
        # Not while our output is not read: their reports may wait behind it.
        if self.is_due("lose the unreported") and not self.output.is_writing:
            nodes.lost += nodes.unreported
            nodes.unreported.clear()
        while nodes.lost:
            rank = nodes.lost.pop(0)
            if self.status.take(("end", rank, 128 + signal.SIGKILL)) and not self.killed:
                where = self.launch.host_of(rank)
                self.output.say(f"rank {rank} on {where} is lost: what started it is gone")
                self.facts.orphans.add(rank)

    def lose(self, nodes: Iterable[int], why: str) -> None:
        """Take the ranks of these nodes that have not ended for lost."""
        lost = [rank for rank in self.status.running if rank // self.launch.ppn in nodes]
        self.on_lost_nodes.update(lost)
        hosts = list(dict.fromkeys(map(self.launch.host_of, lost)))
        if lost:
            self.output.say(f"{_first(hosts)} {'is' if len(hosts) == 1 else 'are'} lost: {why}")
        for rank in lost:
            self.status.take(("end", rank, 128 + signal.SIGKILL))

    def say_what_was_left(self) -> None:
        while self.nodes.left:
            self.output.say(
                f"a rank left {self.nodes.left.pop(0)} running; ended, as all of a launch "
                "ends with it but what has no EZPZ_LAUNCH_ID in its environment"
            )

    def hear(self) -> None:
        if self.is_due("look for a request", again=_ASKED):
            how_to_end = take_request(self.launch.end_file)
            self.goes_with_job = self.goes_with_job or how_to_end == "with the job"
            self.arrived += [signal.SIGTERM] * REQUESTS.get(how_to_end, 0)
        while self.arrived:
            number = self.arrived.pop(0)
            if number in ENDING:
                # A second Ctrl-C means: now.
                self.end_within(0.0 if self.told else self.launch.grace)
                if number == signal.SIGINT and not self.told and self.output.is_a_terminal:
                    self.by_hand = True
                    grace = f"{self.launch.grace:g} s"
                    self.output.say(f"Ctrl-C: the ranks have {grace} to end; a second one kills")
                self.told = self.told or number
            self.signal(number)
        if self.output.nobody_reads and self.told is None:
            self.told = signal.SIGPIPE
            self.end_within(self.launch.grace)
            self.signal(signal.SIGTERM)
        if self.signal_at() <= time.time() and self.all_started():
            self.signal_at = lambda: NEVER
            self.output.say("the job's end is near (--signal-before): SIGUSR1 to every rank")
            self.signal(signal.SIGUSR1)

    def signal(self, number: signal.Signals) -> None:
        self.nodes.signal(number)
        if self.nodes.unreached(self.status.running):
            patience = min(_REACHED, self.launch.grace / 2)
            self.at.setdefault("forward", self.now + patience)
            self.forwarded = number

    def decide_to_end(self) -> None:
        if not self.ending:
            if self.port_taken:
                self.end_within(0.0)
            elif self.status.first_failure and (self.status.all_ended or not self.launch.is_over):
                self.settle()
            elif self.launch.is_over and self.launch.is_over():
                self.at.setdefault("end who stays", self.now + _LINGER)
                if self.is_due("end who stays") and not self.status.all_ended:
                    stuck = self.name([*self.status.running, *self.status.unstarted])
                    self.output.say(f"after {_LINGER:g} s not ended, so killed: {stuck}")
                    self.end_within(0.0)
            elif self.launch.idle_timeout and self.is_silent():
                self.ending = self.facts.hangs = True
                self.ask_where_they_hang()
        if "stacks" in self.at and (self.unanswered <= 0 or self.is_due("stacks")):
            # Those that could not be read print their stacks themselves now.
            self.at.pop("stacks", None)
            asked = {rank // self.launch.ppn for rank in self.status.running}
            self.facts.deaf = asked - self.nodes.answered
            self.settle()

    def let_the_launcher_end(self) -> None:
        """See whether it is what is left, and give it some time."""
        now, status, at = self.now, self.status, self.at
        # Ranks that have not begun have the same moment to end by themselves.
        goes_on = status.has_running or (not status.all_ended and "terminate" in at)
        if status.all_ended and not self.ending and "end the launcher" not in at:
            self.nodes.end_left()
            at["end the launcher"] = now + _LINGER
        if self.ending and not self.killed:
            if goes_on:
                at.pop("end the launcher", None)
            elif "end the launcher" not in at:
                patience = _LAUNCHER_ENDS if status.all_ended else SETTLE
                unreached = self.nodes.unreached(status.held)
                at["end the launcher"] = now + (0.0 if unreached else patience)
        if self.ending and not goes_on:
            at.setdefault("release", now)

    def end_within(self, grace: float) -> None:
        """Let the ranks, which have heard the signal themselves, be killed after a grace."""
        self.ending = True
        self.at.pop("terminate", None)
        self.at["kill"] = min(self.at.get("kill", NEVER), self.now + grace)

    def settle(self) -> None:
        """Let the ranks end by themselves for a moment; then SIGTERM, then after the grace more."""
        self.ending = True
        self.facts.seen = self.facts.seen or time.time()
        self.at["terminate"] = self.now + SETTLE
        self.at["kill"] = self.now + SETTLE + self.launch.grace

    def is_silent(self) -> bool:
        idle = self.launch.idle_timeout
        files = self.launch.control.files
        if self.status.all_ended:
            return False
        if self.now - self.output.last >= idle and files and self.status.has_running:
            # Of what goes to files we see nothing but their times.
            age = time.time() - _newest(files, self.status.running)
            self.output.last = max(self.output.last, self.now - max(age, 0.0))
        return self.now - self.output.last >= idle

    def ask_where_they_hang(self) -> None:
        """Name the ranks that have not ended, and ask them where they are."""
        running, unstarted = self.status.running, self.status.unstarted
        silence = f"no output for {self.launch.idle_timeout:g} s"
        if unstarted:
            self.output.say(f"{silence}; ranks that never started: {self.name(unstarted)}")
        if running:
            named = self.name(running)
            self.output.say(f"{silence}; ranks that had not ended: {named}; where they are:")
            self.nodes.ask_stacks(running)
            self.facts.seen = time.time()
        self.unanswered = len({rank // self.launch.ppn for rank in running})
        self.at["stacks"] = self.now + _STACKS

    def act(self) -> None:
        if self.is_due("terminate"):
            self.facts.own = dict(self.status.ended)
            if self.status.has_running:
                self.announced = True
                self.say_who_failed("; ending the other ranks")
                self.signal(signal.SIGTERM)
        if self.is_due("forward"):
            self.forward()
        if self.is_due("kill", again=SETTLE):  # for those that come late
            self.killed = self.output.hushes = True
            end = self.at.get("end the launcher", NEVER)
            self.at["end the launcher"] = min(end, self.now + _KILLED)
            self.nodes.kill()
        if self.is_due("name the absent") and self.status.unstarted and not self.ending:
            absent = self.status.unstarted
            self.output.say(
                f"after {_ABSENT:g} s {len(absent)} of {self.launch.nproc} ranks have not started: "
                f"{self.name(absent)}"
            )
        if self.is_due("release", again=_RELEASE):  # the first word may have come too early
            for rank in () if self.status.has_running else self.status.held:
                self.nodes.release(rank, self.status.pids.get(rank, 0))
        if self.is_due("end the launcher", again=_KILLED if self.killed else _LAUNCHER_ENDS):
            self.output.hushes = True
            send(-self.process.pid, self.launcher_signal)
            self.launcher_signal = signal.SIGKILL

    def is_due(self, what: str, again: float = 0.0) -> bool:
        """Return whether its time has come; it may come again after so many seconds."""
        if self.now < self.at.get(what, NEVER):
            return False
        self.at[what] = self.now + again
        if not again:
            del self.at[what]
        return True

    def forward(self) -> None:
        """Let the launcher pass a signal on to ranks that we do not reach."""
        lost = self.nodes.unreached(self.status.running)
        if lost:
            hosts = sorted({self.launch.host_of(rank) for rank in lost})
            self.output.say(
                f"no agent on {', '.join(hosts[:4])}{' ...' * (len(hosts) > 4)}"
                f"{f' ({self.nodes.why_not})' * bool(self.nodes.why_not)}: "
                f"{self.forwarded.name} goes through the launcher, which may kill at once"
            )
            self.process.send_signal(self.forwarded)

    def finish(self) -> None:
        """Read what is left in the pipes, and see that no rank is left."""
        # A stopped terminal holds us up as long as no one tells us to end.
        self.output.drain(_DRAINED, self.is_told)
        self.take_reports()
        complete = self.status.all_ended and not self.ending
        if complete:
            self.serve(0)  # what agents have said last
        self.nodes.close(farewell=complete)
        self.say_what_was_left()
        if not complete:
            kill_launcher(self.process.pid, self.launch.control.launch_id)
            self.output.drain(_DRAINED, self.is_told)
            self.take_reports()
        late = next((number for number in self.arrived if number in ENDING), None)
        self.told = self.told or late

    def outcome(self) -> Outcome:
        if self.port_taken:
            # Whoever requested this run chooses another, or says so.
            return Outcome(2, None, self.told, port_taken=True)
        failure = self.status.first_failure
        if failure:
            self.say_who_failed()
        exit_status = self.exit_status()
        if failure and self.announced and exit_status == failure[1]:
            # Launchers say a lot meanwhile; the last line is the one that people read.
            rank = f"rank {failure[0]} on {self.launch.host_of(failure[0])}"
            self.output.say(f"exit status {exit_status}, that of {rank}")
        where = (failure[0], self.launch.host_of(failure[0]), failure[1]) if failure else None
        self.facts.unstarted = self.status.unstarted
        failed = exit_status and self.told is None
        return Outcome(
            exit_status, where, self.told, tail=self.output.tail,
            goes_with_job=self.goes_with_job, facts=self.facts if failed else None,
        )  # fmt: skip

    def exit_status(self) -> int:
        """Return the exit status of the launch, and say why, unless it is known already."""
        status, say, own = self.status, self.output.say, self.process.returncode
        if self.told is not None:
            if not self.by_hand:
                say(f"ended by {self.told.name}")
            # Who checkpointed says so; the others died of the same signal, or had nothing to save.
            meant = {0, REQUEUE, 128 + self.told, 128 + signal.SIGTERM}
            statuses = set(status.ended.values())
            requeues = REQUEUE in statuses and statuses <= meant
            return REQUEUE if requeues else 128 + self.told
        if self.facts.hangs:
            return HANG
        if status.first_failure is not None:
            return status.first_failure[1]
        own = 128 - own if own < 0 else own
        if status.all_ended:
            if own:
                # Hydra can return 141 under load after ranks that end at once (4 times in 726).
                say(f"every rank ended with 0; the launcher with {own}, which is not passed on")
            return 0
        silent = [rank for rank in range(self.launch.nproc) if rank not in status.ended]
        started = "" if status.pids else "; none had started"
        lost = f"{self.name(silent)}{started}"
        say(f"the launcher {how(own)}; ranks that did not report their end: {lost}")
        # Without a word from its ranks even a 0 is no success.
        return own or 1

    def say_who_failed(self, more: str = "") -> None:
        failure = self.status.first_failure
        if failure and not self.facts.hangs and self.told is None and not self.said:
            self.said = True
            where = f"rank {failure[0]} on {self.launch.host_of(failure[0])}"
            if failure[0] in self.on_lost_nodes:
                self.output.say(f"{where} is lost with its node{more}")
            else:
                self.output.say(f"{where} {how(failure[1])}, first of all ranks{more}")

    def name(self, ranks: Sequence[int]) -> str:
        return _first([f"{rank} on {self.launch.host_of(rank)}" for rank in ranks])

    def is_told(self) -> bool:
        return self.told is not None or bool(self.arrived)

    def all_started(self) -> bool:
        return len(self.status.pids) == self.launch.nproc


REQUESTS = {"with grace": 1, "now": 2, "with the job": 1}
"""How `ezpz kill` on another host may ask us to end, and how many signals that is."""


def take_request(path: str) -> str:
    """Return what stands in a file, once; empty where there is none."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read(80).strip()
        os.unlink(path)
    except OSError:
        return ""
    return text


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _newest(folder: str, ranks: Sequence[int]) -> float:
    """Return when one of these ranks wrote to its files last, in seconds since the epoch."""
    newest = 0.0
    for rank in ranks:
        for name in (f"rank-{rank}.out", f"rank-{rank}.err"):
            try:
                newest = max(newest, os.stat(os.path.join(folder, name)).st_mtime)
            except OSError:
                return time.time()
    return newest


# Which ranks have started, which have ended, and how.

HANG = 124  # exit status of a launch whose ranks hung: that of timeout(1)
REQUEUE = 75  # exit status by which a script says: checkpointed, start me again (EX_TEMPFAIL)


class Status:
    """What the reports say so far: each rank's process and, in their order, exit statuses."""

    def __init__(self, nproc: int) -> None:
        self.nproc = nproc
        self.pids: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.first_failure: tuple[int, int] | None = None
        self._causes: dict[int, int] = {}
        # Kept, not computed: the run loop asks many times, of up to 120,960 ranks.
        self._running: dict[int, None] = {}

    def take(self, report: Report) -> bool:
        """Take a report in; return whether it is a new start or end (each comes twice)."""
        what, rank, value = report
        if what == "cause":
            if value < self.nproc:
                self._causes[rank] = value
            return False
        table = self.pids if what == "start" else self.ended
        if rank in table or rank >= self.nproc:
            return False
        table[rank] = value
        if what != "start":
            self._running.pop(rank, None)
            if value and self.first_failure is None:
                # Who leaves because of another may be quicker, and ends with its status.
                self.first_failure = (self._causes.get(rank, rank), value)
        elif rank not in self.ended:
            self._running[rank] = None
        return True

    @property
    def has_running(self) -> bool:
        return bool(self._running)

    @property
    def running(self) -> list[int]:
        return sorted(self._running)

    @property
    def held(self) -> list[int]:
        """Ranks that failed, and whose shims wait to be released."""
        return [rank for rank, status in self.ended.items() if status]

    @property
    def unstarted(self) -> list[int]:
        return [r for r in range(self.nproc) if r not in self.pids and r not in self.ended]

    @property
    def all_ended(self) -> bool:
        return len(self.ended) == self.nproc
