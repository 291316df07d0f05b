import re
import xml.etree.ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest

from ezpz_obs._report.figures import ChartLine, draw_chart, find_y_limits
from ezpz_obs._report.series import Series
from ezpz_obs._report.words import shorten


def make_curve(values):
    return Series(np.arange(len(values)), np.array(values, np.float64)).make_curve()


def line(values, label="loss", color=0, **fields):
    values = np.array(values, np.float64)
    odd = np.flatnonzero(~np.isfinite(values)), np.isnan(values).sum(), np.isinf(values).sum()
    return ChartLine(label, color, make_curve(values), odd, fields.get("spread"))


def noise(count=500):
    return np.random.default_rng(0).normal(1, 0.1, count)


@pytest.mark.parametrize(
    "values",
    [noise(), noise(5000), [1.0], [2.0] * 10, [np.nan] * 30, [1.0, np.nan, 2.0, np.nan],
     [np.inf, -np.inf, 0.0], [1e308, -1e308], [1e-320, 5e-324], [0.0] * 50],
)  # fmt: skip
def test_any_values_can_be_drawn(values):
    svg, _ = draw_chart([line(values)], "loss")
    ET.fromstring(svg)
    assert "nan" not in svg.lower().replace("nan (", "")


def test_what_is_no_number_is_marked_and_noted_and_colors_are_the_pages():
    values = noise()
    values[100:103] = np.nan
    values[200] = np.inf
    before = dict(mpl.rcParams)
    svg, notes = draw_chart([line(values)], "loss")
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
    svg, _ = draw_chart([line(noise(), name), line(noise(), "other", 1)], name)
    texts = ["".join(text.itertext()) for text in ET.fromstring(svg).iter() if "text" in text.tag]
    assert shorten(name, 24) in texts
    assert "<script" not in svg


def test_spread_over_ranks_is_drawn_as_bands():
    parts = {"mean": noise(), "std": [0.1] * 500, "min": noise() - 0.3, "max": noise() + 0.3}
    spread = {name: make_curve(values) for name, values in parts.items()}
    svg, notes = draw_chart([line(noise(), spread=spread)], "loss")
    plain, _ = draw_chart([line(noise())], "loss")
    assert svg.count("<path") > plain.count("<path")
    assert any("ranks" in note for note in notes)


def test_one_outlier_does_not_hide_the_rest():
    values = np.random.default_rng(0).normal(1, 0.1, 500)
    values[77] = 1e9
    low, high, is_log, has_outliers = find_y_limits([line(values)])
    assert (is_log, has_outliers) == (False, True)
    assert high < 10
    assert low < 1 < high
    low, high, is_log, _ = find_y_limits([line(np.logspace(0, -6, 300))])
    assert is_log, "of many decades"
    assert low < 1e-6
    assert high > 1
