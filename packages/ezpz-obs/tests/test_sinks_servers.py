"""Servers that never answer: training goes on, and its end takes ten seconds at most."""

import importlib.util
import os
import subprocess
import sys
import time

import pytest

from ezpz_obs import History

TRAIN = """
import logging, time
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from ezpz_obs import History
history = History("run", sinks=["wandb", "mlflow", "csv"])
for step in range(200):
    history.record({"loss": step})
began = time.monotonic()
history.close()
print("closed", time.monotonic() - began, flush=True)
"""
PROMISED, BUSY = 10.0, 10.0
"""Seconds that sinks take at most at the end of training, and what a busy machine adds."""
MISSING = [name for name in ("wandb", "mlflow") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")
@pytest.mark.parametrize("hanging", ["", "file_stream"], ids=["at once", "later"])
def test_a_server_that_never_answers(server, tmp_path, hanging):
    server.hangs_at = lambda path, name: hanging in path or "mlflow" in path
    env = {
        "HOME": str(tmp_path), "WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40,
        "MLFLOW_TRACKING_URI": server.url,
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", TRAIN], cwd=tmp_path, env={**os.environ, **env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        word, seconds = process.stdout.readline().split()
        closed = time.monotonic()
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert (word, float(seconds) < PROMISED + BUSY) == ("closed", True)
    assert time.monotonic() - closed < PROMISED + BUSY
    assert len(History.read(tmp_path / "run")) == 200
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 201
    said = [line for line in errors.splitlines() if "sink mlflow" in line]
    assert len(said) == 1, errors
    assert f"ezpz-obs replay {tmp_path / 'run'} --to=mlflow" in said[0]
