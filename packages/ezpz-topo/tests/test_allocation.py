import pytest

from ezpz_topo import InvalidVariableError, SchedulerError, get_allocation, get_hostname


def test_no_job_is_this_host():
    job = get_allocation({})
    assert (job.scheduler, job.job_id, job.hosts, job.on_node) == (
        "none", None, (get_hostname(),), True,
    )  # fmt: skip
    assert "no job variables" in job.sources["hosts"]


def test_the_scheduler_is_decided_by_job_variables_only(tmp_path):
    # qsub and qstat on PATH, and a user's defaults for Slurm, prove nothing.
    (tmp_path / "qsub").touch(mode=0o755)
    (tmp_path / "qstat").touch(mode=0o755)
    env = {"PATH": str(tmp_path), "SLURM_CONF": "/etc/slurm.conf", "PBS_O_HOST": "login1"}
    assert get_allocation(env).scheduler == "none"


def test_asking_where_no_scheduler_is_installed(tmp_path):
    job = get_allocation({"PATH": str(tmp_path)}, ask=True)
    assert job.scheduler == "none"
    assert "no scheduler here" in job.sources["scheduler"]


# The words of Slurm 22.05.8 and OpenPBS 23.06 without a configuration.
NOT_SET_UP = {
    "squeue": "echo squeue: fatal: Could not establish a configuration source >&2; exit 1",
    "qselect": "echo 'qselect: cannot connect to server  (errno=0)' >&2; exit 1",
}


@pytest.mark.parametrize("client", NOT_SET_UP)
def test_a_client_that_is_not_set_up_hides_no_other_schedulers_answer(tmp_path, client):
    for name, words in NOT_SET_UP.items():
        body = words if name == client else "exit 0"  # no job of this user
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/bin", "USER": "alice"}
    assert get_allocation(env, ask=True).scheduler == "none"
    # one that is set up, and does not answer, is told
    (tmp_path / "squeue").write_text("#!/bin/sh\necho squeue: Unable to contact >&2; exit 1\n")
    with pytest.raises(SchedulerError, match="Unable to contact"):
        get_allocation(env, ask=True)


def test_two_jobs_at_once_are_an_error():
    with pytest.raises(InvalidVariableError, match=r"SLURM_JOB_ID=7 and PBS_JOBID=1.pbs.*unset"):
        get_allocation({"PBS_JOBID": "1.pbs", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"})


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        ({"SLURM_JOBID": "7"}, "SLURM_JOB_ID"),
        ({"SLURM_JOB_NODELIST": "nid001"}, "SLURM_JOB_ID"),
        ({"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": "/nonexistent"}, "PBS_JOBID"),
    ],
)
def test_half_of_a_jobs_variables_is_an_error(env, missing):
    with pytest.raises(InvalidVariableError, match=f"without {missing}"):
        get_allocation(env)


@pytest.mark.parametrize("name", ["LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID"])
def test_a_job_whose_hosts_cannot_be_read_is_not_this_host(name):
    with pytest.raises(SchedulerError, match=r"whose hosts cannot be read here.*HOSTFILE"):
        get_allocation({name: "5"})


def test_the_environment_is_never_changed():
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nid[001-002]"}
    before = dict(env)
    get_allocation(env)
    assert env == before
