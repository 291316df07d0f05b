"""The minimal script that people were shown runs as it stands: on one rank, and on several."""

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import PATIENCE

SCRIPT = Path(__file__).with_name("talk.py")


def check(said, wrapper):
    (line,) = [one for one in said.splitlines() if one.startswith("FINAL")]
    _, found, first, last = line.split()
    assert found == wrapper
    assert float(last) < 0.7 * float(first)
    assert "dataset=" in said


def test_one_rank_as_it_stands(clean_env, tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT], env=clean_env, cwd=tmp_path, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check(done.stdout + done.stderr, "Autoencoder")


@pytest.mark.parametrize("wrap", ["", "ezpz"], ids=["without-device_ids", "wrap_model"])
def test_two_ranks(ranks, tmp_path, wrap):
    script = f"""
    import atexit, runpy
    os.environ.update(WANDB_DISABLED="1", WRAP={wrap!r})
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
    atexit._run_exitfuncs()
    """
    done = ranks(2, script, check=False, cwd=tmp_path)
    said = "".join(out + err for _, out, err in done)
    assert [status for status, _, _ in done] == [0, 0], said
    check(said, "DistributedDataParallel")
