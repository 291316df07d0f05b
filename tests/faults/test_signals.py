"""A signal to ezpz-launch reaches the ranks as such, and they have the grace that was promised."""

import signal

import pytest
from tests.faults.launches import rank_program


def all_hear(launch, *names):
    """Assert that every rank hears just these, at once, and each once."""
    launch.until(
        lambda: all(len(launch.heard(rank)) >= len(names) for rank in range(3)),
        f"every rank hears {names}",
        5,
    )
    assert [launch.heard(rank) for rank in range(3)] == [list(names)] * 3


@pytest.mark.with_torchrun
def test_sigterm_leaves_5_s_for_a_checkpoint(launch):
    started = launch([], rank_program("checkpoints", "5"))
    started.ranks()
    started.process.send_signal(signal.SIGTERM)
    all_hear(started, "SIGTERM")
    assert started.ends(within=7) == 143
    assert started.done() == [0, 1, 2]
    all_hear(started, "SIGTERM")
    started.leaves_nothing()


def test_sigterm_to_ranks_whose_output_is_labelled(launch):
    """Another process stands between the shim and the rank: it neither ends nor tells twice."""
    started = launch(["--prefix"], rank_program("checkpoints", "1"))
    started.ranks()
    started.process.send_signal(signal.SIGTERM)
    assert started.ends(within=3) == 143
    assert started.done() == [0, 1, 2]
    all_hear(started, "SIGTERM")
    started.leaves_nothing()


def test_sigterm_to_ranks_below_a_shell_script(launch):
    """A shell that only waits for the training must not die of what is meant for that."""
    script = 'export X=1; "$@"; exit $?'
    started = launch([], ["bash", "-c", script, "bash", *rank_program("checkpoints", "1")])
    started.ranks()
    started.process.send_signal(signal.SIGTERM)
    assert started.ends(within=3) == 143
    assert started.done() == [0, 1, 2]
    all_hear(started, "SIGTERM")
    started.leaves_nothing()


ENDING = {
    "sigint": (signal.SIGINT, 130),
    "sighup": (signal.SIGHUP, 129),
    "sigquit": (signal.SIGQUIT, 131),
}


@pytest.mark.parametrize("name", ENDING)
def test_it_ends_the_ranks_as_itself(launch, name):
    number, status = ENDING[name]
    started = launch([], rank_program("checkpoints", "0.3"))
    started.ranks()
    started.process.send_signal(number)
    assert started.ends(within=2) == status
    assert started.done() == [0, 1, 2]
    all_hear(started, number.name)
    started.leaves_nothing()


def test_ctrl_c(launch):
    """From the keyboard of a real terminal, to ranks that do nothing about it."""
    started = launch([], rank_program("waits"), on_terminal=True)
    started.ranks()
    started.press_ctrl_c()
    assert started.ends(within=2) == 130
    assert "KeyboardInterrupt" in started.stderr
    assert "_cli.py" not in started.stderr, "that of a rank, not of ezpz-launch"
    started.leaves_nothing()


@pytest.mark.with_torchrun
def test_a_second_ctrl_c_does_not_wait(launch):
    started = launch(["--grace", "600"], rank_program("checkpoints", "600"), on_terminal=True)
    started.ranks()
    started.press_ctrl_c()
    all_hear(started, "SIGINT")
    started.press_ctrl_c()
    assert started.ends(within=2) == 130
    assert started.done() == []
    started.leaves_nothing()


def test_the_grace_ends(launch):
    started = launch(["--grace", "1"], rank_program("checkpoints", "600"))
    started.ranks()
    started.process.send_signal(signal.SIGTERM)
    assert started.ends(within=3) == 143
    assert started.done() == []
    started.leaves_nothing()


@pytest.mark.with_torchrun
def test_sigusr1_and_sigusr2_end_nothing(launch):
    started = launch([], rank_program("goes_on"))
    started.ranks()
    started.process.send_signal(signal.SIGUSR1)
    all_hear(started, "SIGUSR1")
    started.process.send_signal(signal.SIGUSR2)
    all_hear(started, "SIGUSR1", "SIGUSR2")
    assert started.process.poll() is None
    (started.said / "go").touch()
    assert started.ends(within=5) == 0, started.stderr
    assert started.done() == [0, 1, 2]
    started.leaves_nothing()


def test_a_checkpoint_that_asks_to_be_requeued(launch):
    # sbatch --signal=USR1 reaches the ranks, which save and end together, as one does.
    started = launch([], rank_program("requeues", "75"))
    started.ranks()
    started.process.send_signal(signal.SIGUSR1)
    assert started.ends(within=4) == 75, started.stderr
    assert started.done() == [0, 1, 2]
    started.leaves_nothing()
