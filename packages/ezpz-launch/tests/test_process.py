"""The launcher as a real process: its session, its pipes, and its end."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from ezpz_launch import LaunchError
from ezpz_launch._agent import is_running
from ezpz_launch._nodes import LauncherProcess


@pytest.fixture
def launcher(until):
    """Start a launcher; it is gone afterwards, and so are its pipes."""
    started = []

    def start(*argv, env=os.environ):
        one = LauncherProcess(argv, env)
        started.append(one)
        return one

    yield start
    for one in started:
        one.kill()
        with contextlib.suppress(AssertionError):
            until(lambda one=one: one.poll() is not None)
        for pipe in (one.stdout, one.stderr):
            with contextlib.suppress(OSError):
                os.close(pipe)


def line(fd):
    """Read one line, byte by byte."""
    text = b""
    while not text.endswith(b"\n"):
        byte = os.read(fd, 1)
        assert byte, f"the end after {text!r}"
        text += byte
    return text.decode().strip()


def all_of(fd):
    """Read to the end."""
    chunks = []
    while chunk := os.read(fd, 1 << 16):
        chunks.append(chunk)
    return b"".join(chunks)


def open_files():
    return sorted(os.listdir("/proc/self/fd"))


def test_it_has_a_session_of_its_own(launcher):
    one = launcher("sh", "-c", "echo ready; sleep 600; true")
    assert line(one.stdout) == "ready"
    assert os.getsid(one.pid) == os.getpgid(one.pid) == one.pid
    assert os.getsid(one.pid) != os.getsid(0)
    assert one.poll() is None


def test_its_streams_are_apart_and_it_reads_nothing(launcher):
    one = launcher("sh", "-c", "cat; echo out; echo err >&2")
    assert (all_of(one.stdout), all_of(one.stderr)) == (b"out\n", b"err\n")


def test_its_environment_is_the_one_that_is_given(launcher):
    one = launcher("env", env={"PATH": os.environ["PATH"], "A": "b c"})
    assert sorted(all_of(one.stdout).decode().splitlines()) == [
        "A=b c",
        f"PATH={os.environ['PATH']}",
    ]


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -signal.SIGKILL)]
)
def test_its_exit_status(launcher, until, script, status):
    one = launcher("sh", "-c", script)
    until(lambda: one.poll() is not None)
    assert one.poll() == status


def test_none_of_our_files_are_its(launcher):
    # os.pipe's are not inherited, nor is anything else of ours
    one = launcher("sh", "-c", "ls /proc/$$/fd")
    seen = all_of(one.stdout).split()
    assert {b"0", b"1", b"2"} <= set(seen)
    ours = {str(fd).encode() for fd in (one.stdout, one.stderr)}
    assert not ours & set(seen)


def test_nothing_of_its_pipes_is_left(launcher):
    before = open_files()
    one = launcher("true")
    assert all_of(one.stdout) == all_of(one.stderr) == b""
    os.close(one.stdout)
    os.close(one.stderr)
    assert open_files() == before


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["./no-such-launcher"], "No such file or directory"),
        (["/"], "Permission denied"),
        (["true", "x" * (1 << 18)], "Argument list too long"),
    ],
)
def test_what_cannot_be_started_leaves_nothing_open(words, why):
    before = open_files()
    with pytest.raises(LaunchError) as caught:
        LauncherProcess(words, os.environ)
    assert str(caught.value) == f"{words[0]} cannot be started: {why}"
    assert open_files() == before


def test_its_end_is_asked_for_first(launcher, until):
    one = launcher("sh", "-c", "trap 'exit 5' TERM; sleep 600 & echo $!; wait")
    child = int(line(one.stdout))
    # before it has become its program it may hear nothing
    until(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n")
    one.end()
    until(lambda: one.poll() is not None)
    assert one.poll() == 5
    # all of its group is told
    until(lambda: not is_running(child))


def test_the_second_time_it_is_killed(launcher, until):
    one = launcher("sh", "-c", "trap 'echo heard' TERM; echo ready; while :; do sleep 0.05; done")
    assert line(one.stdout) == "ready"
    one.end()
    assert line(one.stdout) == "heard"
    assert one.poll() is None
    one.end()
    until(lambda: one.poll() is not None)
    assert one.poll() == -signal.SIGKILL
    one.end()  # it has ended: no harm


def test_what_it_left_in_its_group_is_killed(launcher, until):
    one = launcher("sh", "-c", "sleep 600 & echo $!")
    child = int(line(one.stdout))
    until(lambda: one.poll() is not None)
    assert is_running(child)
    one.kill()
    until(lambda: not is_running(child))


def test_a_signal_to_pass_on_is_for_itself_alone(launcher, until):
    # `sleep` would die of it
    one = launcher("sh", "-c", "trap 'echo heard' USR1; sleep 600 & echo $!; wait; wait")
    child = int(line(one.stdout))
    one.pass_on(signal.SIGUSR1)
    assert line(one.stdout) == "heard"
    assert is_running(child)
    one.kill()
    until(lambda: one.poll() is not None)
    one.pass_on(signal.SIGUSR1)  # it has ended: no harm
