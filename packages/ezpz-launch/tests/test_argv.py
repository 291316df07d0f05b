import sys

import pytest

from ezpz_launch import UsageError
from ezpz_launch._options import OPTIONS, split

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


@pytest.mark.parametrize(
    ("code", "run"),
    [
        ("'import os; os.getpid()'", "import os; os.getpid()"),  # as quotes within quotes arrive
        ('"print(1)"', "print(1)"),
        ("print('x')", "print('x')"),
        ("'a' in 'banana' or exit('b')", "'a' in 'banana' or exit('b')"),
        ("'a' + f('b')", "'a' + f('b')"),
        ("'a' 'b'", "'a' 'b'"),
        ("'a\\nb'", "'a\\nb'"),
        ("'", "'"),
        ("", ""),
    ],
)
def test_quotes_around_the_whole_code_are_taken_off(code, run):
    assert split(["-c", code, "'x'"]) == ({}, (sys.executable, "-c", run, "'x'"))


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


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("-np", "-n"),
        ("-np=2", "-n"),
        ("--np", "-n"),
        ("--ntasks=2", "-n"),
        ("-ppn", "--ppn"),
        ("--nproc-per-node", "--ppn"),
        ("--nproc_per_node=2", "--ppn"),
        ("--ntasks-per-node", "--ppn"),
        ("--nnodes", "-N"),
        ("-nodes", "--nodes"),
        ("-machine", "--machine"),
        ("-env", "--env"),
        ("-hostfile", "--hostfile"),
        ("-f", "--hostfile"),
    ],
)
def test_habits_of_other_launchers_are_told_ours(word, meant):
    with pytest.raises(UsageError) as caught:
        split([word, "2", "true"])
    assert f"unknown option {word!r}; did you mean {meant}? " in str(caught.value)


def test_letters_attached_to_a_number_are_no_number():
    with pytest.raises(UsageError, match="unknown option '-nfour'"):
        split(["-nfour", "true"])


def test_the_option_surface_is_frozen():
    surface = [(option.name, option.short, option.value, option.many) for option in OPTIONS]
    assert surface == [
        ("nproc", "n", "N", False),
        ("ppn", "", "N", False),
        ("nodes", "N", "N", False),
        ("hostfile", "", "FILE", False),
        ("include", "", "LIST", False),
        ("exclude", "", "LIST", False),
        ("launcher", "", "KIND", False),
        ("machine", "", "NAME", False),
        ("option", "", "NAME", True),
        ("cpu-bind", "", "LIST", False),
        ("env", "", "K=V", True),
        ("one-device", "", "", False),
        ("log-dir", "", "DIR", False),
        ("tee", "", "", False),
        ("only-ranks", "", "LIST", False),
        ("prefix", "", "", False),
        ("idle-timeout", "", "TIME", False),
        ("grace", "", "TIME", False),
        ("signal-before", "", "TIME", False),
        ("retries", "", "N", False),
        ("nested", "", "", False),
        ("launcher-args", "", "TEXT", False),
        ("module", "m", "MODULE", False),
        ("code", "c", "CODE", False),
        ("dry-run", "", "", False),
        ("json", "", "", False),
        ("version", "", "", False),
        ("help", "h", "", False),
    ]


def test_help_lines_fit_the_screen():
    assert max(len(option.help) for option in OPTIONS) <= 70
