"""Whatever dies, no process is left: on no host, and not for long."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.faults.launches import parent_of, rank_program


def test_ezpz_launch_is_killed(running):
    """Before ranks that go on at every signal; also no file is left."""
    started = running(["--grace", "1"], rank_program("goes_on"))
    os.kill(started.process.pid, signal.SIGKILL)
    started.leaves_nothing(within=3)
    assert started.done() == []


def test_the_launcher_is_killed(running):
    started = running(["--grace", "1"], rank_program("waits"))
    os.kill(started.launcher(), signal.SIGKILL)
    # Open MPI's own session folder has nobody left to remove it.
    started.ends_with(137, within=4, files=started.place.launcher == "openmpi")


# It takes two waits for the launcher's end: one launcher does for all.
@pytest.mark.under("hydra")
def test_the_launcher_is_stopped_and_ezpz_launch_told_to_end(running):
    """As where it hangs: the ranks are told without it, and in the end it is killed."""
    started = running(["--grace", "1"], rank_program("checkpoints", "0.5"))
    os.kill(started.launcher(), signal.SIGSTOP)
    started.process.send_signal(signal.SIGTERM)
    started.ends_with(143, within=3, done=range(3))


@pytest.mark.under("hydra", "openmpi", "srun", "spawn")
def test_what_runs_a_rank_is_killed(running):
    started = running(["--grace", "1"], rank_program("waits"))
    os.kill(started.rank_main(1), signal.SIGKILL)
    started.ends_with(137, within=4, files=started.place.launcher == "openmpi")
    assert f"1 on {started.place.hosts[1]}" in started.stderr


@pytest.mark.under("hydra", "srun")
def test_a_killed_rank_s_workers_go_with_it(launch):
    """One that is in its process group, and one that has a session of its own."""
    started = launch(["--grace", "1"], rank_program("dies_with_workers"))
    workers = [Path("/proc", str(pid)) for said in started.ranks() for pid in said["workers"]]
    started.ends_with(137, within=5)
    started.until(lambda: not any(worker.exists() for worker in workers), "they are gone")


@pytest.mark.under("hydra", "openmpi")  # Slurm itself kills what is left of a step
@pytest.mark.parametrize(("holds", "deaf_to"), [("holds", "TERM"), ("not", "")])
def test_what_a_rank_leaves_is_ended_and_named(launch, holds, deaf_to):
    """After a success, too, though it has left the rank's process group."""
    started = launch([], rank_program("leaves_a_helper", holds, deaf_to))
    (helper,) = started.ranks()[1]["workers"]
    started.ends_with(0, within=10)
    (line,) = started.stderr.splitlines()
    name = f"pid {helper} (sleep 60) on {os.uname().nodename}"
    assert line.startswith(f"ezpz-launch: a rank left {name} running; ended"), started.stderr


@pytest.mark.under("hydra", "srun")
def test_sigterm_before_the_ranks_are_there(launch):
    started = launch(["--grace", "1"], rank_program("goes_on"))
    started.until(lambda: len(started.left()) > 1, "something is started")
    started.process.send_signal(signal.SIGTERM)
    # Python's own end by it, where that is not running yet.
    assert started.ends(within=5) in (143, -signal.SIGTERM), started.stderr
    started.leaves_nothing()
    assert started.done() == []


def ticks(pid):
    """Return the processor time that a process has used, in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.under("hydra")
def test_hydra_s_proxy_sleeps_when_a_rank_has_ended(launch):
    """By itself it uses all of a core until the last one has."""
    started = launch(["--grace", "1"], rank_program("hangs"))
    first = started.ranks()[0]["pid"]
    proxy = parent_of(started.rank_main(1))
    started.until(lambda: not Path("/proc", str(first)).exists(), "rank 0 has ended")
    time.sleep(0.5)  # what it does at an end
    before = ticks(proxy)
    time.sleep(2)
    assert ticks(proxy) - before < 20
    started.process.send_signal(signal.SIGTERM)
    started.ends_with(143, within=3)
