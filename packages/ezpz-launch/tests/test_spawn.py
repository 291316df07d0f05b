"""The smallest launcher, as the program that it is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ezpz_launch._agent import is_running
from ezpz_launch.launchers.spawn import SPAWN

SPAWNER = [sys.executable, "-I", "-S", SPAWN]


def spawned(size, *command, **options):
    words = [*SPAWNER, "-n", str(size), *command]
    return subprocess.run(words, capture_output=True, check=False, timeout=60, **options)


def test_each_rank_knows_its_place():
    done = spawned(3, "sh", "-c", "echo $EZPZ_SPAWN_RANK of $EZPZ_SPAWN_SIZE")
    assert sorted(done.stdout.splitlines()) == [b"0 of 3", b"1 of 3", b"2 of 3"]
    assert (done.returncode, done.stderr) == (0, b"")


def test_words_are_untouched():
    words = ["", "a b", "$(id)", "new\nline", "-n", "*"]
    done = spawned(1, "printf", "%s\\0", *words)
    assert done.stdout.decode().split("\0")[:-1] == words


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 0", 0),
        ("exit $EZPZ_SPAWN_RANK", 2),
        ("exit 255", 255),
        ("kill -9 $$", 137),
        ("kill -TERM $$", 143),
        ("[ $EZPZ_SPAWN_RANK = 1 ] && kill -9 $$; exit 3", 137),
    ],
)
def test_the_largest_exit_status(script, status):
    assert spawned(3, "sh", "-c", script).returncode == status


def test_a_program_that_there_is_not():
    done = spawned(2, "no-such-program")
    assert done.returncode == 127
    assert done.stderr.splitlines() == [b"no-such-program: No such file or directory"] * 2


@pytest.mark.parametrize("words", [[], ["-n"], ["-n", "2"], ["-n", "two", "true"], ["2", "true"]])
def test_usage(words):
    done = subprocess.run([*SPAWNER, *words], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"usage: python -I -S spawn.py -n RANKS COMMAND [ARGUMENT...]\n"


def test_lines_are_whole():
    code = (
        "import os, time\n"
        "rank = os.environ['EZPZ_SPAWN_RANK'].encode()\n"
        "for _ in range(300):\n"
        "    for piece in (rank * 400, rank * 400, b'\\n'):\n"
        "        os.write(1, piece); os.write(2, piece)\n"
    )
    done = spawned(3, sys.executable, "-I", "-S", "-c", code)
    for stream in (done.stdout, done.stderr):
        lines = sorted(stream.split(b"\n"))
        assert lines == [b""] + [b"%d" % rank * 800 for rank in range(3) for _ in range(300)]


def test_a_progress_bar_is_shown_before_its_line_ends(process):
    script = "printf 50%%; read line; echo"
    spawner = process(*SPAWNER, "-n", "1", "sh", "-c", script, stdin=-1, stdout=-1)
    assert os.read(spawner.stdout.fileno(), 100) == b"50%"
    spawner.stdin.write(b"\n")
    spawner.stdin.flush()
    assert spawner.stdout.read() == b"\n"
    assert spawner.wait(120) == 0


def test_ten_megabytes_without_a_line():
    code = "import os\nfor _ in range(10): os.write(1, bytes(1 << 20))"
    done = spawned(2, sys.executable, "-I", "-S", "-c", code)
    assert done.stdout == bytes(20 << 20)


def test_what_a_rank_leaves_in_the_background_does_not_hold_it(process, until):
    script = "sleep 600 >/dev/null & echo $!; sleep 600 & echo $!; exit 4"
    spawner = process(*SPAWNER, "-n", "1", "sh", "-c", script, stdout=-1)
    pids = [int(spawner.stdout.readline()) for _ in range(2)]
    try:
        assert spawner.wait(120) == 4
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(is_running, pids)))


def test_nobody_reads(process):
    read, write = os.pipe()
    spawner = process(*SPAWNER, "-n", "1", "sh", "-c", "seq 100000; exit 5", stdout=write)
    os.close(write)
    os.close(read)
    assert spawner.wait(120) == 5


def test_sigterm_reaches_every_rank_and_what_it_started(process, until):
    script = "trap 'echo bye; exit 9' TERM; sleep 600 & echo $!; wait"
    spawner = process(*SPAWNER, "-n", "2", "sh", "-c", script, stdout=-1)
    pids = [int(spawner.stdout.readline()) for _ in range(2)]
    # a shell's child hears nothing until it has become its program
    until(lambda: all(Path(f"/proc/{pid}/comm").read_text() == "sleep\n" for pid in pids))
    spawner.terminate()
    assert spawner.stdout.read() == b"bye\n" * 2
    assert spawner.wait(120) == 9
    until(lambda: not any(map(is_running, pids)))


def test_a_rank_has_the_signals_of_a_shell():
    """None is ignored but those that the spawner itself was started to ignore."""
    script = "grep SigIgn /proc/self/status"
    ignored = int(spawned(1, "sh", "-c", script).stdout.split()[1], 16)
    assert not ignored & 1 << signal.SIGTERM - 1
    assert not ignored & 1 << signal.SIGPIPE - 1


def test_no_file_descriptor_leaks_into_ranks():
    code = "import os; print([fd for fd in range(3, 60) if os.path.exists(f'/proc/self/fd/{fd}')])"
    done = spawned(3, sys.executable, "-I", "-S", "-c", code, close_fds=True)
    assert done.stdout.splitlines() == [b"[]"] * 3
