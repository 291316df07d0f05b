"""Processes that are measured: real ones."""

import subprocess
import sys

import pytest
from callee import Callee, CalleeError, fresh, peak_mb

SLEEP = """
import sys, time
def call():
    sys.stderr.write('x' * 300_000)
    print('libraries print much' * 20_000)
    time.sleep(0.01)
"""


def test_calls_are_timed_in_a_process_of_their_own():
    with Callee(sys.executable, SLEEP) as callee:
        assert 0.01 <= callee.typical(3) < 60
        assert 0.01 <= callee.mean(3) < 60
        assert 1 < callee.peak() < 1000
    # Memory that is held before does not count.
    code = "held = bytearray(40_000_000); held[::4096] = b'x' * len(held[::4096])\n"
    with Callee(sys.executable, f"{code}before = peak_mb()\ndef call(): pass\n") as callee:
        assert callee.peak() < 20


def test_fresh_processes_return_numbers_and_a_peak_of_their_own():
    held = bytearray(60_000_000)
    held[::4096] = b"x" * len(held[::4096])
    took, peak = fresh(sys.executable, "import sys; print(sys.argv[1], peak_mb())", "1.5")
    assert took == 1.5
    assert 1 < peak < 50
    assert peak_mb() > 60
    with pytest.raises(CalleeError, match="ZeroDivisionError"):
        fresh(sys.executable, "1/0")


def test_what_is_measured_pays_for_its_own_imports():
    """Nothing is loaded before it, and the benchmarks' folder is not on its path."""
    code = "import sys\nfor name in sys.modules: print(sum(map(ord, name)))"
    words = [sys.executable, "-W", "ignore", "-c", code]
    bare = subprocess.run(words, capture_output=True, check=True)
    before = {float(word) for word in bare.stdout.split()}
    assert set(fresh(sys.executable, code)) - before == {float(sum(map(ord, "time")))} - before
    for run in (fresh, lambda *words: Callee(*words).end()):
        with pytest.raises(CalleeError, match="No module named 'paired'"):
            run(sys.executable, "import paired")
