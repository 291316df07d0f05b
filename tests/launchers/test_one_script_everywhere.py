"""One unchanged training script under every launcher: the right world, the same loss."""

import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

import ezpz_obs

MODULE = ("-m", "ezpz.examples.minimal", "--epochs", "3")
LAUNCHERS = {
    "python": (1, [sys.executable, *MODULE]),
    "ezpz-launch": (2, ["ezpz-launch", "-n", "2", sys.executable, *MODULE]),
    "mpiexec": (2, ["mpiexec", "-n", "2", sys.executable, *MODULE]),
    "torchrun": (2, ["torchrun", "--nproc-per-node", "2", *MODULE]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run the script once under each launcher; the last record and what was said."""
    scripts = sysconfig.get_path("scripts")
    env = {
        **os.environ, "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1", "NO_COLOR": "1",
    }  # fmt: skip
    done = {}
    for name, (_, words) in LAUNCHERS.items():
        assert shutil.which(words[0], path=env["PATH"]), f"{words[0]} is not in this environment"
        out = tmp_path_factory.mktemp(name)
        process = subprocess.run(
            [*words, "--outdir", str(out)], env=env, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
        done[name] = ezpz_obs.History.read(out)[-1], process.stderr
    return done


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_right_world(runs, launcher):
    size, _ = LAUNCHERS[launcher]
    _, said = runs[launcher]
    assert f"ranks={size}" in said
    assert said.count("ready") == 1, "rank 0 alone speaks"


def test_the_same_loss_on_two_ranks(runs):
    losses = {name: record["loss"] for name, (record, _) in runs.items() if name != "python"}
    assert len(set(losses.values())) == 1, losses


def test_one_rank_learns_as_well(runs):
    one, two = runs["python"][0], runs["ezpz-launch"][0]
    assert one["accuracy"] == pytest.approx(two["accuracy"], abs=0.1)
