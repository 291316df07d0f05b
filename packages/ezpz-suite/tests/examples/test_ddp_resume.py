"""Killed, told to end, started again: the run comes to the end that it would have come to."""

import pytest

from .conftest import curve

pytest.importorskip("sklearn", reason="the digits come with scikit-learn: ezpz-suite[examples]")

# The example, in which a signal comes to rank 1 at a step.
SCRIPT = """
import os, signal
import ezpz
from ezpz.examples import ddp_resume

class Interrupted(ezpz.SnapshotOnSignal):
    def step(self, step):
        if step == {step} and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.{signal})
        super().step(step)

ezpz.SnapshotOnSignal = Interrupted
ddp_resume.train(ddp_resume.Settings(epochs=5, save_every=15, outdir={folder!r}))
"""


@pytest.mark.slow
def test_killed_and_preempted_it_ends_with_the_same_curve(ranks, tmp_path):
    def train(name, step=0, signal="SIGUSR1"):
        script = SCRIPT.format(step=step, signal=signal, folder=str(tmp_path / name))
        done = ranks(2, script, check=False)
        return [one.status for one in done], done[0].err

    statuses, said = train("undisturbed")
    assert statuses == [0, 0], said

    statuses, said = train("disturbed", step=40, signal="SIGKILL")
    assert statuses[1] == -9, said
    statuses, said = train("disturbed", step=75)
    assert "from_step=30" in said, "the checkpoint before the kill"
    assert statuses == [75, 75], said
    stopped_at = curve(tmp_path / "disturbed", "loss")[-1][0]
    statuses, said = train("disturbed")
    assert f"from_step={stopped_at}" in said
    assert statuses == [0, 0], said

    expected = curve(tmp_path / "undisturbed", "loss/mean")
    assert len(expected) == 5 * 23
    assert dict(curve(tmp_path / "disturbed", "loss/mean")) == dict(expected), "bit for bit"
