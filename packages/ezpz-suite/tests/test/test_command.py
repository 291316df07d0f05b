"""The command ``ezpz test``: what it launches, and what it refuses before."""

import json
import signal
import subprocess
import sys

import pytest

from ezpz._test.command import OPTIONS, help_page, main

SMALL = ("--steps=6", "--layers=1", "--dim=64", "--seq=32", "--batch=4", "--sizes=4K")
SPAWN = ("--launcher", "spawn")


@pytest.fixture
def ezpz(clean_env, tmp_path):
    def run(*words, module="ezpz", **kwargs):
        return subprocess.run(
            [sys.executable, "-m", module, *words],
            env=clean_env, capture_output=True, text=True, timeout=120, check=False,
            cwd=tmp_path, **kwargs,
        )  # fmt: skip

    return run


def test_two_ranks_are_launched_and_what_they_found_is_printed(ezpz, tmp_path):
    done = ezpz("test", *SPAWN, "-n", "2", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ok"], found["ranks"], found["wrap"]) == (True, 2, "ddp")
    assert [one["bytes"] for one in found["all_reduce"]] == [4096]
    assert "step=0 loss=" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state", "tmp"]
    # torch's own cache is there as soon as DDP is.
    left = {path.name.partition("_")[0] for path in (tmp_path / "tmp").iterdir()}
    assert left <= {"torchinductor"}


def test_the_module_is_the_same_without_the_command(ezpz):
    done = ezpz(*SMALL, module="ezpz.test_dist")
    assert done.returncode == 0, done.stderr
    assert "1 on 1 node: cpu, gloo" in done.stdout
    assert "ok: the loss fell" in done.stdout


def test_a_dry_run_says_what_would_be_started(ezpz):
    done = ezpz("test", *SPAWN, "-n", "2", "--tp", "2", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    assert planned["nproc"] == 2
    assert planned["argv"][-4:] == ["-m", "ezpz.test_dist", "--tp=2", "--json"]


KILLED = """
import os, signal
if os.environ.get("RANK") == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_is_killed_is_the_launchers_to_report(ezpz, clean_env, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(KILLED)
    clean_env["PYTHONPATH"] = str(tmp_path)
    done = ezpz("test", *SPAWN, "-n", "2", *SMALL)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 on" in done.stderr
    assert "first of all ranks" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stps=3"], "unknown option '--stps=3'; did you mean --steps?"),
        (["--zzz"], "unknown option '--zzz'; see ezpz test --help"),
        (["--nprocs", "2"], "unknown option '--nprocs'; did you mean --nproc?"),
        (["python", "train.py"], "'python train.py' has a command in it; expected options only"),
        (["-m", "train"], "'-m train' has a command in it"),
        (["--tp=x"], "--tp=x; expected a whole number, 1 or more"),
        (["--tp"], "--tp needs a value"),
    ],
)
def test_words_are_refused_before_anything_is_started(words, said, capfd):
    assert main(words) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("ezpz test: ")
    assert said in err
    assert len(err.splitlines()) == 1


def test_what_the_launcher_refuses_it_says_itself(capfd):
    assert main(["-n", "0"]) == 2
    assert capfd.readouterr().err == "ezpz-launch: -n 0: expected at least 1 rank\n"


def test_the_page_of_help_has_every_option(capfd):
    assert main(["--tp=2", "--help"]) == 0
    page = capfd.readouterr().out
    assert page == help_page() + "\n"
    assert all(f"\n  --{option.name}" in page for option in OPTIONS)
    assert max(map(len, page.splitlines())) <= 94
    assert "examples:" in page
    assert "exit status:" in page
