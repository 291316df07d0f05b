"""The ranks of one node, as real processes: who is signalled, and who is not."""

import os
import shutil
import signal
import sys
import time

import pytest

from ezpz_launch._agent import NodeRanks, is_running

ID = f"node-test.{os.getpid()}"  # a session beside this one must not meet ours
COUNTS = (
    "import os, signal, time\n"
    "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'heard\\n'))\n"
    "print('ready', flush=True)\n"
    "while True: time.sleep(600)\n"
)


@pytest.fixture
def ranks():
    return NodeRanks(ID)


@pytest.fixture
def rank(process):
    """Start a process that says that it is ready, and when it hears SIGUSR1."""

    def start(**options):
        child = process(sys.executable, "-c", COUNTS, stdout=-1, **options)
        assert child.stdout.readline() == b"ready\n"
        return child

    return start


def test_the_whole_group_of_a_rank_is_signalled(process, ranks, until):
    shell = process("sh", "-c", "sleep 600 & echo $!; wait", stdout=-1)
    child = int(shell.stdout.readline())
    ranks.started(0, shell.pid)
    ranks.signal(signal.SIGTERM)
    assert shell.wait(120) == -signal.SIGTERM
    until(lambda: not is_running(child))


def test_a_group_of_several_ranks_is_signalled_once(rank, ranks):
    # srun makes one group for all the ranks of a node
    first = rank()
    second = rank(process_group=first.pid)
    for number, child in enumerate((first, second)):
        ranks.started(number, child.pid)
    ranks.signal(signal.SIGUSR1)
    for child in (first, second):
        assert child.stdout.readline() == b"heard\n"
    ranks.kill()
    assert [child.communicate()[0] for child in (first, second)] == [b"", b""]


def test_our_own_group_is_never_signalled(process, ranks):
    heard = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        child = process("sleep", "60", process_group=None)
        assert os.getpgid(child.pid) == os.getpgrp()
        ranks.started(0, child.pid)
        # as a launcher that leads the group in which we are would be
        ranks._leaders.add(os.getpgrp())
        ranks.signal(signal.SIGUSR1)
        assert child.wait(120) == -signal.SIGUSR1
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert heard == []


def test_a_group_that_no_rank_leads_is_not_signalled(process, rank, ranks):
    launcher = process("sleep", "60")
    child = rank(process_group=launcher.pid)
    ranks.started(0, child.pid)
    ranks.signal(signal.SIGTERM)
    assert child.wait(120) == -signal.SIGTERM
    assert launcher.poll() is None


def test_a_rank_that_has_ended_is_not_signalled(rank, ranks):
    ended, runs = rank(), rank()
    ranks.started(0, ended.pid)
    ranks.started(1, runs.pid)
    ranks.ended(0)
    assert (ranks.pid(0), ranks.pid(1)) == (None, runs.pid)
    ranks.signal(signal.SIGTERM)
    assert runs.wait(120) == -signal.SIGTERM
    assert ended.poll() is None


def test_another_process_of_that_number_is_not_signalled(process, ranks):
    child = process("sleep", "60")
    ranks.started(0, child.pid)
    ranks._born[child.pid] = "1"  # as if that rank had been born at another time
    ranks.signal(signal.SIGKILL)
    ranks.release(child.pid)
    ranks.kill()
    with pytest.raises(Exception, match="timed out"):
        child.wait(0.2)


def test_a_process_that_was_gone_when_it_was_reported(process, ranks):
    child = process("true")
    child.wait(120)
    ranks.started(0, child.pid)
    ranks.signal(signal.SIGTERM)
    ranks.kill()
    ranks.release(child.pid)


def test_what_a_rank_leaves_in_its_group_is_signalled(process, ranks, until):
    shell = process("sh", "-c", "sleep 600 & echo $!; read line", stdout=-1, stdin=-1)
    child = int(shell.stdout.readline())
    ranks.started(0, shell.pid)
    shell.stdin.close()
    shell.wait(120)
    ranks.signal(signal.SIGTERM)
    until(lambda: not is_running(child))


def test_what_left_its_group_is_killed_by_its_mark(process, ranks):
    def marked(launch_id):
        env = {**os.environ, "EZPZ_LAUNCH_ID": launch_id}
        return process("sleep", "60", env=env, process_group=None, start_new_session=True)

    ours, others = marked(ID), [marked(ID + "1"), marked("x" + ID), marked("")]
    plain = process("sleep", "60", env={**os.environ, "OTHER": f"EZPZ_LAUNCH_ID={ID}"})
    ranks.kill()
    assert ours.wait(120) == -signal.SIGKILL
    assert [child.poll() for child in (*others, plain)] == [None] * 4


@pytest.mark.parametrize("name", ["PBS_JOBID", "SLURM_JOB_ID"])
def test_a_job_that_a_rank_submitted_is_not_of_the_launch(process, ranks, monkeypatch, name):
    env = {**os.environ, "EZPZ_LAUNCH_ID": ID}
    theirs = process("sleep", "600", env={**env, name: "8"})
    ranks.kill()  # of no job
    monkeypatch.setenv(name, "7")
    ours, plain = (process("sleep", "600", env=each) for each in ({**env, name: "7"}, env))
    ranks.kill()
    assert [child.wait(120) for child in (ours, plain)] == [-signal.SIGKILL] * 2
    assert theirs.poll() is None


def test_release_signals_the_shim_alone(process, ranks):
    shell = process("sh", "-c", "trap 'exit 7' TERM; sleep 600 & echo $!; wait", stdout=-1)
    child = int(shell.stdout.readline())
    ranks.started(0, shell.pid)
    ranks.ended(0)
    ranks.release(shell.pid)
    assert shell.wait(120) == 7
    assert is_running(child)


def test_a_name_like_the_end_of_a_name(process, ranks, tmp_path):
    program = tmp_path / "x) Z 1 ("
    shutil.copy(shutil.which("sleep"), program)
    child = process(program, "60")
    assert is_running(child.pid)
    ranks.started(0, child.pid)
    ranks.signal(signal.SIGTERM)
    assert child.wait(120) == -signal.SIGTERM


def test_what_is_only_waited_for_does_not_run(process, until):
    child = process("true")
    until(lambda: not is_running(child.pid))
    assert child.poll() == 0
    assert not is_running(child.pid)
    assert is_running(os.getpid())


def test_a_mark_is_found_fast(ranks):
    began = time.process_time()
    ranks.kill()
    assert time.process_time() - began < 5


@pytest.fixture
def shim(process):
    """Start a shell that stays, as the rank shim does, and goes on after its command."""

    def start(script="echo ready; sleep 600", rank=0, then="true", **options):
        env = {**os.environ, "EZPZ_LAUNCH_ID": ID, "EZPZ_RANK": str(rank)}
        child = process(
            "sh", "-c", f"(exec sh -c '{script}; :'); {then}", env=env, stdout=-1, **options
        )
        assert child.stdout.readline() == b"ready\n"
        return child

    return start


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")


def kill_and_reap(child):
    child.kill()
    child.wait(120)


@ON_LINUX
def test_nothing_is_lost_while_all_goes_well(shim, ranks):
    assert ranks.lost() == []
    ranks.started(0, shim().pid)
    for _ in range(3):
        assert ranks.lost() == []


@ON_LINUX
def test_a_rank_whose_shim_was_killed_is_lost(shim, ranks):
    first, second = shim(rank=0), shim(rank=1)
    ranks.started(0, first.pid)
    ranks.started(1, second.pid)
    assert ranks.lost() == []  # it sees the commands
    kill_and_reap(second)
    assert ranks.lost() == [1]
    assert ranks.lost() == []  # once
    kill_and_reap(first)
    assert [ranks.lost(), ranks.lost()] == [[0], []]


@ON_LINUX
def test_a_shim_that_nobody_has_waited_for_is_lost_as_well(shim, ranks, until):
    child = shim()
    ranks.started(0, child.pid)
    assert ranks.lost() == []
    child.kill()
    until(lambda: not is_running(child.pid))
    assert ranks.lost() == [0]


@ON_LINUX
def test_a_shim_that_was_killed_before_its_command_was_seen(shim, ranks):
    child, other = shim(rank=1), shim(rank=11)
    ranks.started(1, child.pid)
    ranks.started(11, other.pid)
    kill_and_reap(child)
    # the first time it may just be ending
    assert ranks.lost() == []
    assert ranks.lost() == [1]
    assert [ranks.lost(), ranks.lost()] == [[], []]


@ON_LINUX
@pytest.mark.parametrize("is_seen", [True, False])
def test_a_rank_that_ended_with_its_shim_is_not_lost(shim, ranks, until, is_seen):
    child = shim("echo ready; echo $$; exec sleep 600")
    command = int(child.stdout.readline())
    ranks.started(0, child.pid)
    if is_seen:
        assert ranks.lost() == []
    os.killpg(child.pid, signal.SIGKILL)
    child.wait(120)
    until(lambda: not is_running(command))
    assert [ranks.lost() for _ in range(3)] == [[], [], []]


@ON_LINUX
def test_a_rank_whose_shim_waits_to_be_released_is_not_lost(shim, ranks):
    child = shim("echo ready", then="echo ended; sleep 600; true")
    ranks.started(0, child.pid)
    assert child.stdout.readline() == b"ended\n"
    assert ranks.lost() == []
    ranks.ended(0)
    kill_and_reap(child)
    assert [ranks.lost(), ranks.lost()] == [[], []]


@ON_LINUX
def test_what_a_shim_runs_before_the_command_is_not_taken_for_it(shim, ranks, until):
    # as `uname -n` is, of --prefix
    child = shim("echo ready; read line", then="echo next; sleep 600; true", stdin=-1)
    ranks.started(0, child.pid)
    assert ranks.lost() == []
    child.stdin.write(b"\n")
    child.stdin.flush()
    assert child.stdout.readline() == b"next\n"
    until(lambda: _commands_of(child.pid) == ["sleep"])
    assert ranks.lost() == []
    kill_and_reap(child)
    until(ranks.lost)


def _commands_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = file.read().split()
    names = []
    for child in children:
        with open(f"/proc/{child}/comm") as file:
            names.append(file.read().strip())
    return names


@pytest.fixture
def orphan(process):
    """Start a launcher with one shim, and return both."""

    def start():
        script = "sh -c 'sleep 600; true' >&2 & echo $!; wait"
        launcher = process("sh", "-c", script, stdout=-1)
        return launcher, int(launcher.stdout.readline())

    return start


@ON_LINUX
def test_a_rank_whose_launcher_is_gone_is_lost(orphan, ranks):
    launcher, shim = orphan()
    ranks.started(3, shim)
    assert ranks.lost() == []
    kill_and_reap(launcher)
    assert is_running(shim)
    assert [ranks.lost(), ranks.lost()] == [[3], []]
    # it is still to be ended
    assert ranks.pid(3) == shim


@ON_LINUX
def test_a_launcher_that_was_gone_when_its_rank_was_reported(orphan):
    """The agent knows the launcher's process from its own start."""
    launcher, shim = orphan()
    kill_and_reap(launcher)
    ranks = NodeRanks(ID, launcher.pid)
    ranks.started(0, shim)
    assert [ranks.lost(), ranks.lost()] == [[0], []]


@ON_LINUX
def test_it_looks_often_until_it_has_seen_the_command(shim, ranks):
    usual = ranks.next_look()
    child = shim()
    ranks.started(0, child.pid)
    assert ranks.next_look() < usual
    ranks.lost()
    assert ranks.next_look() == usual
    ranks.started(1, shim(rank=1).pid)
    assert ranks.next_look() < usual
    ranks.ended(1)
    assert ranks.next_look() == usual
