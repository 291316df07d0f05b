import math

import pytest

from ezpz_obs._report.words import NOTHING, compact, moment, number, seconds, tick_labels


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0"), (0.25, "0.25"), (1e-7, "1e-07"), (1234567, "1,234,567"), (1e300, "1e+300"),
        (math.inf, "∞"), (math.nan, "NaN"), (None, NOTHING), (-5, "\N{MINUS SIGN}5"),
        (1.23456, "1.235"), (True, "1"),
    ],
)  # fmt: skip
def test_number(value, said):
    assert number(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0 µs"), (1e-6, "1 µs"), (0.001, "1 ms"), (0.5, "500 ms"), (59.9, "59.9 s"),
        (60, "1 min"), (3600, "1 h"), (90_000, "1 d 1 h"), (3599.9, "60 min"), (None, NOTHING),
    ],
)  # fmt: skip
def test_seconds(value, said):
    assert seconds(value) == said


@pytest.mark.parametrize("value", [None, "x", True, 1e300, math.nan, math.inf, -1e15])
def test_what_is_no_moment(value):
    assert moment(value) == NOTHING


@pytest.mark.parametrize(
    "ticks",
    [[100_000.0, 100_250.0, 100_500.0], [0.0, 1e-9], [1e15, 2e15], [0.0, 5000.0, 15000.0],
     [-1.0, 0.0, 1.0], [9999.0, 10000.0], [1e-300, 1e300], [0.25], [0.0], []],
)  # fmt: skip
def test_ticks_are_what_they_say(ticks):
    labels = tick_labels(ticks)
    assert len(set(labels)) == len(ticks)
    units = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    for tick, label in zip(ticks, labels, strict=True):
        plain = label.replace("\N{MINUS SIGN}", "-")
        read = float(plain.rstrip("kMGT")) * units.get(plain[-1], 1)
        assert read == pytest.approx(tick, rel=1e-2)


def test_compact_has_no_more_than_it_needs():
    assert [compact(v, 1) for v in (0.0, 20_000, 1e6, 800)] == ["0", "20k", "1M", "800"]
