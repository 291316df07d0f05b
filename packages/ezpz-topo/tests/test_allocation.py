import pytest

from ezpz_topo import InvalidVariableError, get_allocation, get_hostname


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


def test_the_environment_is_never_changed():
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nid[001-002]"}
    before = dict(env)
    get_allocation(env)
    assert env == before
