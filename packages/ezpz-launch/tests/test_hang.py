"""Who is taken to hang, who is not, and how long answers are waited for."""

import os
import signal
import sys
import time

import pytest

from ezpz_launch import _run as module
from ezpz_launch._launch import NEVER, Control, Launch, Status
from ezpz_launch._nodes import ThisHost
from ezpz_launch._output import Output, Reports
from ezpz_launch._run import Hang

ID = f"hang-test.{os.getpid()}"  # a session beside this one must not meet ours
HERE = os.uname().nodename


class Said(Output):
    """An Output whose own lines can be read."""

    def __init__(self):
        super().__init__((Reports(ID), Reports(ID)), lambda: None)
        self.said = []

    def say(self, message):
        self.said.append(message)


def ran(running, nproc=4):
    """A status in which these ranks run, and the others have ended."""
    status = Status(max(nproc, *running, 0) + 1 if running else nproc)
    for rank in range(status.nproc):
        status.take(("start", rank, 1000 + rank))
        if rank not in running:
            status.take(("end", rank, 0))
    return status


def test_ranks_that_never_started_are_named(hang, output):
    looks, status = hang(), Status(4)
    status.take(("start", 1, 1001))
    assert looks.is_one(output.last + 10, status)
    looks.declare(output.last, status, ThisHost(ID, looks.answer))
    never, running = output.said
    assert f"ranks that never started: 0 on {HERE}, 2 on other, 3 on other" in never
    assert f"ranks that had not ended: 1 on {HERE}; where" in running


@pytest.fixture
def output():
    return Said()


@pytest.fixture
def wakes():
    return []


@pytest.fixture
def hang(output, wakes):
    """Look for a hang of 4 ranks, 2 a host, after 10 s of silence, unless asked otherwise."""

    def start(idle=10.0, files="", hosts=("localhost", "other"), nproc=4, ppn=2):
        control = Control(ID, 5, files=str(files))
        launch = Launch(("true",), nproc, hosts, ppn, False, {}, control, idle_timeout=idle)
        return Hang(launch, output, lambda: wakes.append(1))

    return start


@pytest.fixture
def files(tmp_path):
    """Give the files of these ranks an age in seconds."""

    def write(**ages):
        for rank, age in ages.items():
            for name in (f"rank-{rank[1:]}.out", f"rank-{rank[1:]}.err"):
                (tmp_path / name).touch()
                # of the two, the newer counts
                old = age if name.endswith("out") else age + 1000
                os.utime(tmp_path / name, (time.time() - old,) * 2)
        return tmp_path

    return write


def test_silence(hang, output):
    looks = hang()
    assert looks.next_look == output.last + 10
    assert not looks.is_one(output.last + 9.9, ran([0, 1]))
    assert looks.is_one(output.last + 10, ran([0, 1]))
    output.last += 5  # something came
    assert not looks.is_one(output.last + 9.9, ran([0, 1]))


def test_nobody_asked(hang, output):
    looks = hang(idle=0.0)
    assert looks.next_look == NEVER
    assert not looks.is_one(output.last + 1e9, ran([0, 1]))


def test_without_a_rank_nothing_hangs(hang, output):
    assert not hang().is_one(output.last + 1e9, ran([]))


def test_what_is_written_to_files_is_output(hang, output, files):
    folder = files(r0=500, r1=4)
    looks = hang(files=folder)
    began = output.last
    now = began + 100
    assert not looks.is_one(now, ran([0, 1]))
    # the next look is 10 s after the newest
    assert looks.next_look == pytest.approx(now - 4 + 10, abs=3)
    assert looks.is_one(looks.next_look + 100, ran([0]))


def test_files_that_are_silent_too(hang, files, output):
    looks = hang(files=files(r0=500, r1=400))
    assert looks.is_one(output.last + 100, ran([0, 1]))


def test_only_the_files_of_ranks_that_run_count(hang, files, output):
    looks = hang(files=files(r0=500, r1=0))
    assert looks.is_one(output.last + 100, ran([0]))


def test_files_older_than_the_launch_do_not_make_it_older(hang, files, output):
    began = output.last
    looks = hang(files=files(r0=5000))
    assert not looks.is_one(began + 9, ran([0]))
    assert looks.is_one(began + 11, ran([0]))
    assert output.last >= began


def test_times_of_the_future_are_no_silence(hang, files, output):
    # a file server's clock may be ahead of ours
    now = output.last + 100
    assert not hang(files=files(r0=-3600)).is_one(now, ran([0]))
    assert output.last == now


@pytest.mark.parametrize("missing", ["rank-1.out", "rank-1.err"])
def test_a_file_that_is_not_seen_from_here_is_no_silence(hang, files, output, missing):
    folder = files(r0=500, r1=500)
    (folder / missing).unlink()
    looks = hang(files=folder)
    assert not looks.is_one(output.last + 100, ran([0, 1]))
    assert looks.is_one(output.last + 100, ran([0]))


def test_ranks_are_named_with_their_hosts(hang, output):
    looks = hang()
    looks.declare(output.last, ran([1, 2]), ThisHost(ID, looks.answer))
    assert looks.declared
    assert looks.next_look == NEVER
    assert output.said == [
        f"no output for 10 s; ranks that had not ended: 1 on {HERE}, 2 on other; where they are:"
    ]


def test_of_many_ranks_the_first_are_named(hang, output):
    looks = hang(nproc=40, ppn=40)
    looks.declare(output.last, ran(range(5, 40)), ThisHost(ID, looks.answer))
    (line,) = output.said
    assert f"5 on {HERE}, " in line
    assert f"20 on {HERE} and 19 more; where" in line
    assert "21 on" not in line


def test_it_is_told_when_every_node_has_answered(hang, output, wakes):
    looks, now = hang(), output.last
    looks.declare(now, ran([1, 2, 3]), ThisHost(ID, lambda _: None))
    assert not looks.is_told(now)
    looks.answer(b"rank 1:\nhere\n")
    assert not looks.is_told(now)
    looks.answer(b"rank 2: \xff\n\n")
    assert looks.is_told(now)
    assert output.said[1:] == ["stacks\nrank 1:\nhere", "stacks\nrank 2: \ufffd"]
    assert wakes == [1, 1]
    # once
    assert not looks.is_told(now + 1e9)


def test_a_node_with_nothing_to_say_has_answered(hang, output):
    looks, now = hang(), output.last
    looks.declare(now, ran([0, 2]), ThisHost(ID, lambda _: None))
    looks.answer(b"")
    looks.answer(b"")
    assert looks.is_told(now)
    assert len(output.said) == 1


def test_nodes_that_do_not_answer_are_not_waited_for_for_ever(hang, output, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 3.0)
    looks, now = hang(), output.last
    looks.declare(now, ran([0, 2]), ThisHost(ID, lambda _: None))
    looks.answer(b"rank 0:\nhere")
    assert not looks.is_told(now + 2.9)
    assert looks.is_told(now + 3)
    # what comes late is said, and ends nothing a second time
    looks.answer(b"rank 2:\nthere")
    assert not looks.is_told(now + 4)
    assert output.said[1:] == ["stacks\nrank 0:\nhere", "stacks\nrank 2:\nthere"]


def test_nothing_is_told_before_it_is_declared(hang, output):
    assert not hang().is_told(output.last + 1e9)


def test_real_ranks_of_this_host_are_asked(hang, output, process, until):
    script = "import time; print('ready', flush=True); time.sleep(600)"
    shim = process(
        *("sh", "-c", '"$@"; exit 7', "sh", sys.executable, "-c", script),
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        stdout=-1,
        stderr=-1,
    )
    assert shim.stdout.readline() == b"ready\n"
    looks = hang(hosts=("localhost",))
    nodes = ThisHost(ID, looks.answer)
    nodes.start(1, shim.pid)
    now = output.last + 10
    assert looks.is_one(now, ran([1]))
    looks.declare(now, ran([1]), nodes)
    until(lambda: looks.is_told(now))
    if len(output.said) == 1:  # no py-spy here, or it may not look: the rank has said it itself
        assert b"most recent call first" in shim.communicate(timeout=120)[1]
    else:
        assert output.said[1].startswith("stacks\nrank 1:\n")


def test_a_launch_that_was_stopped_does_not_hang(background, until, tmp_path):
    script = f"for i in $(seq 30); do echo $i; touch {tmp_path}/on; sleep 0.2; done"
    launch = background("-n", "1", "--idle-timeout", "1.5", "sh", "-c", script, stdout=-3)
    until((tmp_path / "on").exists)
    launch.send_signal(signal.SIGSTOP)
    time.sleep(3)  # longer than it may be silent
    launch.send_signal(signal.SIGCONT)
    assert launch.wait(120) == 0
