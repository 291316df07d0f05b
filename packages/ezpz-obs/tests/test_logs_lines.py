import json
import math
from datetime import datetime, timedelta

import numpy as np
import pytest

from ezpz_obs._context import NOW, Place
from ezpz_obs._terminal import Console, Event, json_line, traceback_text

ONE, FOUR = Place(0, 1, "n0"), Place(2, 4, "n0")


def event(text="hello", **fields):
    return Event(20, "info", "train", text, fields)


def read(text="hello", **fields):
    line = json_line(event(text, **fields), FOUR, 1732100000.000001)
    assert line.count(b"\n") == 1
    return json.loads(line)


def test_the_time_is_utc_with_microseconds():
    for seconds, fraction in ((1732100000.0, ".000000"), (1732100000.25, ".250000")):
        stamp = json.loads(json_line(event(), FOUR, seconds))["time"]
        assert stamp == f"2024-11-20T10:53:20{fraction}+00:00"
        assert datetime.fromisoformat(stamp).utcoffset() == timedelta(0)


class Rude:
    def __repr__(self):
        raise RuntimeError("no")


class Loud:
    def __repr__(self):
        return "x" * 10_000


CYCLE = {}
CYCLE["self"] = CYCLE


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
        (2**70, str(2**70)),
        (None, None),
        ([1, (2, math.nan)], [1, [2, "NaN"]]),
        ({1: {"a": math.inf}}, {"1": {"a": "Infinity"}}),
        ({3}, [3]),
        ("\ud800", "\\ud800"),
        (np.float32(0.5), 0.5),
        (np.float64("nan"), "NaN"),
        (np.array(math.nan), "NaN"),
        (np.int64(3), 3),
        (b"raw", "b'raw'"),
        (Rude(), "<Rude, which cannot be shown>"),
        (int, "<class 'int'>"),
    ],
)
def test_what_json_has_no_word_for(value, said):
    assert read(value=value)["value"] == said


def test_what_has_no_end():
    assert "..." in json.dumps(read(value=CYCLE))
    assert len(read(value=Loud())["value"]) < 3000


def test_no_field_hides_what_the_line_says_itself():
    line = read(time=3, level="mine", logger="mine", timestamp=1, exception="e", rank=7, host="n3")
    assert (line["rank"], line["host"], line["level"], line["logger"]) == (2, "n0", "info", "train")
    assert (line["rank_"], line["host_"], line["level_"], line["time_"]) == (7, "n3", "mine", 3)
    assert line["exception_"] == "e"


def test_the_same_rank_is_not_said_twice():
    assert "rank_" not in read(rank=2)


def test_the_step_of_a_summary_is_said_once(monkeypatch):
    monkeypatch.setattr(NOW, "step", 3)
    console = Console(colours=False)
    assert console.line(event("step=3 loss=0.5"), FOUR, 0.0).count("step=3") == 1
    assert console.line(event("saved"), FOUR, 0.0).count("step=3") == 1


@pytest.mark.parametrize("colours", [False, True])
def test_a_line_for_people(colours):
    console = Console(colours=colours)
    alone = console.line(event("saved", path="a b", loss=0.25, rank=3), ONE, 0.0)
    assert alone.endswith("\n")
    assert ("\x1b" in alone) == colours
    if not colours:
        fields = "path='a b' loss=0.25 rank=3"
        assert alone[19:] == f" [info     ] {'saved':30} [train] {fields}\n"
    assert "host" not in alone
    several = console.line(event(), FOUR, 0.0)
    assert "rank" in several
    assert "n0" in several


@pytest.mark.parametrize("colours", [False, True])
def test_what_cannot_be_shown_to_people(colours):
    console = Console(colours=colours)
    line = console.line(event(a=Rude(), b=[Rude()], d="", e="\ud800"), ONE, 0.0)
    assert line.count("cannot be shown") == 2
    assert line.count("\n") == 1


def test_a_value_of_several_lines_takes_one():
    line = Console(colours=False).line(event(a="two\nlines"), ONE, 0.0)
    assert line.endswith(" a='two\\nlines'\n")


def test_a_traceback_takes_lines_of_its_own():
    said = Event(40, "error", None, "failed", {}, exception="Traceback\nE: x", stack="Stack\n  f")
    for colours in (False, True):
        line = Console(colours=colours).line(said, ONE, 0.0)
        assert "\nStack\n  f" in line
        assert line.endswith("\nTraceback\nE: x\n")


def test_a_text_of_several_lines():
    for colours in (False, True):
        line = Console(colours=colours).line(event("[config]:\n- lr=0.1\n- x=2", a=1), FOUR, 0.0)
        first, *rest = line.splitlines()
        assert "train" in first
        assert "a" in first
        assert rest == ["- lr=0.1", "- x=2"]


def test_tracebacks_of_all_that_exc_info_may_be():
    error = ValueError("boom")
    assert traceback_text(error) == "ValueError: boom"
    assert traceback_text((ValueError, error, None)) == "ValueError: boom"
    assert traceback_text(True) is None
    assert traceback_text((None, None, None)) is None
    assert traceback_text(None) is None


def test_an_exception_that_cannot_be_formatted():
    class OddError(Exception):
        def __str__(self):
            raise RuntimeError("no")

    assert "OddError" in traceback_text(OddError())
