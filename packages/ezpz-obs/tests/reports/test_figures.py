import re
import xml.etree.ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest

from ezpz_obs._report.figures import Drawn, curves, limits, smooth, step_histogram
from ezpz_obs._report.survey import Series, StepTimes
from ezpz_obs._report.words import shorten


def series(values, name="loss"):
    found = Series(name)
    if len(values):
        found.add(np.arange(len(values)), np.array(values, np.float64))
    return found


def table(values):
    return series(values).curve(600)


def noise(count=500):
    return np.random.default_rng(0).normal(1, 0.1, count)


@pytest.mark.parametrize(
    "values",
    [noise(), noise(5000), [1.0], [2.0] * 10, [np.nan] * 30, [1.0, np.nan, 2.0, np.nan],
     [np.inf, -np.inf, 0.0], [1e308, -1e308], [1e-320, 5e-324], [0.0] * 50, []],
)  # fmt: skip
def test_any_values_can_be_drawn(values):
    svg, _ = curves([Drawn("loss", series(values), None, 0)], title="loss")
    ET.fromstring(svg)
    assert "nan" not in svg.lower().replace("nan (", "")


def test_what_is_no_number_is_marked_and_said_and_colours_are_the_pages():
    values = noise()
    values[100:103] = np.nan
    values[200] = np.inf
    before = dict(mpl.rcParams)
    svg, notes = curves([Drawn("loss", series(values), None, 0)], title="loss")
    assert dict(mpl.rcParams) == before, "of the user's nothing is changed"
    assert "3 NaN and 1 infinite (\N{MULTIPLICATION SIGN}), first at step 100" in notes
    assert "var(--alarm" in svg
    assert "currentColor" in svg
    assert "var(--series-0, #0072b2)" in svg
    assert not re.search(r"#0[123][0-9a-f]{2}0[1-9a-f]", svg)


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "$x_2$", "a & b", "\"q\" 'p'", "$\\frac{", "a\nb", "_x"]
)
def test_names_are_text(name):
    lines = [Drawn(name, series(noise()), None, 0), Drawn("other", series(noise()), None, 1)]
    svg, _ = curves(lines, title=name)
    texts = ["".join(text.itertext()) for text in ET.fromstring(svg).iter() if "text" in text.tag]
    assert shorten(name, 24) in texts
    assert "<script" not in svg


def test_spread_over_ranks_is_drawn_as_bands():
    mean = series(noise())
    spread = {"mean": mean, "std": series([0.1] * 500), "min": series(noise() - 0.3),
              "max": series(noise() + 0.3)}  # fmt: skip
    svg, notes = curves([Drawn("loss", mean, spread, 0)], title="loss")
    plain, _ = curves([Drawn("loss", mean, None, 0)], title="loss")
    assert svg.count("<path") > plain.count("<path")
    assert any("ranks" in note for note in notes)


def test_step_times():
    found = StepTimes([0.0])
    took = np.random.default_rng(0).lognormal(-2, 0.1, 3000)
    found.add(np.arange(3001), np.concatenate([[0], np.cumsum(took)]) + 5)
    svg, notes = step_histogram([("run", found)])
    ET.fromstring(svg)
    assert any(re.search(r"median \(dashed\) 13\d ms", note) for note in notes)
    svg, _ = step_histogram([("a", found), ("b", found)])
    assert "var(--series-1" in svg
    single = StepTimes([0.0])
    single.add(np.array([0, 1]), np.array([1.0, 1.0]))
    ET.fromstring(step_histogram([("run", single)])[0])


def test_noise_goes_and_the_course_stays():
    random = np.random.default_rng(0)
    course = np.linspace(5, 1, 500)
    smoothed = smooth(table(course + random.normal(0, 0.3, 500)))
    assert np.abs(smoothed - course).max() < 0.3
    assert np.abs(smoothed - course).mean() < 0.1
    # No lag: neither end is above or below.
    assert abs((smoothed - course)[:50].mean()) < 0.15


def test_corners_without_noise_are_left_alone_and_gaps_stay_gaps():
    assert smooth(table(np.minimum(np.arange(200), 50))) is None
    assert smooth(table(np.arange(10))) is None
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
    low, high, log, _ = limits([table(np.logspace(0, -6, 300))])
    assert log, "of many decades"
    assert low < 1e-6
    assert high > 1
