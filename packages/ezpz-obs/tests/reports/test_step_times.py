import numpy as np
import pytest

from ezpz_obs._report.survey import StepTimes


def feed(steps, times, begins=(0.0,), block=None):
    found = StepTimes(list(begins))
    steps, times = np.array(steps, np.int64), np.array(times, np.float64)
    for start in range(0, len(steps), block or len(steps)):
        end = start + (block or len(steps))
        found.add(steps[start:end], times[start:end])
        if block:
            found.settle()
    found.settle()
    return found


@pytest.mark.parametrize("block", [None, 1, 7])
def test_quantiles_are_within_a_percent(block):
    took = np.random.default_rng(0).lognormal(-2, 0.5, 500)
    found = feed(np.arange(501), 10 + np.concatenate([[0], np.cumsum(took)]), block=block)
    assert found.count == 500
    for part in (0.5, 0.95):
        assert found.quantile(part) == pytest.approx(np.quantile(took, part), rel=0.02)


def test_the_longest_pauses_are_named():
    times = np.arange(100.0)
    times[60:] += 30
    assert feed(np.arange(100), times).pauses[0] == (31.0, 60)


def test_two_records_of_a_step_are_one_step():
    found = feed([0, 1, 1, 2], [0.0, 1.0, 1.5, 2.0])
    assert (found.count, found.quantile(1.0)) == (2, pytest.approx(1.0, rel=0.02))


def test_one_record_for_ten_steps():
    assert feed([0, 10, 20], [0.0, 5.0, 10.0]).quantile(0.5) == pytest.approx(0.5, rel=0.02)


def test_a_restart_is_no_step():
    found = feed([0, 1, 1, 2, 3], [1.0, 2.0, 503.0, 504.0, 505.0], begins=(0.0, 500.0))
    assert found.count == 3
    assert max(took for took, _ in found.pauses) < 2
    assert [(a.records, a.first_step, a.last_step) for a in found.attempts] == [
        (2, 0, 1),
        (3, 1, 3),
    ]


def test_nothing():
    found = StepTimes([])
    assert (found.count, found.quantile(0.5), found.pauses) == (0, None, [])
