import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from ezpz_launch._launch import ENDING, pause, signal_group, signals


def readable(fd, seconds=0.0):
    return bool(select.select([fd], [], [], seconds)[0])


def test_what_arrives_is_kept_in_order_and_wakes():
    with signals() as (arrived, wake):
        assert not readable(wake)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert readable(wake, 20)
        assert arrived == [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT]


def test_the_end_of_a_child_wakes():
    with signals() as (arrived, wake):
        subprocess.run(["true"], check=True)
        assert readable(wake, 20)
        assert arrived == []


def test_everything_is_as_before():
    numbers = [*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD]
    before = [signal.getsignal(number) for number in numbers]
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(KeyError), signals() as (_, wake):
        raise KeyError(wake)
    assert [signal.getsignal(number) for number in numbers] == before
    assert len(os.listdir("/proc/self/fd")) == len(open_before)
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    assert fd == -1


def test_what_was_ignored_stays_ignored():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals() as (arrived, _):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert arrived == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_more_signals_than_the_pipe_holds():
    with signals() as (arrived, wake):
        for _ in range(70_000):
            signal.raise_signal(signal.SIGUSR1)
        assert len(arrived) == 70_000
        assert readable(wake)


def test_a_pause_to_its_end():
    began = time.monotonic()
    with signals() as heard:
        assert pause(0.1, heard) == 0
        assert time.monotonic() - began >= 0.1
        assert pause(0, heard) == 0


def test_what_arrived_before_a_pause_ends_it():
    with signals() as heard:
        os.kill(os.getpid(), signal.SIGTERM)
        assert pause(60, heard) == signal.SIGTERM


@pytest.mark.parametrize("number", ENDING)
def test_a_pause_is_ended_by_a_signal(number):
    with signals() as heard:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), number))
        timer.start()
        assert pause(60, heard) == number
        timer.join()


def test_a_pause_is_not_ended_by_sigusr1():
    program = (
        "import os, signal\n"
        "from threading import Timer\n"
        "from ezpz_launch._launch import pause, signals\n"
        "with signals() as heard:\n"
        "    Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()\n"
        "    print(pause(0.5, heard))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"0\n"


def test_a_group_that_is_gone(process):
    child = process("sleep", "60")
    signal_group(child.pid, signal.SIGTERM)
    assert child.wait(120) == -signal.SIGTERM
    signal_group(child.pid, signal.SIGTERM)
