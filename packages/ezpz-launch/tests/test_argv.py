import sys

import pytest

from ezpz_launch import UsageError
from ezpz_launch._argv import OPTIONS, split

USER = ["python", "train.py", "--lr", "1e-4", "-n", "5", "--help", "--", "--x", "a b", ""]


@pytest.mark.parametrize(
    ("ours", "options"),
    [
        ([], {}),
        (["-n", "2"], {"nproc": "2"}),
        (["-n2"], {"nproc": "2"}),
        (["-n=2"], {"nproc": "2"}),
        (["--nproc", "2", "--dry-run"], {"nproc": "2", "dry-run": True}),
        (["--nproc=2"], {"nproc": "2"}),
    ],
)
@pytest.mark.parametrize("separator", [[], ["--"]])
def test_the_users_words_are_untouched(ours, options, separator):
    assert split([*ours, *separator, *USER]) == (options, tuple(USER))


def test_what_can_be_repeated_is_a_list():
    words = ["--env", "A=1", "--env=B= 2", "-n", "2", "true"]
    assert split(words) == ({"env": ["A=1", "B= 2"], "nproc": "2"}, ("true",))


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["-m", "train", "--lr", "1", "-n", "5"], ("-m", "train", "--lr", "1", "-n", "5")),
        (["-c", "print(1)", "x"], ("-c", "print(1)", "x")),
        (["--module=train", "--", "x"], ("-m", "train", "--", "x")),
    ],
)
def test_modules_and_code_are_run_by_this_python(words, command):
    assert split(["-n", "2", *words]) == ({"nproc": "2"}, (sys.executable, *command))


def test_only_the_first_separator_is_ours():
    assert split(["--", "--", "x"]) == ({}, ("--", "x"))


def test_no_words():
    assert split([]) == ({}, ())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nprocs", "2", "true"], r"unknown option '--nprocs'; did you mean --nproc\?"),
        (["--zzz", "true"], "unknown option '--zzz'; see ezpz-launch --help"),
        (["-x", "true"], "unknown option '-x'"),
        (["-n"], "-n needs a value; expected -n N"),
        (["-n", "--", "true"], "-n needs a value"),
        (["-n", "1", "--nproc", "2", "true"], "--nproc is given twice"),
        (["--dry-run=yes", "true"], "--dry-run takes no value"),
    ],
)
def test_bad_options(words, message):
    with pytest.raises(UsageError, match=message):
        split(words)


def test_the_option_surface_is_frozen():
    assert [(option.name, option.short, option.value) for option in OPTIONS] == [
        ("nproc", "n", "N"),
        ("ppn", "", "N"),
        ("nodes", "N", "N"),
        ("hostfile", "", "FILE"),
        ("include", "", "LIST"),
        ("exclude", "", "LIST"),
        ("launcher", "", "KIND"),
        ("machine", "", "NAME"),
        ("cpu-bind", "", "LIST"),
        ("env", "", "K=V"),
        ("launcher-args", "", "TEXT"),
        ("module", "m", "MODULE"),
        ("code", "c", "CODE"),
        ("dry-run", "", ""),
        ("json", "", ""),
        ("version", "", ""),
        ("help", "h", ""),
    ]
