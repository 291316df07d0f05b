"""The table of options: split, read, checked, hinted at, and shown on the page of --help."""

import dataclasses
import shlex
import sys

import pytest

from ezpz_launch import LaunchError, Request, UsageError, split
from ezpz_launch._cli import EXAMPLES, USAGE, help_page
from ezpz_launch._job.submit import SUBMIT_OPTIONS
from ezpz_launch._plan.options import OPTIONS, build_request, list_settings

USER = ["python", "train.py", "--lr", "1e-4", "-n", "5", "--help", "--", "--x", "a b", ""]


def requested(*words):
    return build_request(*split([*words, "true"]))


@pytest.mark.parametrize(("words", "options", "command"), [
    *(
        ([*ours, *separator, *USER], options, USER)
        for separator in ([], ["--"])
        for ours, options in (
            ([], {}),
            (["-n", "2"], {"nproc": "2"}),
            (["-n2"], {"nproc": "2"}),
            (["-n=2"], {"nproc": "2"}),
            (["--nproc=2", "--dry-run"], {"nproc": "2", "dry-run": True}),
        )
    ),
    ([], {}, []),
    (["--", "--", "x"], {}, ["--", "x"]),
    (["--env", "A=1", "--env=B= 2", "x"], {"env": ["A=1", "B= 2"]}, ["x"]),
    (["-m", "train", "-n", "5"], {}, [sys.executable, "-m", "train", "-n", "5"]),
    (["--module=train", "--", "x"], {}, [sys.executable, "-m", "train", "--", "x"]),
])  # fmt: skip
def test_the_users_words_are_untouched(words, options, command):
    assert split(words) == (options, tuple(command))


@pytest.mark.parametrize(("code", "run"), [
    ("'import os; os.getpid()'", "import os; os.getpid()"),  # as quotes within quotes arrive
    ('"print(1)"', "print(1)"),
    *((code, code) for code in ("print('x')", "'a' in 'b' or exit('b')", "'a' + f('b')",
                                "'a' 'b'", "'a\\nb'", "'", "")),
])  # fmt: skip
def test_quotes_around_the_whole_code_are_taken_off(code, run):
    assert split(["-c", code, "'x'"]) == ({}, (sys.executable, "-c", run, "'x'"))


@pytest.mark.parametrize(("words", "options"), [
    *((words, {"nproc": "4"}) for words in ("-np 4", "-np=4", "--np 4", "--ntasks=4")),
    *((f"{word} 4", {"ppn": "4"}) for word in ("-ppn", "--nproc_per_node", "--ntasks-per-node")),
    *((f"{word} 4", {"nodes": "4"}) for word in ("-nh", "--nhosts", "--nnodes")),
    ("--timeout 10m", {"idle-timeout": "10m"}),
    ("-x A=1 --env B=2", {"env": ["A=1", "B=2"]}),
])  # fmt: skip
def test_other_launchers_words_are_understood(words, options):
    assert split([*words.split(), "true"]) == (options, ("true",))


@pytest.mark.parametrize(("words", "message"), [
    (["--nproks", "2", "true"], "unknown option '--nproks'; did you mean --nprocs? options of"),
    (["--zzz", "true"], "unknown option '--zzz'; see ezpz-launch --help; options of"),
    (["-nfour", "true"], "unknown option '-nfour'"),
    (["-n"], "-n needs a value; expected -n N"),
    (["-n", "--", "true"], "-n needs a value"),
    (["-n", "1", "--nproc", "2", "true"], "--nproc is given twice"),
    (["--dry-run=yes", "true"], "--dry-run='yes': --dry-run takes no value"),
    (["-nodes", "2", "true"], "unknown option '-nodes'; did you mean --nodes? "),
    (["-hostfile", "f", "true"], "unknown option '-hostfile'; did you mean --hostfile? "),
])  # fmt: skip
def test_what_is_no_option_of_ours(words, message):
    with pytest.raises(UsageError) as caught:
        split(words)
    assert message in str(caught.value)


def test_every_option_reaches_the_request():
    words = (
        "-n 4 --ppn=2 -N2 --hostfile h --include a[1-2] --exclude 0007 --launcher spawn "
        "--machine polaris --option depth --option nccl-ofi --cpu-bind 0-3 --env A=1 --env B=[1] "
        "--one-device --log-dir 1e3 --tee --prefix "
        "--idle-timeout 10m --grace 2.5 --signal-before 1h --retries 3 --spares 2 --preflight "
        "--min-nodes 1 --nested --stage=all --stage-data d "
        "--launcher-args \"-a 'b c'\" --dry-run --json"
    )
    request = build_request(*split([*shlex.split(words), "python", "t.py"]))
    assert request == Request(
        command=("python", "t.py"), nproc=4, ppn=2, nodes=2, hostfile="h", include="a[1-2]",
        exclude="0007", launcher="spawn", machine="polaris", options=("depth", "nccl-ofi"),
        cpu_bind="0-3", env=("A=1", "B=[1]"), one_device=True, log_dir="1e3",
        tee=True, prefix=True, idle_timeout=600.0, grace=2.5,
        signal_before=3600.0, retries=3, spares=2, preflight=True, min_nodes=1, nested=True,
        stage="all", stage_data=("d",), launcher_args=("-a", "b c"),
        dry_run=True, json=True,
    )  # fmt: skip
    plain = Request(("true",))
    unset = [f for f in dataclasses.fields(Request) if getattr(plain, f.name) != f.default]
    assert [field.name for field in unset] == ["command"]
    changed = [f for f in dataclasses.fields(Request) if getattr(request, f.name) == f.default]
    assert changed == [], "every option is in this test"
    assert (plain.idle_timeout, plain.grace, plain.signal_before, plain.retries) == (0, 7, 0, 0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("90", 90), ("1.5", 1.5), ("90s", 90), ("10m", 600), ("2h", 7200), (".5m", 30)],
)
def test_times(text, seconds):
    assert requested("--idle-timeout", text).idle_timeout == seconds


@pytest.mark.parametrize(("flag", "texts", "message"), [
    ("--grace", ["", "s", ".", "-1", "1e3", "nan", "inf", "1_0", "10 m", "1d", "٣"],
     "expected a time of 0 or more: 90, 1.5, 90s, 10m, 2h"),
    ("-n", ["two", "", "1.5", "1_0", "٣"], "expected a whole number"),
    ("--launcher-args", ["--x 'y"], "No closing quotation; expected words quoted as in a"),
])  # fmt: skip
def test_text_that_is_no_value_of_its_option(flag, texts, message):
    for text in texts:
        with pytest.raises(LaunchError) as caught:
            requested(flag, text)
        assert str(caught.value).startswith(f"{flag} ")
        assert message in str(caught.value), text


@pytest.mark.parametrize(("options", "message"), [
    ({"nproc": 0}, "-n 0: expected at least 1 rank"),
    ({"ppn": -1}, "--ppn -1: expected at least 1 rank"),
    ({"nodes": 0}, "-N 0: expected at least 1 host"),
    ({"retries": -1}, "--retries -1: expected 0 or more"),
    ({"spares": -1}, "--spares -1: expected at least 1 host"),
    ({"grace": -1.0}, "--grace -1.0: expected 0 seconds or more"),
    ({"idle_timeout": float("nan")}, "--idle-timeout nan: expected 0 seconds or more"),
    ({"signal_before": float("inf")}, "--signal-before inf: expected 0 seconds or more"),
    ({"launcher": "mpirun"}, "--launcher mpirun: expected one of auto, mpiexec, hydra, "),
    ({"env": ("A=1", "A")}, "--env 'A': expected NAME=VALUE"),
    ({"env": ("=b",)}, "--env '=b': expected NAME=VALUE"),
    ({"tee": True}, "--tee: expected --log-dir DIR beside it"),
    ({"json": True}, "--json: expected --dry-run beside it"),
    ({"command": ()}, "no command"),
])  # fmt: skip
def test_requests_that_cannot_be(options, message):
    with pytest.raises(UsageError) as caught:
        Request(**{"command": ("python", "train.py"), **options})
    assert str(caught.value).startswith(message)


def test_what_a_dry_run_says_of_the_options():
    words = "--log-dir /l --tee --grace 1m --retries=2 --prefix --one-device"
    assert list_settings(requested(*words.split())) == [
        ("devices of a rank", "its own only", "--one-device"),
        ("output", "/l, there and here", "--log-dir, --tee"),
        ("lines begin with", "[rank@host]", "--prefix"),
        ("SIGTERM to SIGKILL", "60 s", "--grace"),
        ("retries", "up to 2", "--retries"),
    ]
    assert list_settings(requested("-n", "2", "--grace", "7")) == []
    (row,) = list_settings(requested("--log-dir", "/l"))
    assert row == ("output", "/l, there only", "--log-dir")


# The page of --help.

LINES = help_page().splitlines()
VALUES = {"N": "2", "TIME": "10m", "K=V": "A=1", "KIND": "spawn", "LIST": "0-3"}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_on_the_page_and_taken_as_it_is_written(option):
    start = f"-{option.short}, --{option.name}" if option.short else f"--{option.name}"
    start += f"[={option.value}]" if option.bare_value else f" {option.value}".rstrip()
    (row,) = [line.strip() for line in LINES if line.strip().startswith(f"{start} ")]
    assert row.removeprefix(start).strip() == option.help != ""
    value = [VALUES.get(option.value, "x")] if option.value else []
    for flag in filter(None, (f"--{option.name}", option.short and f"-{option.short}")):
        words = [f"{flag}={value[0]}"] if option.bare_value else [flag, *value]
        options, command = split([*words, "--", "true"])
        if option.ends_options:
            assert command[1:] == (f"-{option.short}", *value, "--", "true")
        else:
            text = value[0] if value else True
            expected = [text] if option.repeatable else text
            assert (options, command) == ({option.name: expected}, ("true",))
        if option.bare_value:
            assert split([flag, "python"]) == ({option.name: option.bare_value}, ("python",))


def test_every_option_names_who_needs_it():
    table = (*OPTIONS, *SUBMIT_OPTIONS)
    assert [option.name for option in table if not option.needed_by] == []


def test_the_page_fits_the_screen():
    assert len(LINES) <= 55
    assert max(map(len, LINES)) <= 80
    assert all(line == line.rstrip() for line in LINES)
    assert LINES[0] == f"usage: {USAGE}"
    rows = LINES[LINES.index("options:") + 1 :][: len(OPTIONS)]
    assert len({row.index(option.help) for row, option in zip(rows, OPTIONS, strict=True)}) == 1
    rows = LINES[LINES.index("examples:") + 1 :][: len(EXAMPLES)]
    assert len({row.index(what, 56) for row, (_, what) in zip(rows, EXAMPLES, strict=True)}) == 1


@pytest.mark.parametrize("example", [words for words, _ in EXAMPLES])
def test_every_example_is_understood(example):
    program, *words = shlex.split(example)
    assert program == "ezpz-launch"
    options, command = split(words)
    # each option is of the kind that its value is checked for
    assert build_request(options, command).command == command != ()
