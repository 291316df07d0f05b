import math

import numpy as np
import pytest

from ezpz_obs._report.survey import BUCKETS, COUNT, FROM, GREATEST, LEAST, MEAN, SIZE, TO, Series


def fill(values, *, block, name="loss"):
    series = Series(name)
    steps = np.arange(len(values), dtype=np.int64)
    for start in range(0, len(values), block):
        series.add(steps[start : start + block], values[start : start + block])
    series.settle()
    return series


@pytest.mark.parametrize("block", [1, 7, 1000, 16_384, 100_000])
@pytest.mark.parametrize("count", [1, 2, 2048, 2049, 50_000])
def test_the_statistics_are_those_of_all_values(block, count):
    if block == 1 and count > 3000:
        count = 3000
    values = np.random.default_rng(0).normal(1e5, 20.0, count)
    series = fill(values, block=block)
    assert series.count == count
    assert (series.first, series.last) == ((0, values[0]), (count - 1, values[-1]))
    assert series.min == (values.argmin(), values.min())
    assert series.max == (values.argmax(), values.max())
    assert series.mean == pytest.approx(values.mean(), rel=1e-14)
    assert series.std == pytest.approx(values.std(), rel=1e-9)
    table = series.buckets
    assert table.shape[1] <= BUCKETS
    width = series.width
    starts = np.arange(0, count, width)
    assert table[SIZE].sum() == count
    np.testing.assert_allclose(
        table[MEAN], np.add.reduceat(values, starts) / np.diff([*starts, count])
    )
    np.testing.assert_array_equal(table[LEAST], np.minimum.reduceat(values, starts))
    np.testing.assert_array_equal(table[GREATEST], np.maximum.reduceat(values, starts))
    np.testing.assert_array_equal(table[FROM], starts)
    np.testing.assert_array_equal(table[TO], np.append(starts[1:] - 1, count - 1))


def test_what_is_no_number_is_counted_and_hides_nothing():
    values = np.ones(10_000)
    values[5000] = math.nan
    values[6000:6002] = math.inf
    series = fill(values, block=4096)
    assert (series.nan, series.infinite, series.first_odd) == (1, 2, 5000)
    assert (series.mean, series.std, series.max) == (1.0, 0.0, (0, 1.0))
    table = series.curve(600)
    assert table[SIZE].sum() - table[COUNT].sum() == 3
    assert np.isfinite(table[MEAN]).all()


def test_nothing_but_nan():
    series = fill(np.full(5000, math.nan), block=5000)
    assert (series.mean, series.std, series.min, series.max) == (None, None, None, None)
    assert np.isnan(series.buckets[MEAN]).all()
    assert math.isnan(series.last[1])


def test_the_largest_doubles_have_a_mean():
    series = fill(np.full(5000, 1.7e308), block=5000)
    assert series.mean == pytest.approx(1.7e308)
    assert np.isfinite(series.buckets[MEAN]).all()


def test_ranks_are_counted():
    series = fill(np.array([3.0, 3.0, 1.0]), block=3, name="loss/max_rank")
    assert series.ranks == {3: 2, 1: 1}
    assert fill(np.array([3.0]), block=1).ranks is None
