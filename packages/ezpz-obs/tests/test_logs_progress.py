import io
import json
import re
import time

import pytest

from ezpz_obs import progress


class Loader:
    """A data loader that counts how often its length is asked for."""

    def __init__(self, size):
        self.size, self.asked, self.opened = size, 0, 0

    def __len__(self):
        self.asked += 1
        if self.size is None:
            raise TypeError("an iterable data set has no len()")
        return self.size

    def __iter__(self):
        self.opened += 1
        yield from range(self.size or 3)


def told(capsys):
    return [line.split("] ", 1)[1] for line in capsys.readouterr().err.splitlines()]


def test_a_line_at_the_end_and_seldom_in_between(capsys):
    assert list(progress(range(5), desc="train", unit="batch")) == list(range(5))
    (line,) = told(capsys)
    assert re.match(r"train: 5 batch, \S+batch/s, done after 0:00:00 +\[progress\]$", line)
    for _ in progress(range(4), every=0.0):
        time.sleep(0.01)
    first, *_, last = told(capsys)
    assert re.match(r"1/4 \(25%\), \S+it/s, 00:00 left", first)
    assert "done after" in last
    assert list(progress([])) == []
    assert list(progress([1, 2, 3], total=1, every=0.0)) == [1, 2, 3], "more than expected"
    assert "done after" in told(capsys)[-1]


def test_a_generator_of_unknown_length(capsys):
    shown = progress((x for x in range(3)), every=0.0)
    with pytest.raises(TypeError, match="a generator without a length; give total="):
        len(shown)
    assert sum(shown) == 3
    assert told(capsys)[0].startswith("1 it, ")


def test_the_length_is_asked_for_once():
    loader = Loader(5)
    shown = progress(loader)
    assert loader.asked == 0
    assert len(shown) == 5
    assert list(shown) == list(shown) == list(range(5))
    assert (loader.asked, loader.opened) == (1, 2)
    unknown = Loader(None)
    assert list(progress(unknown)) == [0, 1, 2]
    assert unknown.asked == 1
    given = Loader(5)
    assert len(progress(given, total=7)) == 7
    list(progress(given, total=7))
    assert given.asked == 0


def test_break_and_exceptions_end_it(capsys):
    closed = []

    def numbers():
        try:
            yield from range(10)
        finally:
            closed.append(True)

    for number in progress(numbers(), total=10):
        if number == 3:
            break
    assert closed == [True]

    def fail():
        for _ in progress(numbers(), total=10):
            1 / 0  # noqa: B018

    with pytest.raises(ZeroDivisionError):
        fail()
    assert closed == [True, True]
    first, second = told(capsys)
    assert first.startswith("3/10 (30%)")
    assert "stopped after" in second


@pytest.mark.usefixtures("rank_1")
def test_other_ranks_iterate_only(capsys):
    loader = Loader(5)
    for expected, number in enumerate(progress(loader, every=0.0)):
        assert number == expected
    assert (loader.asked, loader.opened) == (0, 1)
    assert capsys.readouterr().err == ""


def test_a_terminal_that_shows_json_has_no_bar(monkeypatch):
    class Tty(io.StringIO):
        def isatty(self):
            return True

    stream = Tty()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("EZPZ_LOG_FORMAT", "json")
    assert sum(progress(range(4))) == 6
    assert "done after" in json.loads(stream.getvalue())["event"]


def test_without_a_standard_error(python):
    code = "from ezpz_obs import progress; print(sum(progress(range(4))))"
    assert python(code, shell="2>&-").stdout == "6\n"
