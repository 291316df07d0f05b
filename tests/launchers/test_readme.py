"""The training script of the README trains; tests/docs runs the blocks of all pages."""

import re
import subprocess
import sys
from pathlib import Path

import ezpz_obs

ROOT = Path(__file__).resolve().parents[2]


def python_of(readme):
    return re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)


def run(words, folder):
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_twelve_lines_train(tmp_path):
    (script,) = python_of(ROOT / "README.md")
    assert len([line for line in script.splitlines() if line.strip()]) == 12
    (tmp_path / "train.py").write_text(script)
    run([sys.executable, "-m", "ezpz_launch", "-n", "2", sys.executable, "train.py"], tmp_path)
    losses = [record["loss"] for record in ezpz_obs.History.read(tmp_path / "outputs" / "readme")]
    assert len(losses) == 200
    assert losses[-1] < losses[0] / 10
