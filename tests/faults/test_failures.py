"""A rank fails: the exit status is its own, it is named, and the others are ended."""

import pytest
from tests.faults.launches import MEET_HERE, rank_program

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
KILLED = "was killed by {} (exit status {})"


@pytest.mark.with_torchrun
@pytest.mark.parametrize(
    ("behaviour", "status", "how"),
    [(("exits", "3"), 3, EXITED_3), (("dies", "SIGKILL"), 137, KILLED.format("SIGKILL", 137))],
    ids=["exits 3", "kill -9"],
)
def test_a_rank_fails(launch, behaviour, status, how):
    fails(launch(["--grace", "2"], rank_program(*behaviour)), status, how)


# What the shim reports is the same under each launcher: two of them do.
@pytest.mark.without("openmpi", "spawn")
def test_segfault_of_a_rank_whose_output_is_labelled(launch):
    """Another process stands between the shim and the rank."""
    started = launch(["--grace", "2", "--prefix"], rank_program("segfaults"))
    fails(started, 139, KILLED.format("SIGSEGV", 139))


def test_survivors_that_ignore_sigterm_are_killed(launch):
    started = launch(["--grace", "1"], rank_program("stays_deaf"))
    fails(started, 3, EXITED_3, grace=1)
    # It is asked first, and once.
    assert [started.heard(rank) for rank in range(3)] == [["SIGTERM"], [], ["SIGTERM"]]


def test_survivors_have_the_grace(launch):
    """The others need longer than any launcher gives by itself, and get it."""
    started = launch(["--grace", "600"], rank_program("exits_beside_checkpoints", "3", "1.2"))
    fails(started, 3, EXITED_3, grace=1.2)
    assert started.done() == [0, 2]


def test_ranks_that_all_fail_end_by_themselves(launch):
    # Hydra by itself would say 3 | 9 = 11; nobody needs to be ended.
    started = launch([], rank_program("all_exit", "3"))
    started.ends_with(3, within=3, done=range(3))
    assert_first(started, EXITED_3)


def test_a_failure_in_a_flood_of_errors_is_seen(launch):
    started = launch(["--grace", "2"], rank_program("shouts"))
    fails(started, 3, EXITED_3)
    assert not {"\x1e", "\x1f"} & set(started.stderr)


def test_the_first_ends_well_and_the_others_go_on(running):
    started = running(MEET_HERE, rank_program("first_ends"))
    started.ends_with(0, within=5, done=range(3))
    assert started.stderr == ""
