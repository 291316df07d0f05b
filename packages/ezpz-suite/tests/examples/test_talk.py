"""The minimal script that people were shown runs as it stands: on one rank, and on several."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("talk.py")


@pytest.mark.parametrize(
    ("n", "more", "wrapper"),
    [
        (1, {}, "Autoencoder"),
        (2, {"WANDB_DISABLED": "1"}, "DistributedDataParallel"),
    ],
)
def test_the_script_runs_and_learns(ranks, tmp_path, n, more, wrapper):
    done = ranks(n, "", check=False, cwd=tmp_path, program=SCRIPT, env=more)
    said = "".join(out + err for _, out, err in done)
    (line,) = [one for one in said.splitlines() if one.startswith("FINAL")]
    _, found, first, last = line.split()
    assert found == wrapper
    assert float(last) < 0.7 * float(first)
    assert "dataset=" in said
