"""The command ``ezpz test``: what its words mean, what it refuses, and what it launches."""

import json

import pytest

from ezpz._test.command import Settings, main, parse, take

SMALL = ("--steps=6", "--layers=1", "--dim=64", "--seq=32", "--batch=4", "--sizes=4K")
SPAWN = ("--launcher", "spawn")


@pytest.mark.slow
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


def test_a_dry_run_says_what_would_be_started(ezpz):
    done = ezpz("test", *SPAWN, "-n", "2", "--tp", "2", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    assert planned["nproc"] == 2
    assert planned["argv"][-4:] == ["-m", "ezpz.test_dist", "--tp=2", "--json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "0"], "-n 0: expected at least 1 rank\n"),
        (["--stps=3"], "unknown option '--stps=3'; did you mean --steps?"),
        (["--nprokz", "2"], "unknown option '--nprokz'; did you mean --nproc"),
        (["python", "train.py"], "'python train.py' has a command in it; expected options only"),
        (["--tp"], "--tp needs a value; expected --tp=N"),
        (["--tp="], "--tp= is empty"),
        (["--tp=1", "--tp", "2"], "--tp is given twice"),
        (["--json=yes"], "--json=yes: --json takes no value"),
        (["--tp=0"], "--tp=0; expected a whole number, 1 or more"),
        (["--steps=3"], "--steps=3; expected a whole number, 4 or more"),
        (["--wrap=dpp"], "--wrap=dpp; expected one of auto, ddp, fsdp2"),
        (["--dtype=fp8"], "--dtype=fp8; expected fp32 or bf16"),
        (["--sizes=4K,x"], "'x'; expected sizes in bytes such as 4K,1M,64M"),
        (["--sizes=5"], "expected a multiple of 4 bytes"),
        (["--pp=2", "--wrap=ddp"], "--wrap=ddp with --pp=2; expected none or fsdp2"),
        (["--pp=3"], "--batch=8 with --pp=3; expected a multiple of 3"),
    ],
)
def test_words_are_refused_before_anything_is_started(words, said, capfd):
    assert main(words) == 2
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith("ezpz-launch: " if words[0] == "-n" else "ezpz test: ")
    assert said in err


def test_the_page_of_help_has_every_option(capfd):
    assert main(["--tp=2", "--help"]) == 0
    page = capfd.readouterr().out
    assert all(f"\n  --{name}" in page for name in Settings.__dataclass_fields__)
    assert max(map(len, page.splitlines())) <= 94
    assert "examples:" in page
    assert "exit status:" in page


def test_words_are_parted():
    assert take([]) == ([], [])
    words = ["-n", "4", "--tp", "2", "--json", "--tee"]
    assert take(words) == (["--tp=2", "--json"], ["-n", "4", "--tee"])
    assert take(["--outdir=a=b", "--tp=2"]) == (["--outdir=a=b", "--tp=2"], [])


def test_words_become_settings():
    assert parse([]) == Settings()
    words = ["--tp=2", "--wrap=fsdp2", "--seed=0", "--sizes=4K,1M", "--pairs", "--outdir=2024"]
    found = Settings(tp=2, wrap="fsdp2", seed=0, sizes=(4096, 1 << 20), pairs=True, outdir="2024")
    assert parse(words) == found
    assert parse(["--sizes=none"]).sizes == ()
    assert parse(["--sizes=1M,4K,4096,2G"]).sizes == (4096, 1 << 20, 2 << 30)
