"""Medians of neighbours in time, and what a drifting machine does to them."""

import itertools

import pytest
from paired import MeasureError, Spread, against, beside, interleaved, times


def test_a_spread_is_median_quartiles_least_and_count():
    assert Spread.of([5, 1, 3, 2, 4]) == Spread(3.0, 2.0, 4.0, 1.0, 5)
    # of few samples the ends are the quartiles
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0, 2.0, 1)
    assert Spread.of(times(1e3, [0.001, 0.003])) == Spread(2.0, 1.0, 3.0, 1.0, 2)
    for samples in ([], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="expected at least one, and no NaN"):
            Spread.of(samples)


def test_the_ratio_is_that_of_neighbours_however_the_machine_drifts():
    speed = [1, 1, 2, 4, 8]  # slower all the time
    row = beside("s/w/p", "w", "ms", ([3 * x for x in speed], [4 * x for x in speed]), "p")
    assert row.ratio == Spread(0.75, 0.75, 0.75, 0.75, 5)
    # The medians alone would be right here, too; for uneven halves they are not.
    other = beside("s/w/p", "w", "ms", ([2, 2, 20], [1, 10, 10]), "p")
    assert other.ratio.median == 2.0
    assert other.ours.median / other.theirs.median == 0.2


def test_ways_take_turns_and_none_is_always_first():
    order = []
    clock = itertools.count()

    def way(name):
        return lambda: order.append(name) or float(next(clock))

    samples = interleaved({name: way(name) for name in "ab"}, runs=3, warm=1)
    assert "".join(order) == "abbaabba"
    assert samples == {"a": [3.0, 4.0, 7.0], "b": [2.0, 5.0, 6.0]}


def test_a_peer_that_fails_is_left_out_with_its_reason_and_the_others_go_on():
    turns = iter([1.0, 2.0])

    def breaks():
        for figure in turns:
            return figure
        raise MeasureError("it broke")

    failed = {}
    ways = {"ours": lambda: 1.0, "x": breaks, "y": lambda: 2.0}
    samples = interleaved(ways, runs=3, failed=failed)
    assert samples == {"ours": [1.0] * 3, "y": [2.0] * 3}
    assert failed == {"x": "it fails: it broke"}
    titles = {"x": "x 1.0", "y": "y 1.0"}
    for ways, more in (({"ours": breaks}, {"failed": {}}), ({"x": breaks}, {})):
        with pytest.raises(MeasureError, match="it broke"):  # ours may not fail
            interleaved(ways, runs=1, **more)
    measured, gone = against("s/w", "w", "ms", samples, titles, missing=failed)
    assert (measured.key, measured.peer, measured.missing) == ("s/w/y", "y 1.0", "")
    assert measured.ratio.median == 0.5
    assert (gone.key, gone.peer, gone.missing) == ("s/w/x", "x 1.0", "it fails: it broke")
    assert gone.ours is None
    (gone,) = against("s/w", "w", "ms", {"ours": [1.0]}, {}, missing={"z": "no network"})
    assert (gone.key, gone.peer, gone.missing) == ("s/w/z", "z", "no network")
