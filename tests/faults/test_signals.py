"""A signal to ezpz-launch reaches the ranks as such, and they have the grace that was promised."""

import signal

import pytest
from tests.faults.launches import rank_program


def test_sigterm_leaves_5_s_for_a_checkpoint(running, place):
    # By themselves launchers give none, or a second; what they do after 3 s one of them shows.
    seconds = "5" if place.launcher == "hydra" else "3"
    started = running([], rank_program("checkpoints", seconds))
    started.process.send_signal(signal.SIGTERM)
    started.all_hear("SIGTERM")
    started.ends_with(143, within=7, done=range(3))
    started.all_hear("SIGTERM")


# Another process stands between the shim and the rank: the pump neither ends nor tells twice, and
# a shell that only waits for the training must not die of what is meant for that.
SHELL = ["bash", "-c", 'export X=1; "$@"; exit $?', "bash"]
ENDING = {
    "sigint": (signal.SIGINT, [], []),
    "sighup, a shell script": (signal.SIGHUP, [], SHELL),
    "sigquit, labelled output": (signal.SIGQUIT, ["--prefix"], []),
}


@pytest.mark.under("hydra")  # that each launcher hands signals on is held by the others
@pytest.mark.parametrize("name", ENDING)
def test_it_ends_the_ranks_as_itself(running, name):
    number, options, before = ENDING[name]
    started = running(options, [*before, *rank_program("checkpoints", "0.3")])
    started.process.send_signal(number)
    started.ends_with(128 + number, within=2, done=range(3))
    started.all_hear(number.name)


@pytest.mark.under("hydra")
def test_the_grace_ends(running):
    started = running(["--grace", "1"], rank_program("checkpoints", "600"))
    started.process.send_signal(signal.SIGTERM)
    started.ends_with(143, within=3, done=[])


def test_sigusr1_and_sigusr2_end_nothing(running):
    started = running([], rank_program("goes_on"))
    started.process.send_signal(signal.SIGUSR1)
    started.all_hear("SIGUSR1")
    started.process.send_signal(signal.SIGUSR2)
    started.all_hear("SIGUSR1", "SIGUSR2")
    assert started.process.poll() is None
    (started.said / "go").touch()
    started.ends_with(0, within=5, done=range(3))


@pytest.mark.under("srun")
def test_slurm_s_own_signal_reaches_each_rank_once(running, slurm):
    """As with ``salloc --signal=USR1@300``, which signals what the steps run."""
    started = running([], rank_program("goes_on"))
    job = started.ranks()[0]["environment"]["SLURM_JOB_ID"]
    slurm.run(["scancel", "--signal=USR1", job])
    started.all_hear("SIGUSR1")
    (started.said / "go").touch()
    started.ends_with(0, within=5, done=range(3))
    started.all_hear("SIGUSR1")
