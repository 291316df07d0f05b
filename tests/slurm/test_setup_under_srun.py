"""ezpz_dist under srun: ranks that nobody told where to meet, meet and train."""

import pytest


@pytest.fixture
def words(program, said_in):
    return [*program("take_step"), str(said_in)]


def assert_trained(said, size):
    assert [one["rank"] for one in said] == list(range(size))
    for one in said:
        assert one["ranks"] == size
        assert one["sum_of_ranks"] == size * (size - 1) // 2
        assert one["moved"] == pytest.approx((size - 1) / 2), "the mean of the ranks' gradients"
        assert one["same_weights"]
        assert one["group_is_gone"]


def test_two_steps_of_one_job_derive_an_address_each(slurm, sandbox, words, said_in, tmp_path):
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    both = (
        'srun --exact -N 1 -n 2 "$@" & first=$!; '
        'srun --exact -N 1 -n 2 "$@"; second=$?; '
        "wait $first && exit $second"
    )
    command = ["salloc", "-Q", "-N", "2", "-n", "4", "sh", "-c", both, "sh"]
    done = slurm.run([*command, *words, "--meet", "4", str(meeting)])
    said = sandbox.reports(said_in)
    steps = sorted({one["step"] for one in said})
    assert len(steps) == 2
    for step in steps:
        assert_trained([one for one in said if one["step"] == step], 2)
        assert done.stderr.count(f"address by derived from Slurm step {step}") == 2
    addresses = {(one["step"], one["address"]) for one in said}
    assert len(addresses) == len({address for _, address in addresses}) == 2
    for _, address in addresses:
        host, _, port = address.partition(":")
        assert host == "127.0.0.1"
        assert 20000 <= int(port) < 30000


def test_a_rank_that_fails_fails_the_step(slurm, words, said_in):
    # Well within the 60 s of set-up's timeout: the peer learns of it, it does not wait.
    command = ["srun", "-N", "1", "-n", "2", *words, "--fail", "1", "3"]
    done = slurm.run(command, expect=None, timeout=300)
    assert done.returncode == 3
    assert "task 1: Exited with exit code 3" in done.stderr
    assert "task 0: Exited with exit code 1" in done.stderr
    assert list(said_in.iterdir()) == [], "no rank took the step"
