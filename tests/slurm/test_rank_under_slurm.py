"""What ezpz_topo says of processes that a real Slurm started, in all the ways it can."""

import shlex

import pytest

ONE_PROCESS = ("none", 0, 1, 0, 1, 0)


def row(said):
    """Return launcher, rank, world size, local rank, local world size, node rank."""
    return (
        said["launcher"],
        said["rank"],
        said["world_size"],
        said["local_rank"],
        said["local_world_size"],
        said["node_rank"],
    )


@pytest.fixture
def words(program, tmp_path):
    return [*program("say_rank"), str(tmp_path)]


@pytest.fixture
def say(slurm, sandbox, words, tmp_path):
    """Start the program by the words given, and return what each process said."""

    def run(*launcher, env=None, mpi=False):
        command = [*launcher, *words, *(["--mpi"] if mpi else [])]
        slurm.run(command, env=env)
        return sandbox.reports(tmp_path)

    return run


def test_srun_on_two_nodes(say):
    said = say("srun", "-N", "2", "-n", "4", "--ntasks-per-node", "2")
    assert [row(one) for one in said] == [
        ("slurm", 0, 4, 0, 2, 0),
        ("slurm", 1, 4, 1, 2, 0),
        ("slurm", 2, 4, 0, 2, 1),
        ("slurm", 3, 4, 1, 2, 1),
    ]
    first, second = sorted({one["node"] for one in said})
    assert [one["node"] for one in said] == [first, first, second, second]


def test_srun_cyclic(say):
    said = say("srun", "-N", "2", "-n", "4", "--distribution", "cyclic")
    assert [row(one) for one in said] == [
        ("slurm", 0, 4, 0, 2, 0),
        ("slurm", 1, 4, 0, 2, 1),
        ("slurm", 2, 4, 1, 2, 0),
        ("slurm", 3, 4, 1, 2, 1),
    ]
    first, second = sorted({one["node"] for one in said})
    assert [one["node"] for one in said] == [first, second, first, second]


def test_nodes_with_unequal_numbers_of_tasks(say):
    said = say("srun", "-N", "3", "-n", "5")
    assert {one["tasks_per_node"] for one in said} == {"2(x2),1"}
    assert [row(one) for one in said] == [
        ("slurm", 0, 5, 0, 2, 0),
        ("slurm", 1, 5, 1, 2, 0),
        ("slurm", 2, 5, 0, 2, 1),
        ("slurm", 3, 5, 1, 2, 1),
        ("slurm", 4, 5, 0, 1, 2),
    ]


def test_an_arbitrary_distribution_over_nodes(say):
    said = say(
        "srun", "-n", "5", "--distribution", "arbitrary",
        "--nodelist", "nid003,nid001,nid001,nid004,nid003",
    )  # fmt: skip
    # Whatever order Slurm chooses: the ranks of one node agree, and are numbered from 0.
    for node, size in {"nid001": 2, "nid003": 2, "nid004": 1}.items():
        here = [one for one in said if one["node"] == node]
        assert [one["local_rank"] for one in here] == list(range(size)), node
        assert {one["local_world_size"] for one in here} == {size}, node
        assert len({one["node_rank"] for one in here}) == 1, node
    assert {one["node_rank"] for one in said} == {0, 1, 2}
    assert [one["rank"] for one in said] == [0, 1, 2, 3, 4]


def test_a_batch_script_and_a_step_smaller_than_its_job(slurm, sandbox, program, tmp_path):
    of_body, of_step = tmp_path / "body", tmp_path / "step"
    of_body.mkdir()
    of_step.mkdir()
    me = program("say_rank")
    slurm.batch(
        f"{shlex.join([*me, str(of_body)])}\n"
        f"{shlex.join(['srun', '-N', '1', '-n', '2', *me, str(of_step)])}",
        "-N", "2", "-n", "4",
    )  # fmt: skip
    (body,) = sandbox.reports(of_body)
    assert row(body) == ONE_PROCESS
    assert (body["procid"], body["ntasks"], body["step"]) == ("0", "4", None), "Slurm's trap"
    assert [row(one) for one in sandbox.reports(of_step)] == [
        ("slurm", 0, 2, 0, 2, 0),
        ("slurm", 1, 2, 1, 2, 0),
    ]


def test_a_step_on_the_second_node_only(say):
    job = ["salloc", "-Q", "-w", "nid001,nid002", "-n", "4"]
    said = say(*job, "srun", "-w", "nid002", "-N", "1", "-n", "2")
    assert [row(one) for one in said] == [("slurm", 0, 2, 0, 2, 0), ("slurm", 1, 2, 1, 2, 0)]
    assert {one["node"] for one in said} == {"nid002"}


def test_a_salloc_shell_is_one_process(say):
    (said,) = say("salloc", "-Q", "-N", "2", "-n", "4")
    assert row(said) == ONE_PROCESS
    assert (said["procid"], said["ntasks"]) == (None, "4")


def test_an_interactive_step_is_one_process(say):
    (said,) = say("salloc", "-Q", "-N", "2", "-n", "4", "srun", "--interactive", "-N1", "-n1")
    assert said["step"] == "4294967290"
    assert row(said) == ONE_PROCESS


def test_mpiexec_on_one_node_of_a_job(say, tool):
    said = say("salloc", "-Q", "-N", "1", "-n", "2",
               tool("mpiexec"), "-iface", "lo", "-n", "2", mpi=True)  # fmt: skip
    assert [row(one) for one in said] == [("pmi", 0, 2, 0, 2, 0), ("pmi", 1, 2, 1, 2, 0)]
    assert [one["mpi"] for one in said] == [[0, 2], [1, 2]], "MPI itself agrees"


def test_mpiexec_across_nodes_outranks_the_slurm_step_of_its_proxies(say, tool):
    said = say("salloc", "-Q", "-N", "2", "-n", "4",
               tool("mpiexec"), "-iface", "lo", "-n", "4", mpi=True)  # fmt: skip
    assert [row(one)[:5] for one in said] == [
        ("pmi", 0, 4, 0, 2),
        ("pmi", 1, 4, 1, 2),
        ("pmi", 2, 4, 0, 2),
        ("pmi", 3, 4, 1, 2),
    ]
    assert [one["mpi"] for one in said] == [[rank, 4] for rank in range(4)], "MPI itself agrees"
    # A valid step, and in it the rank of the proxy.
    assert [one["procid"] for one in said] == ["0", "0", "1", "1"]
    assert {one["step"] for one in said} == {"0"}


def test_srun_with_pmi2(say):
    said = say("srun", "--mpi=pmi2", "-N", "2", "-n", "4", mpi=True)
    assert [row(one) for one in said] == [
        ("slurm", 0, 4, 0, 2, 0),
        ("slurm", 1, 4, 1, 2, 0),
        ("slurm", 2, 4, 0, 2, 1),
        ("slurm", 3, 4, 1, 2, 1),
    ]
    assert [one["mpi"] for one in said] == [[rank, 4] for rank in range(4)], "MPI itself agrees"


def test_a_leftover_of_the_users_shell_does_not_count(say):
    leftover = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    said = say("srun", "-N", "1", "-n", "2", env=leftover)
    assert [row(one) for one in said] == [("slurm", 0, 2, 0, 2, 0), ("slurm", 1, 2, 1, 2, 0)]


def test_torchrun_in_a_batch_script(slurm, sandbox, words, tool, tmp_path):
    command = shlex.join([tool("torchrun"), "--standalone", "--nproc-per-node", "2", *words[1:]])
    slurm.batch(command, "-N", "1", "-n", "2")
    said = sandbox.reports(tmp_path)
    assert [row(one) for one in said] == [("torchrun", 0, 2, 0, 2, 0), ("torchrun", 1, 2, 1, 2, 0)]
    assert [one["procid"] for one in said] == ["0", "0"], "Slurm's trap"
