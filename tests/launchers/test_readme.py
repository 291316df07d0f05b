"""The Python of every README runs and prints what stands below it; the training script trains."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ezpz_obs

ROOT = Path(__file__).resolve().parents[2]
READMES = sorted(ROOT.glob("packages/*/README.md"))


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


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_the_python_of_a_package(readme, tmp_path):
    code = "\n".join(python_of(readme))
    printed = run([sys.executable, "-c", code], tmp_path)
    for comment in re.findall(r"^print\(.*\n((?:#.*\n)+)", code, re.MULTILINE):
        assert re.sub(r"^# ?", "", comment, flags=re.MULTILINE) in printed
