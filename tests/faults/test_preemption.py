"""Told to end, a training saves on all ranks at one step and says 75; started again, it goes on."""

import signal
import sys

import pytest
from tests.faults.launches import PROGRAMS, Launch


# In the sandbox of srun no rank 0 is found, because its hosts' names do not resolve.
@pytest.mark.under("hydra")
@pytest.mark.two_ranks
def test_a_preempted_training_saves_and_goes_on(place, tmp_path):
    words = [sys.executable, str(PROGRAMS / "preempted.py"), str(tmp_path / "state")]
    folders = tmp_path / "first", tmp_path / "again"
    for folder in folders:
        folder.mkdir()
    with Launch(place, folders[0], ["--grace", "30"], words) as first:
        first.until((folders[0] / "step-0").exists, "the first step")
        first.process.send_signal(signal.SIGUSR1)  # what --signal-before sends
        assert first.ends(within=30) == 75, first.stderr
        steps = {(folders[0] / f"step-{rank}").read_text() for rank in range(2)}
        assert len(steps) == 1, "every rank stops after the same step"
        first.leaves_nothing()
    with Launch(place, folders[1], [], words) as again:
        assert again.ends(within=60) == 0, again.stderr
        lines = sorted(again.stdout.decode().splitlines())
        begin = int(steps.pop()) + 1
        assert lines == [f"rank {rank} went on at {begin}" for rank in range(2)]
