"""Processes that are measured: real ones."""

from __future__ import annotations

import sys
import time

import pytest
from callee import Callee, CalleeError, fresh, last_line, peak_mb

SLEEP = "import time\ndef call(): print('libraries print'); time.sleep(0.01)\n"


def test_calls_are_timed_in_a_process_of_their_own():
    with Callee(sys.executable, SLEEP) as callee:
        assert 0.01 <= callee.typical(3) < 1
        assert 0.01 <= callee.mean(3) < 1
        assert 1 < callee.peak() < 1000


def test_words_and_close(tmp_path):
    code = "def call(): pass\ndef close(): open(words[0], 'w').write('closed')\n"
    callee = Callee(sys.executable, code, str(tmp_path / "said"))
    callee.mean(1)
    callee.end()
    assert (tmp_path / "said").read_text() == "closed"


@pytest.mark.parametrize(
    "code", ["import nothing_of_that_name", "def call(): raise OSError('it broke')"]
)
def test_one_that_fails_says_its_last_line(code):
    with (
        pytest.raises(CalleeError, match=r"nothing_of_that_name|it broke"),
        Callee(sys.executable, code) as callee,
    ):
        callee.typical(1)


def test_fresh_processes_return_numbers():
    took, peak = fresh(sys.executable, "import sys; print(sys.argv[1], peak_mb())", "1.5")
    assert took == 1.5
    assert 1 < peak < 1000
    with pytest.raises(CalleeError, match="ZeroDivisionError"):
        fresh(sys.executable, "1/0")


def test_the_peak_is_of_this_program_alone():
    held = bytearray(60_000_000)
    held[::4096] = b"x" * len(held[::4096])
    assert peak_mb() > 60
    (child,) = fresh(sys.executable, "print(peak_mb())")
    assert child < 50


def test_the_last_line_that_says_anything():
    assert last_line("a\n b \n\n") == "b"
    assert last_line("\n") == ""


def test_a_process_that_does_not_end_is_ended():
    began = time.monotonic()
    callee = Callee(sys.executable, "def call(): pass\n")
    callee.end()
    assert time.monotonic() - began < 30
