"""One unchanged script under every launcher: the right world, the same loss."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import ezpz_obs

ROOT = Path(__file__).resolve().parents[2]
MODULE = ("-m", "ezpz.examples.minimal", "--epochs", "3")
LAUNCHERS = {
    "python": (1, [sys.executable, *MODULE]),
    "ezpz-launch": (2, ["ezpz-launch", "-n", "2", sys.executable, *MODULE]),
    "mpiexec": (2, ["mpiexec", "-n", "2", sys.executable, *MODULE]),
    "torchrun": (2, ["torchrun", "--nproc-per-node", "2", *MODULE]),
}


def start(words, cwd=None, **variables):
    """Run a command of this environment to its end, whatever that is."""
    scripts = sysconfig.get_path("scripts")
    env = {
        **os.environ, "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **variables,
    }  # fmt: skip
    assert shutil.which(words[0], path=env["PATH"]), f"{words[0]} is not in this environment"
    return subprocess.run(
        words, env=env, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def run(words, cwd=None, **variables):
    process = start(words, cwd, **variables)
    assert process.returncode == 0, process.stderr
    return process.stderr


@pytest.mark.slow
def test_the_right_world_and_the_same_loss_under_every_launcher(tmp_path):
    last = {}
    for name, (size, words) in LAUNCHERS.items():
        said = run([*words, "--outdir", str(tmp_path / name)])
        assert f"ranks={size}" in said
        assert said.count("ready") == 1, "rank 0 alone speaks"
        last[name] = ezpz_obs.History.read(tmp_path / name)[-1]
    losses = {name: record["loss"] for name, record in last.items() if name != "python"}
    assert len(set(losses.values())) == 1, losses
    one, two = last["python"], last["ezpz-launch"]
    assert one["accuracy"] == pytest.approx(two["accuracy"], abs=0.1), "one rank learns as well"
