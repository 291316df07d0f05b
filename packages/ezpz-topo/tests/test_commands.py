"""Commands that answer, fail, hang, print without end: real processes on a PATH of their own."""

import os
import signal

import pytest
from waiting import is_left

from ezpz_topo import InvalidVariableError, SchedulerError, ask
from ezpz_topo._commands import get_time_limit


@pytest.fixture
def env(tmp_path):
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "HERE": str(tmp_path)}


def calls(tmp_path):
    return (tmp_path / "calls").read_text().split()


def wait_until_dead(pid):
    """Wait for a process whose parent has ended."""
    if is_left(pid, 30):
        os.kill(pid, signal.SIGKILL)
        pytest.fail(f"process {pid} outlived its command")


def test_an_answer(tmp_path, env, command):
    command("qstat", 'cat; echo "$1|$2|$TZ"; echo warning >&2; printf "\\377" >&2')
    answer = ask(["qstat", "a b", "$HOME;*"], env={**env, "TZ": "UTC0"})
    assert (answer.status, answer.stdout) == (0, "a b|$HOME;*|UTC0\n")
    assert answer.stderr == "warning\n\ufffd"
    command("qstat", "head -c 300000 /dev/zero >&2; head -c 300000 /dev/zero")
    answer = ask(["qstat"], env=env)
    assert (len(answer.stdout), len(answer.stderr)) == (300000, 300000)


def test_a_missing_command_names_path_and_place(tmp_path):
    env = {"PATH": str(tmp_path)}
    with pytest.raises(SchedulerError, match=r"'qstat' cannot be started .*/opt/pbs/bin") as caught:
        ask(["qstat"], env=env, place="/opt/pbs/bin")
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(SchedulerError, match="add the command's directory"):
        ask(["qstat"], env=env)
    (tmp_path / "qmine").write_text("#!/bin/sh\n")
    with pytest.raises(SchedulerError, match="Permission denied"):
        ask(["qmine"], env=env)
    with pytest.raises(SchedulerError, match="cannot be started"):
        ask(["echo", "a\0b"], env=env)


@pytest.mark.parametrize(("body", "times", "expected"), [
    ('[ -e "$HERE/up" ] || { : > "$HERE/up"; exit 1; }', 2, 0),
    ('echo one >&2; echo "cannot connect" >&2; exit 111', 2,
     r"exit status 111 \(2 attempts\).*'cannot connect'"),
    # a wrapper without its command
    ("exit 127", 1, r"exit status 127 \(1 attempt\) and said nothing"),
    ("kill -9 $$", 2, "signal 9"),
    ("exec cat /dev/zero", 1, "more than 64 MiB"),
    ("exit 153", 1, 153),  # which is good here
])  # fmt: skip
def test_failures_and_how_often_they_are_tried(*, tmp_path, env, command, body, times, expected):
    command("qstat", f'echo x >> "$HERE/calls"; {body}')
    if isinstance(expected, int):
        assert ask(["qstat"], env=env, good=(0, 153)).status == expected
    else:
        with pytest.raises(SchedulerError, match=expected):
            ask(["qstat"], env=env, time_limit=60)
    assert len(calls(tmp_path)) == times


def hang(tmp_path, env):
    """Ask until the command came as far as to write its processes' numbers; return these."""
    for time_limit in (0.3, 3.0, 30.0):
        with pytest.raises(SchedulerError, match=f"no answer in {time_limit:g} s"):
            ask(["qstat"], env=env, time_limit=time_limit, attempts=1)
        if (tmp_path / "calls").exists():
            break
    return [int(pid) for pid in calls(tmp_path)]


@pytest.mark.parametrize("body", [
    'sleep 600 & echo $! $$ >> "$HERE/calls"; wait',
    'sleep 600 & echo $! > "$HERE/calls"',  # which keeps the pipe of a command that ended
    'echo $$ > "$HERE/calls"; exec sleep 600 >/dev/null 2>&1',
])  # fmt: skip
def test_a_hanging_command_is_ended_with_its_children(tmp_path, env, command, body):
    command("qstat", body)
    for pid in hang(tmp_path, env):
        wait_until_dead(pid)


def test_a_child_that_left_the_group_does_not_keep_us(tmp_path, env, command):
    command("qstat", 'setsid sleep 600 & echo $! > "$HERE/calls"; sleep 600')
    for pid in hang(tmp_path, env):
        os.kill(pid, signal.SIGKILL)


def test_an_interrupt_ends_the_command(tmp_path, env, command):
    # The first that it does: before Popen has returned, often.
    command("qstat", 'echo $$ > "$HERE/calls"; kill -INT $PPID; sleep 600')
    with pytest.raises(KeyboardInterrupt):
        ask(["qstat"], env=env, time_limit=60)
    wait_until_dead(int(calls(tmp_path)[0]))


def test_a_hanging_command_is_tried_again_for_as_long_as_the_environment_says(env, command):
    command("qstat", "exec sleep 600")
    said = r"no answer in 0.1 s \(3 attempts\); .* try again.*EZPZ_SCHEDULER_TIMEOUT"
    with pytest.raises(SchedulerError, match=said):
        ask(["qstat"], env={**env, "EZPZ_SCHEDULER_TIMEOUT": "0.1"}, attempts=3)
    assert get_time_limit({}) == get_time_limit({"EZPZ_SCHEDULER_TIMEOUT": ""}) == 10
    assert get_time_limit({"EZPZ_SCHEDULER_TIMEOUT": "30"}) == 30


@pytest.mark.parametrize("bad", ["0", "-1", "ten", "nan", "99999", "٣"])
def test_a_time_limit_that_is_none(bad):
    with pytest.raises(InvalidVariableError, match="EZPZ_SCHEDULER_TIMEOUT"):
        get_time_limit({"EZPZ_SCHEDULER_TIMEOUT": bad})
