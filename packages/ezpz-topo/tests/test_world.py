import pytest

import ezpz_topo
from ezpz_topo import IncompleteLauncherError, get_hostname

HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
FLUX = {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1"}
BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nid[001-002]", "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1", "SLURMD_NODENAME": "nid001",
}  # fmt: skip
NO_DEVICE = {"TORCH_DEVICE": "cpu"}


def pbs_job(tmp_path, *hosts):
    path = tmp_path / "nodes"
    path.write_text("".join(f"{host}\n" for host in hosts))
    return {"PBS_JOBID": "1.pbs-0001", "PBS_NODEFILE": str(path)}


def test_one_process_without_a_job():
    env = NO_DEVICE
    assert ezpz_topo.get_num_nodes(env) == 1
    assert ezpz_topo.get_node_index(env) == 0
    assert ezpz_topo.get_world_size(env) == 1
    assert ezpz_topo.get_world_size_in_use(env) == 1
    assert ezpz_topo.get_world_size_total(env) == 1
    assert ezpz_topo.get_gpus_per_node(env) == 0


def test_the_nodes_of_a_job_count_also_where_no_ranks_run():
    assert ezpz_topo.get_num_nodes(BATCH) == 2
    assert ezpz_topo.get_world_size(BATCH) == 1


def test_room_is_one_rank_a_device():
    # a login node, where the machine's file tells of its nodes
    env = {**BATCH, "EZPZ_MACHINE": "perlmutter"}
    del env["SLURMD_NODENAME"]
    assert ezpz_topo.get_gpus_per_node(env) == 4
    assert ezpz_topo.get_world_size_total(env) == 8
    assert ezpz_topo.get_world_size(env, total=True) == 8
    assert ezpz_topo.get_world_size(env, in_use=True) == 1


def test_a_node_that_shows_no_device_has_none_whatever_its_machine():
    # Perlmutter's CPU nodes are Perlmutter too.
    assert ezpz_topo.get_gpus_per_node({**BATCH, "EZPZ_MACHINE": "perlmutter"}) == 0


def test_room_without_devices_is_what_the_scheduler_foresees():
    assert ezpz_topo.get_world_size_total({**BATCH, **NO_DEVICE}) == 3
    many = {**HYDRA, "MPI_LOCALRANKID": "5", "MPI_LOCALNRANKS": "8"}
    assert ezpz_topo.get_world_size_total({**many, **NO_DEVICE}) == 8, "never less than run"


def test_total_and_in_use_at_once_make_no_sense():
    with pytest.raises(ValueError, match="expected one"):
        ezpz_topo.get_world_size({}, total=True, in_use=True)


def test_nodes_without_a_scheduler_are_those_of_the_ranks():
    torchrun = {"RANK": "5", "WORLD_SIZE": "12", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
                "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3"}  # fmt: skip
    assert ezpz_topo.get_num_nodes(torchrun) == 3
    assert ezpz_topo.get_node_index(torchrun) == 1


# Division would be a guess: it is right where the layout is even, which no rank can see alone.
@pytest.mark.parametrize("env", [FLUX, HYDRA, {**HYDRA, "PMI_SIZE": "7"}])
def test_several_nodes_that_nobody_counts_are_an_error(env):
    with pytest.raises(IncompleteLauncherError, match="expected to be told the number of nodes"):
        ezpz_topo.get_num_nodes(env)


def test_node_index_is_the_hosts_place_where_every_node_has_ranks(tmp_path):
    job = pbs_job(tmp_path, "elsewhere.example", f"{get_hostname()}.hsn.example")
    assert ezpz_topo.get_node_index({**HYDRA, **job}) == 1
    in_turn = {**HYDRA, "PMI_RANK": "3"}
    assert ezpz_topo.get_node_index({**in_turn, **job}) == 1


def test_node_index_is_not_guessed_where_the_ranks_are_not_those_of_the_hosts_place(tmp_path):
    # ranks 0 and 1 here, four on the third node, none on the first
    job = pbs_job(tmp_path, "x", get_hostname(), "y")
    env = {"PMI_RANK": "0", "PMI_SIZE": "6", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(IncompleteLauncherError, match="does not tell which node"):
        ezpz_topo.get_node_index({**env, **job})


def test_node_index_is_not_guessed_where_some_nodes_have_no_ranks(tmp_path):
    job = pbs_job(tmp_path, "a", "b", "c", get_hostname())
    with pytest.raises(IncompleteLauncherError, match="does not tell which node"):
        ezpz_topo.get_node_index({**HYDRA, **job})


def test_node_index_of_a_host_outside_the_job_is_not_guessed(tmp_path):
    with pytest.raises(IncompleteLauncherError, match="does not tell which node"):
        ezpz_topo.get_node_index({**HYDRA, **pbs_job(tmp_path, "a", "b")})


def test_a_torchrun_node_beyond_its_group_is_impossible():
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
           "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "2"}  # fmt: skip
    with pytest.raises(ezpz_topo.InvalidVariableError, match="GROUP_RANK=2"):
        ezpz_topo.get_node_index(env)
