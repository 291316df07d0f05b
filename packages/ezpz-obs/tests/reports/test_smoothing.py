import numpy as np
import pytest

from ezpz_obs._report.figures import limits, smooth
from ezpz_obs._report.survey import Series


def table(values):
    series = Series("x")
    series.add(np.arange(len(values)), np.array(values, np.float64))
    return series.curve(600)


def test_noise_goes_and_the_course_stays():
    random = np.random.default_rng(0)
    course = np.linspace(5, 1, 500)
    smoothed = smooth(table(course + random.normal(0, 0.3, 500)))
    assert np.abs(smoothed - course).max() < 0.3
    assert np.abs(smoothed - course).mean() < 0.1
    # No lag: neither end is above or below.
    assert abs((smoothed - course)[:50].mean()) < 0.15


def test_corners_without_noise_are_left_alone():
    assert smooth(table(np.minimum(np.arange(200), 50))) is None
    assert smooth(table(np.arange(10))) is None


def test_gaps_stay_gaps():
    values = np.random.default_rng(0).normal(0, 1, 100)
    values[40:50] = np.nan
    smoothed = smooth(table(values))
    assert np.isnan(smoothed[40:50]).all()
    assert np.isfinite(np.delete(smoothed, range(40, 50))).all()


def test_one_outlier_does_not_hide_the_rest():
    values = np.random.default_rng(0).normal(1, 0.1, 500)
    values[77] = 1e9
    low, high, log, outside = limits([table(values)])
    assert (log, outside) == (False, True)
    assert high < 10
    assert low < 1 < high


def test_many_decades_are_logarithmic():
    low, high, log, _ = limits([table(np.logspace(0, -6, 300))])
    assert log
    assert low < 1e-6
    assert high > 1


@pytest.mark.parametrize(
    "values", [[np.nan] * 5, [3.0], [0.0] * 5, [1e308, -1e308], [np.inf, 1.0], []]
)
def test_there_is_always_a_frame(values):
    low, high, _, _ = limits([table(values)] if values else [Series("x").curve(600)])
    assert np.isfinite([low, high]).all()
    assert low < high
