import pytest

from ezpz_topo import InvalidVariableError, get_allocation


def test_no_job_is_this_host():
    job = get_allocation({})
    assert (job.scheduler, job.job_id, job.num_nodes, job.on_node) == ("none", None, 1, True)


def test_slurm_batch_script_of_four_nodes():
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURMD_NODENAME": "nid001"}
    job = get_allocation(env)
    assert (job.scheduler, job.job_id, job.num_nodes, job.on_node) == ("slurm", "7", 4, True)
    assert job.source == "SLURM_JOB_NUM_NODES"


def test_salloc_shell_is_not_on_a_node():
    assert not get_allocation({"SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}).on_node


def test_a_step_has_its_own_number_of_nodes():
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_STEP_NUM_NODES": "2"}
    assert get_allocation(env).num_nodes == 2


def test_an_interactive_steps_shell_stands_for_the_whole_job():
    env = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_ID": "4294967290", "SLURMD_NODENAME": "nid001",
    }  # fmt: skip
    assert (get_allocation(env).num_nodes, get_allocation(env).on_node) == (4, True)


def test_pbs_counts_hosts_not_lines(tmp_path):
    path = tmp_path / "nodes"
    path.write_text("a.b\na.b\nc.b\n")
    job = get_allocation({"PBS_JOBID": "1.pbs-0001", "PBS_NODEFILE": str(path)})
    assert (job.scheduler, job.job_id, job.num_nodes) == ("pbs", "1.pbs-0001", 2)


@pytest.mark.parametrize(
    ("env", "what"),
    [
        ({"SLURM_JOB_ID": "7"}, "SLURM_JOB_NUM_NODES"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "many"}, "many"),
        ({"PBS_JOBID": "1.x"}, "PBS_NODEFILE"),
        ({"PBS_JOBID": "1.x", "PBS_NODEFILE": "/nonexistent"}, "/nonexistent"),
    ],
)
def test_a_job_that_does_not_tell_its_nodes_is_an_error(env, what):
    with pytest.raises(InvalidVariableError, match=what):
        get_allocation(env)
