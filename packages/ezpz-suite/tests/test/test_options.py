"""Which words are ours, and what they mean."""

import re

import pytest

from ezpz._test.command import OPTIONS, Settings, UsageError, closest, parse, take


@pytest.mark.parametrize(
    ("words", "ours", "others"),
    [
        ([], [], []),
        (["--tp=2", "-n", "4"], ["--tp=2"], ["-n", "4"]),
        (["-n", "4", "--tp", "2", "--json", "--tee"], ["--tp=2", "--json"], ["-n", "4", "--tee"]),
        (["--outdir=a=b"], ["--outdir=a=b"], []),
    ],
)  # fmt: skip
def test_words_are_parted(words, ours, others):
    assert take(words) == (ours, others)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tp"], "--tp needs a value; expected --tp=N"),
        (["--tp", "--pp=2"], "--tp needs a value"),
        (["--tp="], "--tp= is empty"),
        (["--tp=1", "--tp", "2"], "--tp is given twice"),
        (["--json=yes"], "--json=yes: --json takes no value"),
    ],
)
def test_words_that_make_no_sense(words, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        take(words)


def test_a_misspelt_option_is_guessed():
    assert closest("--step=4") == "--steps"
    assert closest("--nprocs") == "--pairs"
    assert closest("--nprocs", ["--nproc"]) == "--nproc"
    assert closest("--zzz") == ""


def test_every_option_is_a_setting():
    assert {option.name for option in OPTIONS} == set(Settings.__dataclass_fields__)


def test_settings_and_words_are_the_same():
    assert parse([]) == Settings()
    assert Settings().words() == []
    every = Settings(
        tp=2, pp=2, cp=4, wrap="fsdp2", steps=10, batch=4, seq=64, layers=2, dim=64, dtype="bf16",
        seed=0, sizes=(4096, 1 << 20), pairs=True, json=True, outdir="2024",
    )  # fmt: skip
    assert all(value != getattr(Settings, name) for name, value in vars(every).items())
    assert parse(every.words()) == every
    assert parse(Settings(sizes=()).words()).sizes == ()


def test_sizes_are_bytes_in_order():
    assert parse(["--sizes=1M,4K,4096,2G"]).sizes == (4096, 1 << 20, 2 << 30)
    assert parse(["--sizes=1024"]).sizes == (1024,)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--tp=0", "--tp=0; expected a whole number, 1 or more"),
        ("--tp=two", "--tp=two; expected a whole number"),
        ("--tp=1.5", "--tp=1.5; expected a whole number"),
        ("--seq=0", "--seq=0; expected"),
        ("--steps=3", "--steps=3; expected a whole number, 4 or more"),
        ("--seed=-1", "--seed=-1; expected a whole number, 0 or more"),
        ("--seed=9999999999", "--seed=9999999999; expected a whole number"),
        ("--wrap=dpp", "--wrap=dpp; expected one of auto, ddp, fsdp, fsdp2"),
        ("--dtype=fp8", "--dtype=fp8; expected fp32 or bf16"),
        ("--sizes=4K,x", "'x'; expected sizes in bytes such as 4K,1M,64M"),
        ("--sizes=5", "expected a multiple of 4 bytes"),
        ("--sizes=0", "expected a multiple of 4 bytes"),
        ("--sizes=K", "'K'; expected sizes"),
    ],
)
def test_values_that_make_no_sense(word, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        parse([word])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pp=2", "--wrap=ddp"], "--wrap=ddp with --pp=2; expected none or fsdp2"),
        (["--pp=3"], "--batch=8 with --pp=3; expected a multiple of 3"),
        (["--tp=2", "--wrap=fsdp"], "--wrap=fsdp with --tp=2; expected fsdp2"),
        (["--cp=2", "--wrap=deepspeed"], "--wrap=deepspeed with --cp=2; expected ddp"),
    ],
)
def test_options_that_do_not_go_together(words, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        parse(words)
