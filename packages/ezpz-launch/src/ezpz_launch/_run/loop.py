"""Run a launch: start the launcher, follow its ranks, end what has to end, and say how it went.

`RunState` and its transitions (states.py) decide; this module turns what happens into events, and
the actions of a transition into signals and messages.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum, auto

from ezpz_launch._errors import LaunchError
from ezpz_launch._run.agents import NodeAgents
from ezpz_launch._run.launch import (
    NEVER,
    VARIABLE,
    FailureEvidence,
    Launch,
    Outcome,
    describe_exit_status,
)
from ezpz_launch._run.output import Output
from ezpz_launch._run.processes import kill_launcher_processes, send
from ezpz_launch._run.signals import STOP_SIGNALS, Inbox, collect_signals
from ezpz_launch._run.states import (
    GRACE,
    HAS_NOT_STOPPED,
    UNCHANGED,
    Action,
    Event,
    Ranks,
    RankState,
    RunState,
    next_transition,
)

HANG = 124  # exit status of a launch whose ranks hung: that of timeout(1)
REQUEUE = 75  # exit status by which a script says: checkpointed, start me again (EX_TEMPFAIL)

GONE_SECONDS = 15.0
"""After which a rank that is gone without a report is lost: a busy network may delay reports."""

DEAD_AGENT_SECONDS = 2.0
"""After which a node whose agent has ended is lost: the launcher itself may be ending."""

UNSTARTED_SECONDS = 60.0
"""After which ranks that have not started are named."""

OVERDUE_SECONDS = 10.0
"""That ranks have to end when they have nothing left to do."""

FORWARD_SECONDS = 2.0
"""After which the launcher passes on a signal to ranks whose node has no agent yet."""

RELEASE_SECONDS = 0.2
"""Between two releases of failed ranks: an agent may connect late."""

REQUEST_SECONDS = 2.0
"""Between two looks for a request, from another host, to end."""

WAKE_SECONDS = 0.5
"""After which the loop looks around though nothing woke it."""

OVERSLEEP_SECONDS = 1.0
"""That the loop may oversleep on a busy machine; more, and it was stopped."""

DRAIN_SECONDS = 0.3
"""Without a byte, after which an ended launcher's pipes are considered read."""

MAX_NAMED = 16
"""Ranks or hosts that are named in one line."""


class Timer(Enum):
    """What is due at a time of its own, beside the deadline of the state."""

    REPORT_UNSTARTED = auto()
    CHECK_REQUEST = auto()
    LOSE_NODES = auto()
    FORWARD_SIGNAL = auto()
    RELEASE = auto()
    OVERDUE = auto()


def run(
    launch: Launch, inbox: Inbox | None = None, on_start: Callable[[], None] | None = None
) -> Outcome:
    """Run a launch to its end; ``on_start`` is called when the launcher has started."""
    with ExitStack() as stack:
        inbox = inbox or stack.enter_context(collect_signals())
        woken, waker = socket.socketpair()
        stack.enter_context(woken)
        stack.enter_context(waker)
        waker.setblocking(False)
        one = _Run(launch, inbox, woken, waker)
        one.start()
        if on_start:
            on_start()
        while one.launcher.poll() is None:
            one.sleep()
            one.handle_reports()
            one.handle_agent_reports()
            one.handle_signals()
            one.check_ranks()
            one.run_due_timers()
        one.handle(Event.LAUNCHER_ENDED)
        one.finish()
        outcome = one.outcome()
        one.output.close(one.is_stopping)
        return outcome


class _Run:
    """The state of one run."""

    def __init__(
        self, launch: Launch, inbox: Inbox, woken: socket.socket, waker: socket.socket
    ) -> None:
        self.launch = launch
        self.inbox = inbox
        self.wake_fds = {inbox.wake_fd, woken.fileno()}
        self.waker = waker
        self.poll = select.poll()
        for fd in self.wake_fds:
            self.poll.register(fd, select.POLLIN)
        self.now = time.monotonic()
        self.state = RunState.STARTING
        self.deadline = NEVER  # of the state
        self.timers = {Timer.REPORT_UNSTARTED: self.now + UNSTARTED_SECONDS}
        if launch.end_file:
            self.timers[Timer.CHECK_REQUEST] = self.now + REQUEST_SECONDS
        self.ranks = Ranks(launch.nproc)
        self.evidence = FailureEvidence(launch.hosts, launch.ppn, self.ranks.exit_statuses)
        self.end_signal: signal.Signals | None = None  # the signal that ends the run
        self.last_signal = signal.SIGTERM  # that the ranks were sent
        self.launcher_signal = signal.SIGTERM  # that the launcher is sent next
        self.signal_at = launch.signal_at
        self.port_taken = False
        self.was_stopped = False  # whether ranks failed, or were made to end
        self.goes_with_job = False
        self.ended_by_hand = False
        self.gone_ranks: dict[int, float] = {}  # when each is lost, if no report has come
        self.lost_with_node: set[int] = set()
        self.stack_replies_due = 0
        self.failure_was_named = False
        self.ranks_were_terminated = False
        self.output = Output(launch.settings.launch_id, self.wake)
        self.agents = NodeAgents(launch, self.poll)

    def start(self) -> None:
        settings = replace(
            self.launch.settings, addresses=self.agents.addresses, secret=self.agents.secret
        )
        # Before there are threads: it forks this process.
        self.agents.start_local()
        try:
            self.launcher = subprocess.Popen(
                self.launch.argv, env={**self.launch.environment, VARIABLE: settings.to_text()},
                bufsize=0, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self.agents.close(farewell=True)
            why = f"{self.launch.argv[0]} cannot be started: {error.strerror}"
            raise LaunchError(why) from error
        self.agents.set_launcher(self.launcher.pid)
        assert self.launcher.stdout
        assert self.launcher.stderr
        self.output.start_copying(self.launcher.stdout, self.launcher.stderr)

    # Sleeping and waking.

    def sleep(self) -> None:
        """Wait until something arrives or is due."""
        before = self.now
        start = time.monotonic()
        due = min([start + WAKE_SECONDS, self.deadline, *self.timers.values()])
        if self.state in HAS_NOT_STOPPED and self.launch.idle_timeout:
            due = min(due, self.output.last + self.launch.idle_timeout)
        if self.ranks.all_started:
            due = min(due, start + self.signal_at() - time.time())
        seconds = max(0.0, due - start)
        self.serve(seconds)
        self.now = time.monotonic()
        # Time for which we were stopped (Ctrl-Z, a suspended job) does not count. What the ranks
        # wrote meanwhile may not have been read yet: their silence begins again, also if we were
        # stopped between two sleeps.
        if self.now - before - seconds > OVERSLEEP_SECONDS:
            self.output.last = self.now
        stopped = self.now - start - seconds
        if stopped > OVERSLEEP_SECONDS:
            self.deadline += stopped

    def serve(self, seconds: float) -> None:
        for fd, _ in self.poll.poll(1000 * seconds):
            if fd in self.wake_fds:
                os.read(fd, 4096)
            else:
                self.agents.handle(fd)

    def wake(self) -> None:
        """Have the loop look around; called by other threads."""
        try:
            self.waker.send(b"!")
        except OSError:
            return  # it is awake already, or has ended

    # Events.

    def handle(self, event: Event) -> None:
        """Change the state as the table says, and act."""
        transition = next_transition(self.state, event)
        if transition is None:
            return
        self.state = transition.state
        if self.state not in (RunState.RUNNING, RunState.FINISHING, RunState.DONE):
            self.was_stopped = True
        if self.state is RunState.SETTLING and not self.evidence.detected_at:
            self.evidence.detected_at = time.time()
        if transition.seconds == GRACE:
            self.deadline = self.now + self.launch.grace
        elif transition.seconds != UNCHANGED:
            self.deadline = self.now + transition.seconds
        for action in transition.actions:
            self.act(action)

    def act(self, action: Action) -> None:
        match action:
            case Action.REQUEST_STACKS:
                self.request_stacks()
            case Action.TERMINATE_RANKS:
                self.terminate_ranks()
            case Action.KILL_RANKS:
                self.output.is_quiet = True
                self.agents.kill_ranks()
            case Action.SEND_STOP_SIGNAL:
                self.send_signal(self.end_signal or signal.SIGTERM)
            case Action.RELEASE_FAILED_RANKS:
                self.release_failed_ranks()
            case Action.END_LEFTOVERS:
                self.agents.end_leftover_processes()
            case Action.STOP_LAUNCHER:
                self.was_stopped = True
                self.output.is_quiet = True
                send(-self.launcher.pid, self.launcher_signal)
                self.launcher_signal = signal.SIGKILL

    def handle_reports(self) -> None:
        """Take what the ranks have reported."""
        for kind, rank, value in self.output.drain_reports():
            if kind == "taken":
                self.port_taken = True
            elif kind == "cause":
                self.ranks.mark_cause(rank, value)
            elif kind == "start" and self.ranks.mark_started(rank, value):
                self.agents.start(rank, value)
            elif kind == "end" and self.ranks.mark_ended(rank, value):
                self.agents.end(rank)

    def handle_agent_reports(self) -> None:
        """Take what agents report: ranks and nodes that are gone, leftovers, stacks."""
        agents = self.agents
        self.lose_ranks(agents.lost_ranks)
        agents.lost_ranks.clear()
        for rank in agents.gone_ranks:
            self.gone_ranks.setdefault(rank, self.now + GONE_SECONDS)
        agents.gone_ranks.clear()
        self.lose_gone_ranks()
        unreachable = set(agents.unreachable_nodes)
        agents.unreachable_nodes.clear()
        if unreachable:
            self.evidence.unreachable_nodes |= unreachable
            seconds = self.launch.settings.node_timeout
            self.lose_nodes(unreachable, f"no answer within {seconds} s (EZPZ_NODE_TIMEOUT)")
        dead = set(agents.dead_nodes)
        agents.dead_nodes.clear()
        if dead and self.launch.on_this_host:
            self.output.log(
                "this host's agent has ended (it was killed): a rank that is lost is not noticed "
                "from here on; what is left at the end is killed"
            )
        elif dead and not self.ranks_were_terminated and not self.is_stopping():
            self.evidence.dead_agents |= dead
            self.timers.setdefault(Timer.LOSE_NODES, self.now + DEAD_AGENT_SECONDS)
        while agents.stacks:
            self.stack_replies_due -= 1
            text = agents.stacks.pop(0).rstrip()
            if text:
                self.output.log(f"stacks\n{text}")
        self.report_leftovers()

    def report_leftovers(self) -> None:
        while self.agents.leftovers:
            self.output.log(
                f"a rank left {self.agents.leftovers.pop(0)} running; ended, as all of a launch "
                "ends with it but what has no EZPZ_LAUNCH_ID in its environment"
            )

    def handle_signals(self) -> None:
        """Take the signals that have arrived; those that end nothing only reach the ranks."""
        while self.inbox.arrived:
            number = self.inbox.arrived.pop(0)
            if number in STOP_SIGNALS:
                self.stop(number)
            else:
                self.send_signal(number)
        if self.output.nobody_reads and self.end_signal is None:
            self.stop(signal.SIGPIPE)
        if self.ranks.all_started and self.signal_at() <= time.time():
            self.signal_at = lambda: NEVER
            self.output.log("the job's end is near (--signal-before): SIGUSR1 to every rank")
            self.send_signal(signal.SIGUSR1)

    def stop(self, number: signal.Signals) -> None:
        """End the run because of a signal; the second one kills."""
        if self.end_signal is not None:
            self.send_signal(number)
            self.handle(Event.SECOND_STOP_SIGNAL)
            return
        self.end_signal = number
        self.was_stopped = True
        if number == signal.SIGINT and self.output.is_a_terminal:
            self.ended_by_hand = True
            grace = f"{self.launch.grace:g} s"
            self.output.log(f"Ctrl-C: the ranks have {grace} to end; a second one kills")
        self.handle(Event.STOP_SIGNAL)

    def check_ranks(self) -> None:
        """Find out what the ranks' states, and their silence, mean for the run."""
        ranks = self.ranks
        if self.port_taken:
            self.handle(Event.PORT_TAKEN)
        if ranks.all_started:
            self.handle(Event.ALL_STARTED)
        if ranks.first_failure and (ranks.all_ended or not self.launch.is_over):
            self.handle(Event.RANK_FAILED)
        if self.state in HAS_NOT_STOPPED and self.is_silent():
            self.handle(Event.SILENCE)
        if self.state is RunState.DIAGNOSING and self.stack_replies_due <= 0:
            self.handle(Event.STACKS_RECEIVED)
        if self.launch.is_over and self.launch.is_over():
            self.timers.setdefault(Timer.OVERDUE, self.now + OVERDUE_SECONDS)
        if ranks.all_ended:
            self.handle(Event.ALL_ENDED)
        elif ranks.has_running:
            self.handle(Event.LATE_START)
        else:
            self.handle(Event.NONE_RUNS)

    def is_silent(self) -> bool:
        idle = self.launch.idle_timeout
        if not idle or self.ranks.all_ended:
            return False
        log_dir = self.launch.settings.log_dir
        if self.now - self.output.last >= idle and log_dir and self.ranks.has_running:
            # Of what goes to files we see their times only.
            written_at = newest_output(log_dir, self.ranks.all_in(RankState.RUNNING))
            age = max(0.0, time.time() - written_at)
            self.output.last = max(self.output.last, self.now - age)
        return self.now - self.output.last >= idle

    def run_due_timers(self) -> None:
        if self.now >= self.deadline:
            self.deadline = NEVER
            if self.state is RunState.DIAGNOSING:
                self.record_unresponsive_nodes()
            self.handle(Event.DEADLINE)
        for timer, due in list(self.timers.items()):
            if self.now >= due:
                del self.timers[timer]
                self.run_timer(timer)

    def run_timer(self, timer: Timer) -> None:
        match timer:
            case Timer.REPORT_UNSTARTED:
                self.report_unstarted()
            case Timer.CHECK_REQUEST:
                self.timers[timer] = self.now + REQUEST_SECONDS
                self.check_request()
            case Timer.LOSE_NODES:
                # What it left running there nobody would end, and nobody would report.
                self.lose_nodes(self.evidence.dead_agents, "the agent there has ended")
            case Timer.FORWARD_SIGNAL:
                self.forward_signal()
            case Timer.RELEASE:
                self.release_failed_ranks()
            case Timer.OVERDUE:
                if not self.ranks.all_ended and self.state in HAS_NOT_STOPPED:
                    stuck = self.ranks.all_in(RankState.RUNNING, RankState.UNSTARTED)
                    seconds = f"{OVERDUE_SECONDS:g} s"
                    self.output.log(f"after {seconds} not ended, so killed: {self.name(stuck)}")
                    self.handle(Event.OVERDUE)

    # Actions.

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the ranks; the launcher forwards it to those that no agent reaches in time."""
        if number == signal.SIGPIPE:
            number = signal.SIGTERM
        self.agents.signal(number)
        self.last_signal = number
        if self.agents.without_agent(self.ranks.all_in(RankState.RUNNING)):
            seconds = min(FORWARD_SECONDS, self.launch.grace / 2)
            self.timers.setdefault(Timer.FORWARD_SIGNAL, self.now + seconds)

    def forward_signal(self) -> None:
        ranks = self.agents.without_agent(self.ranks.all_in(RankState.RUNNING))
        if not ranks:
            return
        hosts = sorted({self.launch.host_of(rank) for rank in ranks})
        named = ", ".join(hosts[:4])
        if len(hosts) > 4:
            named += " ..."
        if self.agents.why_none:
            named += f" ({self.agents.why_none})"
        self.output.log(
            f"no agent on {named}: {self.last_signal.name} goes through the launcher, which may "
            "kill at once"
        )
        self.launcher.send_signal(self.last_signal)

    def terminate_ranks(self) -> None:
        """Send SIGTERM to the ranks that run after another one failed."""
        self.evidence.exit_statuses = dict(self.ranks.exit_statuses)
        self.ranks.failure_is_final = True
        if self.ranks.has_running:
            self.ranks_were_terminated = True
            self.name_failure("; ending the other ranks")
            self.send_signal(signal.SIGTERM)

    def release_failed_ranks(self) -> None:
        failed = self.ranks.all_in(RankState.FAILED)
        if self.ranks.has_running or self.state is not RunState.FINISHING:
            return
        for rank in failed:
            self.agents.release_failed_rank(rank, self.ranks.pids.get(rank, 0))
        if self.agents.without_agent(failed) and self.launcher_signal == signal.SIGTERM:
            self.deadline = self.now  # only the launcher can end them
        if failed:
            self.timers[Timer.RELEASE] = self.now + RELEASE_SECONDS

    def request_stacks(self) -> None:
        """Name the ranks that have not ended, and ask their nodes where they are."""
        self.evidence.hangs = True
        self.evidence.detected_at = time.time()
        running = self.ranks.all_in(RankState.RUNNING)
        unstarted = self.ranks.all_in(RankState.UNSTARTED)
        silence = f"no output for {self.launch.idle_timeout:g} s"
        if unstarted:
            self.output.log(f"{silence}; ranks that never started: {self.name(unstarted)}")
        if running:
            named = self.name(running)
            self.output.log(f"{silence}; ranks that had not ended: {named}; where they are:")
            self.agents.request_stacks(running)
        self.stack_replies_due = len({rank // self.launch.ppn for rank in running})

    def record_unresponsive_nodes(self) -> None:
        running = self.ranks.all_in(RankState.RUNNING)
        nodes = {rank // self.launch.ppn for rank in running}
        self.evidence.unresponsive_nodes = nodes - self.agents.nodes_with_stacks

    def report_unstarted(self) -> None:
        unstarted = self.ranks.all_in(RankState.UNSTARTED)
        if unstarted and self.state in HAS_NOT_STOPPED:
            self.output.log(
                f"after {UNSTARTED_SECONDS:g} s {len(unstarted)} of {self.launch.nproc} ranks have "
                f"not started: {self.name(unstarted)}"
            )

    def check_request(self) -> None:
        request = pop_request(self.launch.end_file)
        if request == "with the job":
            self.goes_with_job = True
        self.inbox.arrived.extend([signal.SIGTERM] * REQUESTS.get(request, 0))

    def lose_gone_ranks(self) -> None:
        """Take ranks that are gone for lost, unless their reports arrive in time."""
        for rank in list(self.gone_ranks):
            if rank in self.ranks.exit_statuses:
                del self.gone_ranks[rank]
        due = [rank for rank, at in self.gone_ranks.items() if at <= self.now]
        if self.output.is_writing:
            # Nobody reads our output: the reports may wait behind it.
            self.gone_ranks.update(dict.fromkeys(due, self.now + GONE_SECONDS))
        else:
            self.lose_ranks(sorted(due))

    def lose_ranks(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if self.ranks.mark_lost(rank) and self.state is not RunState.KILLING:
                where = self.launch.host_of(rank)
                self.output.log(f"rank {rank} on {where}: lost (its process or its launcher died)")
                self.evidence.lost_ranks.add(rank)

    def lose_nodes(self, nodes: Iterable[int], why: str) -> None:
        """Take the ranks of these nodes that have not ended for lost."""
        running = self.ranks.all_in(RankState.RUNNING)
        lost = [rank for rank in running if rank // self.launch.ppn in nodes]
        if not lost:
            return
        self.lost_with_node.update(lost)
        hosts = list(dict.fromkeys(map(self.launch.host_of, lost)))
        verb = "is" if len(hosts) == 1 else "are"
        self.output.log(f"{join_names(hosts)} {verb} lost: {why}")
        for rank in lost:
            self.ranks.mark_lost(rank)

    # The end.

    def finish(self) -> None:
        """Read what is left in the pipes, and make sure that no rank is left."""
        # A stopped terminal holds us up as long as no signal ends us.
        self.output.wait_for_pipes(DRAIN_SECONDS, self.is_stopping)
        self.handle_reports()
        was_complete = self.ranks.all_ended and not self.was_stopped
        if was_complete:
            self.serve(0)  # what agents have sent last
        self.agents.close(farewell=was_complete)
        self.report_leftovers()
        if not was_complete:
            kill_launcher_processes(self.launcher.pid, self.launch.settings.launch_id)
            self.output.wait_for_pipes(DRAIN_SECONDS, self.is_stopping)
            self.handle_reports()
        self.end_signal = self.end_signal or self.inbox.first_stop_signal()

    def outcome(self) -> Outcome:
        if self.port_taken:
            # Whoever requested this run chooses another port, or says so.
            return Outcome(2, end_signal=self.end_signal, port_taken=True)
        failure = self.ranks.first_failure
        exit_status = self.find_exit_status()
        where = None
        if failure:
            rank, status = failure
            where = (rank, self.launch.host_of(rank), status)
            self.name_failure("")
            if self.ranks_were_terminated and exit_status == status:
                # Launchers print a lot meanwhile; the last line is the one that people read.
                self.output.log(f"exit status {exit_status}, that of rank {rank} on {where[1]}")
        self.evidence.unstarted_ranks = self.ranks.all_in(RankState.UNSTARTED)
        has_failed = exit_status != 0 and self.end_signal is None
        return Outcome(
            exit_status, where, self.end_signal, tail=self.output.tail,
            goes_with_job=self.goes_with_job, evidence=self.evidence if has_failed else None,
        )  # fmt: skip

    def find_exit_status(self) -> int:
        """Return the exit status of the launch, and say why, unless it is known already."""
        if self.end_signal is not None:
            return self.exit_status_for_signal(self.end_signal)
        if self.evidence.hangs:
            return HANG
        if self.ranks.first_failure is not None:
            return self.ranks.first_failure[1]
        status = self.launcher.returncode
        if status < 0:
            status = 128 - status
        if self.ranks.all_ended:
            if status:
                # Hydra can return 141 under load after ranks that end at once (4 times in 726).
                self.output.log(
                    f"every rank ended with 0; the launcher with {status}, which is not passed on"
                )
            return 0
        silent = self.ranks.all_in(RankState.UNSTARTED, RankState.RUNNING)
        more = "" if self.ranks.pids else "; none had started"
        self.output.log(
            f"the launcher {describe_exit_status(status)}; ranks that did not report their end: "
            f"{self.name(silent)}{more}"
        )
        # Without a report of its ranks even a 0 is no success.
        return status or 1

    def exit_status_for_signal(self, number: signal.Signals) -> int:
        if not self.ended_by_hand:
            self.output.log(f"ended by {number.name}")
        # Those that checkpointed say so; the others died of the signal, or had nothing to save.
        statuses = set(self.ranks.exit_statuses.values())
        expected = {0, REQUEUE, 128 + number, 128 + signal.SIGTERM}
        if REQUEUE in statuses and statuses <= expected:
            return REQUEUE
        return 128 + number

    def name_failure(self, more: str) -> None:
        """Name the rank that failed first, once."""
        if self.evidence.hangs or self.end_signal is not None or self.failure_was_named:
            return
        if self.ranks.first_failure is None:
            return
        self.failure_was_named = True
        self.ranks.failure_is_final = True
        rank, status = self.ranks.first_failure
        where = f"rank {rank} on {self.launch.host_of(rank)}"
        if rank in self.lost_with_node:
            self.output.log(f"{where} is lost with its node{more}")
        else:
            self.output.log(f"{where} {describe_exit_status(status)}, first of all ranks{more}")

    def name(self, ranks: Sequence[int]) -> str:
        return join_names([f"{rank} on {self.launch.host_of(rank)}" for rank in ranks])

    def is_stopping(self) -> bool:
        """Whether a signal ends the run, or is about to."""
        return self.end_signal is not None or bool(self.inbox.arrived)


REQUESTS = {"with grace": 1, "now": 2, "with the job": 1}
"""How `ezpz kill` on another host may request our end, and how many signals that stands for."""


def pop_request(path: str) -> str:
    """Read and delete the request file; '' if there is none."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read(80).strip()
        os.unlink(path)
    except OSError:
        return ""
    return text


def join_names(names: Sequence[str]) -> str:
    joined = ", ".join(names[:MAX_NAMED])
    if len(names) > MAX_NAMED:
        joined += f" and {len(names) - MAX_NAMED} more"
    return joined


def newest_output(folder: str, ranks: Sequence[int]) -> float:
    """Return when one of these ranks last wrote to its files, in seconds since the epoch."""
    newest = 0.0
    for rank in ranks:
        for name in (f"rank-{rank}.out", f"rank-{rank}.err"):
            try:
                newest = max(newest, os.stat(os.path.join(folder, name)).st_mtime)
            except OSError:
                return time.time()
    return newest
