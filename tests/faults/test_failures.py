"""A rank fails: the exit status is its own, it is named, and the others are ended."""

import pytest
from tests.faults.launches import rank_program

SETTLE = 1.0
"""Seconds that the others have to end by themselves."""


def assert_first(launch, how):
    """Assert that rank 1 is named once, and no other."""
    name = launch.place.hosts[1]
    said = [line for line in launch.stderr.splitlines() if "first of all ranks" in line]
    assert len(said) == 1, launch.stderr
    assert said[0].startswith(f"ezpz-launch: rank 1 on {name} {how}, first of all ranks")


def fails(launch, status, how, grace=2.0):
    """Assert how a launch ends in which rank 1 fails and the others would go on."""
    launch.ranks()
    launch.ends_with(status, within=SETTLE + grace + 2)
    assert_first(launch, how)


EXITED_3 = "exited with status 3"


def test_kill_9_of_a_rank(launch):
    started = launch(["--grace", "2"], rank_program("dies", "SIGKILL"))
    fails(started, 137, "was killed by SIGKILL (exit status 137)")


# What a rank's process reports is the same under each launcher.
@pytest.mark.under("hydra")
def test_segfault_of_a_rank_whose_output_is_labelled(launch):
    """With its output passed on."""
    started = launch(["--grace", "2", "--prefix"], rank_program("segfaults"))
    fails(started, 139, "was killed by SIGSEGV (exit status 139)")


@pytest.mark.under("hydra", "openmpi", "srun", "spawn")
def test_survivors_that_ignore_sigterm_are_killed(launch):
    started = launch(["--grace", "1"], rank_program("stays_deaf"))
    fails(started, 3, EXITED_3, grace=1)
    # It is asked first, and once.
    assert [started.heard(rank) for rank in range(3)] == [["SIGTERM"], [], ["SIGTERM"]]


@pytest.mark.under("hydra", "openmpi", "srun")
def test_survivors_have_the_grace(launch):
    """The others need longer than any launcher gives by itself, and get it."""
    started = launch(["--grace", "600"], rank_program("exits_beside_checkpoints", "3", "1.2"))
    fails(started, 3, EXITED_3, grace=1.2)
    assert started.done() == [0, 2]


@pytest.mark.under("hydra", "srun")
def test_ranks_that_all_fail_end_by_themselves(launch):
    # Hydra by itself would say 3 | 9 = 11; nobody needs to be ended.
    started = launch([], rank_program("all_exit", "3"))
    started.ends_with(3, within=3, done=range(3))
    assert_first(started, EXITED_3)


@pytest.mark.under("hydra", "openmpi", "srun")
def test_a_failure_in_a_flood_of_errors_is_seen(launch):
    started = launch(["--grace", "2"], rank_program("shouts"))
    fails(started, 3, EXITED_3)
    assert not {"\x1e", "\x1f"} & set(started.stderr)
