"""What ezpz_topo says of launchers inside launchers: the innermost counts, not what it inherits."""

from tests.slurm.topology import JOB, assert_ranks_of_a_step, row


def slurm_row(rank, size, local, local_size, node):
    return ("slurm", rank, size, local, local_size, node)


def test_srun_within_a_rank_of_ezpz_launch(batch, tool):
    launch = f"{tool('ezpz-launch')} -n 1"
    said = batch(f"{launch} srun --overlap -N 1 -n 2 say", "-N", "1", "-n", "2")
    assert [row(one) for one in said] == [slurm_row(0, 2, 0, 2, 0), slurm_row(1, 2, 1, 2, 0)]
    assert_ranks_of_a_step(said)
    for one in said:
        assert (one["env"]["EZPZ_RANK"], one["env"]["EZPZ_WORLD_SIZE"]) == ("0", "1"), "inherited"
        assert "slurm before ezpz" in one["rank_info"]["notes"][0]


def test_steps_that_give_ranks_the_numbers_that_they_inherit(say, tool):
    # Rank 1 of 2 starts a step, and that has a rank 1 of 2 on another node.
    outer = (tool("mpiexec"), "-iface", "lo", "-n", "2", "-ppn", "2")
    said = say(*JOB, *outer, "srun", "--overlap", "-N", "2", "-n", "2")
    for one in said:
        assert row(one) == slurm_row(one["rank"], 2, 0, 1, one["rank"])


def test_mpiexec_within_a_step_of_one_task(say, tool):
    # Hydra would start its proxies by srun, which waits for what this step has.
    inner = (tool("mpiexec"), "-launcher", "fork", "-iface", "lo", "-n", "2")
    said = say("srun", "-N", "1", "-n", "1", "-c", "2", *inner)
    assert [row(one) for one in said] == [("pmi", 0, 2, 0, 2, 0), ("pmi", 1, 2, 1, 2, 0)]
    assert {one["env"]["SLURM_STEP_NUM_TASKS"] for one in said} == {"1"}, "inherited"
    assert {one["num_nodes"] for one in said} == {1}
