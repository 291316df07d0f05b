"""Killed, told to end, started again: the run comes to the end that it would have come to."""

import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from .conftest import PATIENCE, curve, records

pytest.importorskip("sklearn", reason="the digits come with scikit-learn: ezpz-suite[examples]")

# The example, which waits at two steps: at one to be killed, at the other for its signal.
WAITING = """
import os, signal, threading
import ezpz
from ezpz.examples import _settings, ddp_resume

class Waiting(ezpz.SnapshotOnSignal):
    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        told = self.told = threading.Event()
        for number in (signal.SIGUSR1, signal.SIGTERM):
            def both(*given, first=signal.getsignal(number)):
                first(*given)
                told.set()
            signal.signal(number, both)

    def step(self, step):
        if (os.environ["EZPZ_ATTEMPT"], step) in (("0", 40), ("1", 75)):
            self.told.wait()
        super().step(step)

ezpz.SnapshotOnSignal = Waiting
_settings.main(ddp_resume.Settings, ddp_resume.train)
"""


def wait_for(folder, process, is_there):
    """Wait until a line of the metrics is as wanted."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            lines = records(folder)
        except (FileNotFoundError, ValueError):  # nor is the last line whole at every moment
            lines = []
        if lines and is_there(lines):
            return
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it does not get on"
        time.sleep(0.005)


def rank_1(folder):
    """Return the process of rank 1 that writes to a folder."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes()
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        is_example = b"waiting.py" in words and os.fsencode(folder) in words
        if is_example and b"RANK=1" in variables:
            return int(entry.name)
    raise AssertionError("rank 1 is not there")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds ranks in /proc")
def test_killed_and_preempted_it_ends_with_the_same_curve(start, ranks, tmp_path):
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    ranks(
        2,
        f"""
        from ezpz.examples.ddp_resume import Settings, train
        train(Settings(epochs=24, save_every=15, outdir={str(undisturbed)!r}))
        """,
    )

    # Rank 1 is killed without a word: ezpz-launch starts all again, from the last checkpoint.
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    words = ["--epochs=24", "--save_every=15", f"--outdir={disturbed}"]
    job = ["-n", "2", "--retries", "1", sys.executable, str(script), *words]
    second = start(*job)
    wait_for(disturbed, second, lambda lines: lines[-1]["step"] >= 35)
    os.kill(rank_1(disturbed), signal.SIGKILL)
    # That one is told that its time is up: it saves where it is, and asks to be started again.
    wait_for(disturbed, second, lambda lines: attempt_of(lines) == 1 and lines[-1]["step"] >= 70)
    second.send_signal(signal.SIGUSR1)
    _, said = second.communicate(timeout=PATIENCE)
    assert second.returncode == 75, said
    assert "from_step=30" in said, "the checkpoint before the kill"
    stopped_at = records(disturbed)[-1]["step"]
    assert 70 <= stopped_at < 552

    third = start(*job)
    _, said = third.communicate(timeout=PATIENCE)
    assert third.returncode == 0, said
    assert f"from_step={stopped_at}" in said

    expected = curve(undisturbed, "loss/mean")
    assert len(expected) == 552
    assert dict(curve(disturbed, "loss/mean")) == dict(expected), "bit for bit"


def attempt_of(lines):
    """Return how often the steps went back."""
    steps = [one["step"] for one in lines]
    return sum(after <= before for before, after in pairwise(steps))
