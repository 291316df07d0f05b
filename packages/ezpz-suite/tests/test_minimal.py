"""The example trains on real data, in a process of its own."""

import os
import subprocess
import sys

import pytest

import ezpz_obs

pytest.importorskip("sklearn", reason="the digits come with scikit-learn: ezpz-suite[examples]")


def run(*words, env=None, **kwargs):
    clean = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    return subprocess.run(
        [sys.executable, "-m", "ezpz.examples.minimal", *words],
        env={**clean, "NO_COLOR": "1", **(env or {})},
        capture_output=True, text=True, timeout=120, check=False, **kwargs,
    )  # fmt: skip


def test_one_rank_learns_the_digits(tmp_path):
    done = run("--outdir", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "out" / "metrics.jsonl") in done.stderr
    records = ezpz_obs.History.read(tmp_path / "out")
    assert [record["epoch"] for record in records] == list(range(12))
    assert records[-1]["accuracy"] >= 0.95
    assert records[-1]["loss"] < records[0]["loss"] / 10


def test_the_folder_it_chooses_is_named(tmp_path):
    done = run("--epochs", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs").iterdir()
    assert f"outputs/{folder.name}/metrics.jsonl" in done.stderr


@pytest.mark.parametrize("words", [["--epoch=2"], ["--epochs=0"], ["--epochs=two"], ["3", "x"]])
def test_bad_settings_are_refused_before_anything_is_done(tmp_path, words):
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_half_set_environment_is_one_line(tmp_path):
    done = run(env={"RANK": "1"}, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("minimal: half-set torchrun environment: RANK=1 without")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
