import math

import pytest

from ezpz_obs._records import to_file_name
from ezpz_obs._report.words import (
    NOTHING,
    clean,
    format_number,
    format_seconds,
    format_tick,
    format_time,
    shorten,
)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0"), (0.25, "0.25"), (1e-7, "1e-07"), (1234567, "1,234,567"), (1e300, "1e+300"),
        (math.inf, "∞"), (math.nan, "NaN"), (None, NOTHING), (-5, "\N{MINUS SIGN}5"),
        (1.23456, "1.235"), (True, "1"), (0.253412, "0.2534"), (123456.7, "123,457"),
    ],
)  # fmt: skip
def test_number(value, said):
    assert format_number(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0 µs"), (1e-6, "1 µs"), (3e-5, "30 µs"), (0.001, "1 ms"), (0.0123, "12.3 ms"),
        (0.5, "500 ms"), (1.5, "1.5 s"), (59.9, "59.9 s"), (60, "1 min"), (3600, "1 h"),
        (4000, "1 h 7 min"), (90_000, "1 d 1 h"), (200_000, "2 d 8 h"), (3599.9, "60 min"),
        (None, NOTHING),
    ],
)  # fmt: skip
def test_seconds(value, said):
    assert format_seconds(value) == said


@pytest.mark.parametrize("value", [None, "x", True, 1e300, math.nan, math.inf, -1e15])
def test_what_is_no_moment(value):
    assert format_time(value) == NOTHING


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "0"), (20_000.0, "20k"), (100_250.0, "100.25k"), (1.5e6, "1.5M"), (800.0, "800"),
     (3e-5, "3e-05"), (0.1 + 0.2, "0.3"), (-0.25, "\N{MINUS SIGN}0.25"), (1e15, "1e+15")],
)  # fmt: skip
def test_ticks_are_what_they_say(value, said):
    assert format_tick(value) == said


@pytest.mark.parametrize(
    "text", ["a\nb", "\x1b[31mred", "\u202eright to left", "\u200fmark", "\x00", "a\u2028b"]
)
def test_what_cannot_be_seen_is_written_out(text):
    assert clean(text).isprintable()
    assert "\\" in clean(text)
    assert clean(clean(text)) == clean(text)


def test_letters_stay_what_they_are_and_both_ends_of_a_long_name_are_shown():
    assert clean("Verlust, 損失, خسارة 🎉") == "Verlust, 損失, خسارة 🎉"
    short = shorten("layer0/" + "x" * 10_000 + "/grad_norm", 60)
    assert len(short) == 60
    assert short.startswith("layer0/")
    assert short.endswith("/grad_norm")


@pytest.mark.parametrize(
    "name", ["a/b", "../../etc/passwd", "A", "loss ", "", ".", "x" * 10_000, "\x00", "損失", "con:"]
)
def test_file_names_are_safe_and_differ(name):
    made = to_file_name("curve", name)
    assert made.isascii()
    assert len(made) < 64
    assert not set(made) - set("abcdefghijklmnopqrstuvwxyz0123456789_-")
    assert made != to_file_name("curve", name + "!")
    assert made != to_file_name("curve", "loss") == "curve-loss"
    assert made.lower() == made, "no two differ in case only"
