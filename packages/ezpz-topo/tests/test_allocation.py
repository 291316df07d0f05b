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
