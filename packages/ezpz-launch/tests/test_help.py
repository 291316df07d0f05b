"""The page of --help: all of it is there, it fits the screen, and what it says works."""

import shlex

import pytest

from ezpz_launch._cli import EXAMPLES, USAGE, help_page
from ezpz_launch._options import OPTIONS, request_of, split

LINES = help_page().splitlines()
VALUES = {"N": "2", "TIME": "10m", "K=V": "A=1", "KIND": "spawn", "LIST": "0-3"}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_there(option):
    start = f"-{option.short}, --{option.name}" if option.short else f"--{option.name}"
    rows = [line for line in LINES if line.strip().startswith(f"{start} ")]
    assert len(rows) == 1
    flags, _, text = rows[0].strip().partition("  ")
    assert flags == f"{start} {option.value}".rstrip()
    assert text.strip() == option.help != ""


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_taken_as_it_is_written(option):
    value = [VALUES.get(option.value, "x")] if option.value else []
    for flag in filter(None, (f"--{option.name}", option.short and f"-{option.short}")):
        options, command = split([flag, *value, "--", "true"])
        if option.last:
            assert command[1:] == (f"-{option.short}", *value, "--", "true")
        else:
            text = value[0] if value else True
            assert (options, command) == ({option.name: [text] if option.many else text}, ("true",))


def test_it_fits_the_screen():
    assert len(LINES) <= 50
    assert max(map(len, LINES)) <= 100
    assert all(line == line.rstrip() for line in LINES)
    assert LINES[0] == f"usage: {USAGE}"


def test_columns_are_in_line():
    rows = LINES[LINES.index("options:") + 1 :][: len(OPTIONS)]
    starts = {line.index(option.help) for line, option in zip(rows, OPTIONS, strict=True)}
    assert len(starts) == 1
    first = LINES.index("examples:") + 1
    rows = LINES[first : first + len(EXAMPLES)]
    starts = {line.index(what, 61) for line, (_, what) in zip(rows, EXAMPLES, strict=True)}
    assert len(starts) == 1


@pytest.mark.parametrize("example", [words for words, _ in EXAMPLES])
def test_every_example_is_understood(example):
    program, *words = shlex.split(example)
    assert program == "ezpz-launch"
    options, command = split(words)
    # each option is of the kind that its value is checked for
    assert request_of(options, command).command == command != ()


def test_the_example_of_a_dry_run_explains(launch):
    (example,) = (words for words, _ in EXAMPLES if "--dry-run" in words)
    done = launch(*shlex.split(example)[1:])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("would run:\n")


def test_the_example_of_the_history_lists(launch):
    assert ("ezpz-launch history", "the launches so far") in EXAMPLES
    done = launch("history")
    assert (done.returncode, done.stderr) == (0, "")
