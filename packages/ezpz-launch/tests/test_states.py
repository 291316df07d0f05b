"""The life of a run and of a rank, event by event, without any process."""

import pytest

from ezpz_launch._run.states import (
    GRACE,
    SETTLE_SECONDS,
    TRANSITIONS,
    UNCHANGED,
    Action,
    Event,
    Ranks,
    RankState,
    RunState,
    next_transition,
)

S, E, A = RunState, Event, Action

LIVES = {
    "all is well": (
        [(E.ALL_STARTED, S.RUNNING, []), (E.ALL_ENDED, S.FINISHING, [A.END_LEFTOVERS]),
         (E.LAUNCHER_ENDED, S.DONE, [])]
    ),
    "a rank fails, the others end by themselves": (
        [(E.ALL_STARTED, S.RUNNING, []), (E.RANK_FAILED, S.SETTLING, []),
         (E.NONE_RUNS, S.SETTLING, []),  # ranks that have not started have the same moment
         (E.ALL_ENDED, S.FINISHING, [A.RELEASE_FAILED_RANKS]), (E.LAUNCHER_ENDED, S.DONE, [])]
    ),
    "a rank fails, the others ignore SIGTERM": (
        [(E.RANK_FAILED, S.SETTLING, []), (E.DEADLINE, S.STOPPING, [A.TERMINATE_RANKS]),
         (E.DEADLINE, S.KILLING, [A.KILL_RANKS]),
         (E.DEADLINE, S.KILLING, [A.KILL_RANKS, A.STOP_LAUNCHER]),
         (E.NONE_RUNS, S.KILLING, []),  # another may still start
         (E.ALL_ENDED, S.FINISHING, [A.RELEASE_FAILED_RANKS])]
    ),
    "a rank fails, the others never start": (
        [(E.RANK_FAILED, S.SETTLING, []), (E.DEADLINE, S.STOPPING, [A.TERMINATE_RANKS]),
         (E.NONE_RUNS, S.FINISHING, [A.RELEASE_FAILED_RANKS]),
         (E.LATE_START, S.STOPPING, []), (E.NONE_RUNS, S.FINISHING, [A.RELEASE_FAILED_RANKS])]
    ),
    "Ctrl-C, twice": (
        [(E.STOP_SIGNAL, S.STOPPING, [A.SEND_STOP_SIGNAL]),
         (E.SECOND_STOP_SIGNAL, S.KILLING, [A.KILL_RANKS])]
    ),
    "Ctrl-C, twice, before any rank has started": (
        [(E.STOP_SIGNAL, S.STOPPING, [A.SEND_STOP_SIGNAL]),
         (E.NONE_RUNS, S.FINISHING, [A.RELEASE_FAILED_RANKS]),
         (E.SECOND_STOP_SIGNAL, S.KILLING, [A.KILL_RANKS, A.STOP_LAUNCHER])]
    ),
    "a signal after a failure": (
        [(E.RANK_FAILED, S.SETTLING, []), (E.STOP_SIGNAL, S.STOPPING, [A.SEND_STOP_SIGNAL])]
    ),
    "a hang": (
        [(E.SILENCE, S.DIAGNOSING, [A.REQUEST_STACKS]), (E.RANK_FAILED, S.DIAGNOSING, []),
         (E.STACKS_RECEIVED, S.SETTLING, []), (E.DEADLINE, S.STOPPING, [A.TERMINATE_RANKS])]
    ),
    "a hang whose nodes do not answer": (
        [(E.SILENCE, S.DIAGNOSING, [A.REQUEST_STACKS]), (E.DEADLINE, S.SETTLING, [])]
    ),
    "a launcher that stays": (
        [(E.ALL_ENDED, S.FINISHING, [A.END_LEFTOVERS]),
         (E.DEADLINE, S.FINISHING, [A.STOP_LAUNCHER, A.RELEASE_FAILED_RANKS])]
    ),
    "a port that is taken": [(E.PORT_TAKEN, S.KILLING, [A.KILL_RANKS])],
    "a launcher that ends first": [(E.LAUNCHER_ENDED, S.DONE, []), (E.RANK_FAILED, S.DONE, [])],
}  # fmt: skip


@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)
def test_the_life_of_a_run(life):
    state = RunState.STARTING
    for event, expected, actions in life:
        transition = next_transition(state, event)
        if transition is None:
            assert (state, []) == (expected, actions), event
            continue
        assert (transition.state, list(transition.actions)) == (expected, actions), event
        state = transition.state


def test_every_state_but_the_last_is_left_by_a_deadline_or_by_the_launchers_end():
    """No state lasts for ever: in the first two the ranks work."""
    for state in set(RunState) - {RunState.STARTING, RunState.RUNNING, RunState.DONE}:
        assert Event.DEADLINE in TRANSITIONS[state]
    for state, rows in TRANSITIONS.items():
        for row in rows.values():
            is_same = row.state is state or row.state is RunState.RUNNING
            assert row.seconds > 0 or row.seconds == GRACE or is_same, (state, row)
    assert TRANSITIONS[S.RUNNING][E.RANK_FAILED].seconds == SETTLE_SECONDS
    # A signal that comes after a failure lengthens nobody's grace.
    assert TRANSITIONS[S.STOPPING][E.STOP_SIGNAL].seconds == UNCHANGED


def test_the_life_of_ranks():
    ranks = Ranks(4)
    assert ranks.all_in(RankState.UNSTARTED) == [0, 1, 2, 3]
    for rank in range(3):
        assert ranks.mark_started(rank, 100 + rank)
    assert not ranks.mark_started(0, 7), "it is known"
    assert not ranks.mark_started(4, 7), "there is no such rank"
    assert (ranks.all_started, ranks.has_running) == (False, True)
    assert ranks.mark_ended(0, 0)
    assert not ranks.mark_ended(0, 3), "the first report counts"
    ranks.mark_cause(1, 2)
    assert ranks.mark_ended(1, 9)
    assert ranks.first_failure == (2, 9), "who leaves because of another may be quicker"
    assert ranks.mark_lost(2)
    assert ranks.exit_statuses == {0: 0, 1: 9, 2: 137}
    states = [ranks.state_of(rank) for rank in range(4)]
    assert states == [RankState.ENDED, RankState.FAILED, RankState.LOST, RankState.UNSTARTED]
    assert (ranks.has_running, ranks.all_ended) == (False, False)
    # A launcher's SIGTERM is quicker than the news of a loss.
    others = Ranks(3)
    assert others.mark_ended(1, 143)
    assert others.mark_lost(0)
    assert others.mark_lost(2)
    assert others.first_failure == (0, 137)
    named = Ranks(2)
    assert named.mark_ended(1, 143)
    named.failure_is_final = True
    assert named.mark_lost(0)
    assert named.first_failure == (1, 143), "it was named"
    # One that ends before its start is reported.
    assert ranks.mark_ended(3, 0)
    assert ranks.mark_started(3, 103)
    assert (ranks.all_started, ranks.all_ended, ranks.has_running) == (True, True, False)
