"""Who outlives ezpz-launch when it is killed: nobody."""

import os
import signal
import sys

import pytest

from ezpz_launch._agent import is_running

GUARDED = """
import os, subprocess, sys, time
from ezpz_launch._nodes import Guardian
launcher = subprocess.Popen(["sh", "-c", sys.argv[1]], start_new_session=True)
rank = subprocess.Popen(["sleep", "60"], start_new_session=True)
marked = subprocess.Popen(
    ["sleep", "60"], start_new_session=True, env={**os.environ, "EZPZ_LAUNCH_ID": "guardian.0"}
)
guardian = Guardian("guardian.0", launcher.pid)
guardian.tell(f"start 0 {rank.pid}")
print(launcher.pid, rank.pid, marked.pid, guardian._pid, flush=True)
word = sys.stdin.readline()
if word == "dismiss\\n":
    guardian.dismiss()
    print("dismissed", flush=True)
elif word == "again\\n":
    os.kill(guardian._pid, 9)
    os.waitpid(guardian._pid, 0)
    guardian.tell("end 0")
    print("told", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def guarded(process):
    """Start a process with a guardian; return it and what it guards."""
    known = []

    def start(launcher="sleep 600 & wait"):
        parent = process(sys.executable, "-c", GUARDED, launcher, stdin=-1, stdout=-1)
        known.extend(map(int, parent.stdout.readline().split()))
        return parent, known[:3], known[3]

    yield start
    for pid in filter(is_running, known):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "launcher",
    ["sleep 600 & wait", "trap '' TERM; sleep 600; sleep 600"],
    ids=["", "deaf launcher"],
)
def test_kill_9_of_the_parent_ends_ranks_and_launcher(guarded, until, launcher):
    parent, pids, guardian = guarded(launcher)
    parent.kill()
    until(lambda: not any(map(is_running, [*pids, guardian])))
    # nothing holds its pipes
    assert parent.stdout.read() == b""


def test_a_launcher_is_first_asked_to_end(guarded, until, tmp_path):
    path = tmp_path / "asked"
    parent, pids, _ = guarded(f"trap 'echo yes >{path}; exit' TERM; sleep 600 & wait")
    parent.kill()
    until(lambda: not any(map(is_running, pids)))
    assert path.read_text() == "yes\n"


def test_dismissed_it_ends_and_harms_nobody(guarded, until):
    parent, pids, guardian = guarded()
    parent.stdin.write(b"dismiss\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == b"dismissed\n"
    until(lambda: not is_running(guardian))
    assert all(map(is_running, pids))
    parent.kill()
    parent.wait(120)
    assert all(map(is_running, pids))


def test_a_guardian_that_was_killed_is_not_missed(guarded):
    parent, pids, _ = guarded()
    parent.stdin.write(b"again\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == b"told\n"
    assert all(map(is_running, pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_do_not_end_it(guarded, until, number):
    parent, pids, guardian = guarded()
    until(lambda: os.getsid(guardian) == guardian)  # it has set itself up
    until(lambda: _ignores(guardian, number))
    os.kill(guardian, number)
    assert all(map(is_running, [*pids, guardian]))
    parent.kill()
    until(lambda: not any(map(is_running, [*pids, guardian])))


def _ignores(pid, number):
    with open(f"/proc/{pid}/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["SigIgn"], 16) & 1 << number - 1


def test_kill_9_of_ezpz_launch(background, until, tmp_path):
    script = f"echo $$ >{tmp_path}/$RANK.new; mv {tmp_path}/$RANK.new {tmp_path}/$RANK; sleep 600"
    launch = background("-n", "2", "sh", "-c", f"{script}; true", stdout=-1, stderr=-1)
    until(lambda: len([path for path in tmp_path.iterdir() if path.suffix != ".new"]) == 2)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    launch.kill()
    # what reads our output sees its end
    assert launch.stdout.read() == b""
    assert b"Killed" not in launch.stderr.read()
    until(lambda: not any(map(is_running, pids)))
