"""The smallest launcher: several ranks of this host, as plain processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from ezpz_launch._plan.launchers.spawn import SPAWN
from ezpz_launch._run.processes import is_running

SPAWNER = [sys.executable, "-I", "-S", SPAWN]


def spawned(size, *command):
    return subprocess.run([*SPAWNER, str(size), *command], capture_output=True, check=False)


def test_each_rank_knows_its_place_and_has_none_of_our_files():
    code = (
        "import os; env = os.environ; open_ = [fd for fd in range(3, 60) if "
        "os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "print(env['EZPZ_SPAWN_RANK'], env['EZPZ_SPAWN_SIZE'], os.getpgrp() == os.getpid(), open_)"
    )
    done = spawned(3, sys.executable, "-I", "-S", "-c", code)
    assert sorted(done.stdout.decode().splitlines()) == [f"{n} 3 True []" for n in range(3)]
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 0", 0),
        ("exit $EZPZ_SPAWN_RANK", 2),
        ("[ $EZPZ_SPAWN_RANK = 1 ] && kill -9 $$; exit 3", 137),
        ("exec no-such-program 2>&-", 127),
    ],
)
def test_the_largest_exit_status(script, status):
    assert spawned(3, "sh", "-c", script).returncode == status


def test_sigterm_reaches_every_rank_and_what_it_started(process, until):
    script = "trap 'echo bye; exit 9' TERM; sleep 600 & echo $!; wait"
    spawner = process(*SPAWNER, "2", "sh", "-c", script, stdout=-1)
    pids = [int(spawner.stdout.readline()) for _ in range(2)]
    # a shell's child hears nothing until it has become its program
    until(lambda: all(Path(f"/proc/{pid}/comm").read_text() == "sleep\n" for pid in pids))
    spawner.terminate()
    assert spawner.stdout.read() == b"bye\n" * 2
    assert spawner.wait() == 9
    until(lambda: not any(map(is_running, pids)))
