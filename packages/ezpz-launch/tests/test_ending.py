"""What is due when, on a clock that the test holds; tests/faults does it with real ranks."""

import pytest

from ezpz_launch._launch import NEVER, Status
from ezpz_launch._nodes import ThisHost
from ezpz_launch._run import SETTLE, Ending


@pytest.fixture
def nodes():
    return ThisHost("ending-test", lambda _: None)


@pytest.fixture
def status():
    status = Status(2)
    for rank in (0, 1):
        status.take(("start", rank, 1000 + rank))
    return status


def test_nothing_is_due_while_all_goes_well(status, nodes):
    ending = Ending(grace=5)
    ending.look(100.0, status, nodes)
    assert ending.next == NEVER
    due = [each(1e9) for each in (ending.terminates, ending.kills, ending.ends_launcher)]
    assert not any(due)


def test_after_a_failure_a_moment_then_sigterm_then_sigkill(status, nodes):
    ending = Ending(grace=5)
    ending.settle(100.0)
    ending.look(100.0, status, nodes)
    assert ending.next == 100.0 + SETTLE
    assert not ending.terminates(100.9)
    assert ending.terminates(101.0)
    assert not ending.terminates(101.0), "once"
    assert ending.next == 106.0
    assert ending.kills(106.0)
    assert ending.killed
    assert not ending.kills(106.1)
    assert ending.kills(107.0), "again, for those that come late"
    assert ending.ends_launcher(106.5)


def test_who_is_told_has_the_grace_and_a_second_word_has_none(status):
    ending = Ending(grace=5)
    ending.settle(100.0)
    ending.told(100.5, 5)
    assert not ending.terminates(200.0), "they have heard the signal themselves"
    assert ending.next == 105.5
    ending.told(101.0, 0.0)
    assert ending.kills(101.0)


def test_time_that_we_were_stopped_for_is_not_counted():
    ending = Ending(grace=5)
    ending.settle(100.0)
    ending.forgive(60.0)
    assert ending.next == 161.0
    ending.terminates(161.0)
    assert ending.next == 166.0


def test_a_launcher_that_stays_after_its_ranks_is_ended(status, nodes):
    ending = Ending(grace=5)
    for rank in (0, 1):
        status.take(("end", rank, 0))
    ending.look(100.0, status, nodes)
    # what the ranks left running may be what it waits for
    assert ending.next == 100.0 + SETTLE
    assert not ending.ends_left(100.9)
    assert ending.ends_left(101.0)
    assert ending.ends_left(109.0)
    assert ending.next == 110.0
    ending.look(110.0, status, nodes)
    assert ending.ends_launcher(110.0)
    assert ending.next == 111.0
    assert not ending.begun
