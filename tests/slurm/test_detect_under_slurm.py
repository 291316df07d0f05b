"""What ezpz_topo says of jobs, steps and their hosts, held to what scontrol says of them."""

import shlex

import pytest
from tests.slurm.topology import (
    HET_JOB,
    JOB,
    assert_one_process_of_the_job,
    assert_ranks_of_a_step,
    hosts,
    row,
)


def test_a_batch_script(batch):
    (said,) = batch("say", "-N", "2", "-n", "3", "-J", "two words", "-p", "all")
    assert_one_process_of_the_job(said, [2, 1], on_node=True)
    assert (said["allocation"]["name"], said["allocation"]["queue"]) == ("two words", "all")
    assert said["allocation"]["ends_at"] is None, "22.05.8 tells it by no variable"
    assert (said["env"]["SLURM_PROCID"], said["env"]["SLURM_NTASKS"]) == ("0", "3"), "Slurm's trap"


def test_a_batch_script_that_a_step_has_submitted(batch, say, said_in):
    # sbatch hands on the variables of the step that it runs in.
    (step,) = say("srun", "-N", "1", "-n", "1")
    for file in said_in.iterdir():
        file.unlink()
    (said,) = batch("say", "-N", "2", "-n", "4", env=step["env"])
    assert said["env"]["SLURM_STEP_ID"] == "0", "Slurm's trap"
    assert row(said) == ("none", 0, 1, 0, 1, 0)
    assert hosts(said) == said["scontrol"]["job"]
    assert len(hosts(said)) == 2


def test_a_salloc_shell_is_on_no_node(say):
    (said,) = say("salloc", "-Q", "-N", "3", "-n", "5")
    assert not said["started_commands"], "who does not ask starts none"
    assert_one_process_of_the_job(said, [2, 2, 1], on_node=False)


def test_a_salloc_shell_on_a_node_of_its_own_job(say, renamed):
    (said,) = say("salloc", "-Q", "-w", "nid001,nid002", "-n", "4", *renamed("nid002"))
    assert_one_process_of_the_job(said, [2, 2], on_node=True)


def test_an_interactive_step_stands_for_the_whole_job(say):
    (said,) = say(*JOB, "srun", "--interactive", "-N", "1", "-n", "1")
    assert said["scontrol"]["step"] == said["scontrol"]["job"][:1], "Slurm's trap"
    assert said["env"]["SLURM_STEP_ID"] == "4294967290"
    assert_one_process_of_the_job(said, None, on_node=True)


def test_a_step_within_an_interactive_step(say):
    said = say(*JOB, "srun", "--interactive", "-N", "1", "-n", "1", "srun", "-N", "2", "-n", "4")
    assert_ranks_of_a_step(said)
    assert hosts(said[0]) == said[0]["scontrol"]["job"]


@pytest.mark.parametrize(("options", "nodes"), [
    ("-N 2 -n 4 --distribution cyclic", [0, 1, 0, 1]),
    ("-N 2 -n 4 --mpi=pmi2", [0, 0, 1, 1]),
    ("-N 3 -n 5", [0, 0, 1, 1, 2]),
    # in whatever order Slurm chooses
    ("-n 5 --distribution arbitrary -w nid003,nid001,nid001,nid004,nid003", None),
    ("-N 1 -n 1", [0]),
], ids=["cyclic", "pmi2", "uneven", "arbitrary", "one task"])  # fmt: skip
def test_the_ranks_of_a_step(say, options, nodes):
    has_mpi = "pmi2" in options
    leftover = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # of the user's shell
    said = say("srun", *options.split(), then=("--mpi",) * has_mpi, env=leftover)
    assert_ranks_of_a_step(said)
    assert hosts(said[0]) == said[0]["scontrol"]["job"]
    # who does not ask starts no command
    asked = [(one["started_commands"], one["allocation"]["ends_at"]) for one in said]
    assert set(asked) == {(False, None)}
    assert nodes is None or [one["node_index"] for one in said] == nodes
    assert not has_mpi or [one["mpi"][:2] for one in said] == [[rank, 4] for rank in range(4)]


def test_a_step_on_other_nodes_than_the_first(say):
    job = ("salloc", "-Q", "-w", "nid001,nid002,nid003", "-n", "6")
    said = say(*job, "srun", "-w", "nid002,nid003", "-N", "2", "-n", "3")
    assert_ranks_of_a_step(said)
    assert hosts(said[0]) == ["nid002", "nid003"]
    assert said[0]["scontrol"]["job"] == ["nid001", "nid002", "nid003"]


def test_a_step_of_a_part_of_a_heterogeneous_job(say):
    said = say(*HET_JOB, "srun", "--het-group=1")
    assert_ranks_of_a_step(said)
    assert hosts(said[0]) == said[0]["scontrol"]["job"][1:]


def test_mpiexec_across_nodes_outranks_the_slurm_step_of_its_proxies(say, tool):
    said = say(*JOB, tool("mpiexec"), "-iface", "lo", "-n", "4", then=("--mpi",))
    assert [row(one)[:5] for one in said] == [("pmi", n, 4, n % 2, 2) for n in range(4)]
    assert [one["mpi"][:2] for one in said] == [[rank, 4] for rank in range(4)], "MPI itself agrees"
    for one in said:
        assert hosts(one) == one["scontrol"]["job"]
        assert hosts(one)[one["node_index"]] == one["env"]["SLURMD_NODENAME"]
        assert one["in_use"] == one["total"] == 4
    # A valid step, and in it the rank of the proxy.
    assert [one["env"]["SLURM_PROCID"] for one in said] == ["0", "0", "1", "1"]
    assert {one["env"]["SLURM_STEP_ID"] for one in said} == {"0"}


def test_mpiexec_across_nodes_finds_its_node_by_the_hosts_name(say, tool, renamed):
    own_name = ("sh", "-c", f'exec {shlex.join(renamed("")[:-1])} "$SLURMD_NODENAME" "$@"', "sh")
    # As it starts over ssh: no slurmd tells the node's name.
    unnamed = ("env", "-u", "SLURMD_NODENAME")
    said = say(*JOB, tool("mpiexec"), "-iface", "lo", "-n", "4", *own_name, *unnamed)
    assert [one["node_index"] for one in said] == [0, 0, 1, 1]
    for one in said:
        assert hosts(one)[one["node_index"]] == one["hostname"]
