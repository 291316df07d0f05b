"""The states of a run and of its ranks, and what each event leads to. Nothing here has an effect.

`TRANSITIONS` is the whole life of a run; docs/how-it-works.md shows it as a picture.
"""

from __future__ import annotations

import signal
from collections import Counter
from enum import Enum, auto
from typing import NamedTuple


class RunState(Enum):
    """Where a run is in its life."""

    STARTING = auto()  # not all ranks have started
    RUNNING = auto()
    DIAGNOSING = auto()  # the ranks are silent: their nodes are asked where they hang
    SETTLING = auto()  # a rank failed: the others may end by themselves for a moment
    STOPPING = auto()  # the ranks have a signal, and the grace to end
    KILLING = auto()
    FINISHING = auto()  # no rank runs; the launcher has to end
    DONE = auto()


class RankState(Enum):
    """Where a rank is in its life."""

    UNSTARTED = auto()
    RUNNING = auto()
    ENDED = auto()  # its command ended with status 0
    FAILED = auto()  # its command ended otherwise; its process waits to be released
    LOST = auto()  # its process, its launcher or its node is gone, and no report came


class Event(Enum):
    """What may happen to a run."""

    ALL_STARTED = auto()
    LATE_START = auto()  # a rank started though no rank should
    RANK_FAILED = auto()  # the first one
    ALL_ENDED = auto()  # no rank is left, and each has reported its end or is lost
    NONE_RUNS = auto()  # no rank runs; some may never have started
    SILENCE = auto()  # no output for the idle time-out
    STACKS_RECEIVED = auto()
    STOP_SIGNAL = auto()  # the first signal that ends a run
    SECOND_STOP_SIGNAL = auto()
    PORT_TAKEN = auto()
    OVERDUE = auto()  # ranks that have nothing left to do have not ended
    DEADLINE = auto()  # the state has lasted as long as it may
    LAUNCHER_ENDED = auto()


class Action(Enum):
    """What a run does when it changes its state."""

    REQUEST_STACKS = auto()
    TERMINATE_RANKS = auto()
    KILL_RANKS = auto()
    SEND_STOP_SIGNAL = auto()
    RELEASE_FAILED_RANKS = auto()
    END_LEFTOVERS = auto()
    STOP_LAUNCHER = auto()


SETTLE_SECONDS = 1.0
"""That the other ranks have to end by themselves after the first failure."""

STACKS_SECONDS = 15.0
"""That the nodes have to send the stacks of their ranks."""

FINISH_SECONDS = 10.0
"""That a launcher has to end after its last rank: it may still write, or release its nodes."""

STOP_SECONDS = 2.0
"""That a launcher has to end once its ranks were stopped, and after each signal."""

KILL_SECONDS = 0.5
"""Between two SIGKILL to ranks and launcher: a rank may start late."""

GRACE = -1.0
"""Stands in the table for the seconds of --grace."""

UNCHANGED = -2.0
"""Stands in the table for the deadline that the state has already."""


class Transition(NamedTuple):
    """The state that follows, what is done, and after how many seconds DEADLINE comes."""

    state: RunState
    actions: tuple[Action, ...] = ()
    seconds: float = UNCHANGED


_SETTLE = Transition(RunState.SETTLING, (), SETTLE_SECONDS)
_STOP = Transition(RunState.STOPPING, (Action.SEND_STOP_SIGNAL,), GRACE)
_KILL = Transition(RunState.KILLING, (Action.KILL_RANKS,), KILL_SECONDS)
_KILL_ALL = Transition(RunState.KILLING, (Action.KILL_RANKS, Action.STOP_LAUNCHER), KILL_SECONDS)
_FINISH = Transition(RunState.FINISHING, (Action.END_LEFTOVERS,), FINISH_SECONDS)
_FINISH_FAILED = Transition(RunState.FINISHING, (Action.RELEASE_FAILED_RANKS,), STOP_SECONDS)

TRANSITIONS: dict[RunState, dict[Event, Transition]] = {
    RunState.STARTING: {
        Event.ALL_STARTED: Transition(RunState.RUNNING),
        Event.RANK_FAILED: _SETTLE,
        Event.ALL_ENDED: _FINISH,
        Event.SILENCE: Transition(RunState.DIAGNOSING, (Action.REQUEST_STACKS,), STACKS_SECONDS),
        Event.STOP_SIGNAL: _STOP,
        Event.PORT_TAKEN: _KILL,
        Event.OVERDUE: _KILL,
    },
    RunState.RUNNING: {
        Event.RANK_FAILED: _SETTLE,
        Event.ALL_ENDED: _FINISH,
        Event.SILENCE: Transition(RunState.DIAGNOSING, (Action.REQUEST_STACKS,), STACKS_SECONDS),
        Event.STOP_SIGNAL: _STOP,
        Event.PORT_TAKEN: _KILL,
        Event.OVERDUE: _KILL,
    },
    RunState.DIAGNOSING: {
        Event.STACKS_RECEIVED: _SETTLE,
        Event.DEADLINE: _SETTLE,
        Event.STOP_SIGNAL: _STOP,
    },
    RunState.SETTLING: {
        Event.ALL_ENDED: _FINISH_FAILED,
        Event.DEADLINE: Transition(RunState.STOPPING, (Action.TERMINATE_RANKS,), GRACE),
        Event.STOP_SIGNAL: _STOP,
    },
    RunState.STOPPING: {
        Event.ALL_ENDED: _FINISH_FAILED,
        Event.NONE_RUNS: _FINISH_FAILED,
        Event.DEADLINE: _KILL,
        # Ranks that a failure ended already keep the grace that they have.
        Event.STOP_SIGNAL: Transition(RunState.STOPPING, (Action.SEND_STOP_SIGNAL,)),
        Event.SECOND_STOP_SIGNAL: _KILL,
    },
    RunState.KILLING: {
        Event.ALL_ENDED: _FINISH_FAILED,
        # A rank may start late, so this is repeated.
        Event.DEADLINE: _KILL_ALL,
    },
    RunState.FINISHING: {
        Event.LATE_START: Transition(RunState.STOPPING, (), GRACE),
        Event.DEADLINE: Transition(
            RunState.FINISHING, (Action.STOP_LAUNCHER, Action.RELEASE_FAILED_RANKS), STOP_SECONDS
        ),
        Event.STOP_SIGNAL: Transition(RunState.FINISHING, (Action.SEND_STOP_SIGNAL,), STOP_SECONDS),
        Event.SECOND_STOP_SIGNAL: _KILL_ALL,
    },
    RunState.DONE: {},
}
"""An event that has no row in a state changes nothing there; LAUNCHER_ENDED always ends in DONE."""

HAS_NOT_STOPPED = (RunState.STARTING, RunState.RUNNING)
"""States in which nothing has been done yet to end the ranks."""


def next_transition(state: RunState, event: Event) -> Transition | None:
    """Return what an event leads to; None if it changes nothing in this state."""
    if event is Event.LAUNCHER_ENDED:
        return Transition(RunState.DONE)
    return TRANSITIONS[state].get(event)


class Ranks:
    """What the reports say of each rank: its state, its process, and its exit status."""

    def __init__(self, nproc: int) -> None:
        self.nproc = nproc
        self.pids: dict[int, int] = {}
        self.exit_statuses: dict[int, int] = {}  # of ranks that have ended, in that order
        self.first_failure: tuple[int, int] | None = None  # rank and exit status
        self.failure_is_final = False  # whether the first failure was named, or acted upon
        self._states = [RankState.UNSTARTED] * nproc
        self._counts = Counter({RankState.UNSTARTED: nproc})
        self._causes: dict[int, int] = {}

    def mark_started(self, rank: int, pid: int) -> bool:
        """Record that a rank started; False if that is known, or there is no such rank."""
        if rank >= self.nproc or rank in self.pids:
            return False
        self.pids[rank] = pid
        if rank not in self.exit_statuses:
            self._change(rank, RankState.RUNNING)
        return True

    def mark_cause(self, rank: int, cause: int) -> None:
        """Record that a rank is about to leave because of another."""
        if cause < self.nproc:
            self._causes[rank] = cause

    def mark_ended(self, rank: int, status: int) -> bool:
        """Record a rank's exit status; False if one is known, or there is no such rank."""
        state = RankState.FAILED if status else RankState.ENDED
        return self._end(rank, status, state)

    def mark_lost(self, rank: int) -> bool:
        """Record that a rank is gone without a report; False if its end is known."""
        return self._end(rank, 128 + signal.SIGKILL, RankState.LOST)

    def _end(self, rank: int, status: int, state: RankState) -> bool:
        if rank >= self.nproc or rank in self.exit_statuses:
            return False
        self.exit_statuses[rank] = status
        self._change(rank, state)
        if status and self._precedes_first_failure(state):
            # Who leaves because of another may be quicker, and ends with its status.
            self.first_failure = (self._causes.get(rank, rank), status)
        return True

    def _precedes_first_failure(self, state: RankState) -> bool:
        """Whether a failure that is recorded now is the first one."""
        if self.first_failure is None:
            return True
        # Some launchers send SIGTERM to the others before we know that a rank is lost.
        was_terminated = self.first_failure[1] == 128 + signal.SIGTERM
        return state is RankState.LOST and was_terminated and not self.failure_is_final

    def _change(self, rank: int, state: RankState) -> None:
        self._counts[self._states[rank]] -= 1
        self._counts[state] += 1
        self._states[rank] = state

    def state_of(self, rank: int) -> RankState:
        return self._states[rank]

    def all_in(self, *states: RankState) -> list[int]:
        """Return the ranks in these states, in order."""
        return [rank for rank, state in enumerate(self._states) if state in states]

    @property
    def all_started(self) -> bool:
        return len(self.pids) == self.nproc

    @property
    def all_ended(self) -> bool:
        return len(self.exit_statuses) == self.nproc

    @property
    def has_running(self) -> bool:
        return self._counts[RankState.RUNNING] > 0
