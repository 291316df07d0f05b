from ezpz_launch._launch import Status


def test_reports_in_the_order_in_which_they_come():
    status = Status(3)
    for report in (("start", 0, 10), ("start", 1, 11), ("end", 1, 7), ("end", 0, 3)):
        assert status.take(report)
    assert status.pids == {0: 10, 1: 11}
    assert list(status.ended.items()) == [(1, 7), (0, 3)]
    assert status.first_failure == (1, 7)


def test_the_second_copy_is_not_new():
    status = Status(2)
    assert [status.take(("end", 0, 3)), status.take(("end", 0, 3))] == [True, False]
    # the first word counts
    assert not status.take(("end", 0, 4))
    assert status.ended == {0: 3}


def test_a_rank_that_there_is_not():
    status = Status(2)
    assert not status.take(("start", 2, 10))
    assert not status.take(("end", 99999, 1))
    assert (status.pids, status.ended, status.first_failure) == ({}, {}, None)


def test_who_runs_who_is_held_and_who_has_ended():
    status = Status(3)
    assert (status.running, status.held, status.all_ended) == ([], [], False)
    for rank in (2, 0, 1):
        status.take(("start", rank, 100 + rank))
    assert status.running == [0, 1, 2]
    status.take(("end", 1, 0))
    assert (status.running, status.held, status.first_failure) == ([0, 2], [], None)
    status.take(("end", 2, 137))
    assert (status.running, status.held, status.first_failure) == ([0], [2], (2, 137))
    status.take(("end", 0, 1))
    assert (status.running, status.held, status.all_ended) == ([], [2, 0], True)
    assert status.first_failure == (2, 137)


def test_an_end_without_a_start():
    # its start was lost, not its end
    status = Status(1)
    assert status.take(("end", 0, 0))
    assert (status.running, status.all_ended) == ([], True)


def test_who_leaves_because_of_another_is_not_the_first():
    status = Status(3)
    for report in (("cause", 0, 2), ("cause", 0, 2), ("cause", 1, 3)):
        assert not status.take(report)
    assert status.take(("end", 0, 1))
    assert (status.first_failure, status.has_running, status.ended) == ((2, 1), False, {0: 1})
    # no rank of this launch is meant
    other = Status(3)
    assert not other.take(("cause", 1, 3))
    assert other.take(("end", 1, 1))
    assert other.first_failure == (1, 1)
