"""The allocation of no scheduler, which hosts are used, and what is written where."""

import itertools
import os
import re
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ezpz_topo import (
    HostfileError,
    Hosts,
    HostSlots,
    InvalidVariableError,
    SchedulerError,
    TopoError,
    get_allocation,
    get_hostfile_with_fallback,
    get_hostname,
    get_hosts,
    get_nodes_from_hostfile,
    read_hostfile,
    write_hostfile_from_list_of_hosts,
    write_localhost_to_hostfile,
)

# The allocation, where there is no scheduler or several.


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
    job = get_allocation({"PATH": ""}, ask=True)
    assert (job.scheduler, "no scheduler here" in job.sources["scheduler"]) == ("none", True)


# The words of Slurm 22.05.8 and OpenPBS 23.06 without a configuration.
NOT_SET_UP = {
    "squeue": "echo squeue: fatal: Could not establish a configuration source >&2; exit 1",
    "qselect": "echo 'qselect: cannot connect to server  (errno=0)' >&2; exit 1",
}


@pytest.mark.parametrize("client", NOT_SET_UP)
def test_a_client_that_is_not_set_up_hides_no_other_schedulers_answer(tmp_path, command, client):
    for name, words in NOT_SET_UP.items():
        command(name, words if name == client else "exit 0")  # no job of this user
    env = {"PATH": f"{tmp_path}:/bin", "USER": "alice"}
    assert get_allocation(env, ask=True).scheduler == "none"
    # one that is set up, and does not answer, is told
    command("squeue", "echo squeue: Unable to contact >&2; exit 1")
    with pytest.raises(SchedulerError, match="Unable to contact"):
        get_allocation(env, ask=True)


@pytest.mark.parametrize(("env", "message"), [
    ({"SLURM_JOBID": "7"}, "without SLURM_JOB_ID"),
    ({"SLURM_JOB_NODELIST": "nid001"}, "without SLURM_JOB_ID"),
    ({"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": "/none"}, "without PBS_JOBID"),
    ({"PBS_JOBID": "1.pbs", "SLURM_JOB_ID": "7"}, "SLURM_JOB_ID=7 and PBS_JOBID=1.pbs.*unset"),
])  # fmt: skip
def test_half_of_a_jobs_variables_or_two_jobs_are_an_error(env, message):
    with pytest.raises(InvalidVariableError, match=message):
        get_allocation(env)


# Which file is used.


@pytest.fixture
def files(tmp_path):
    for name in ("argument", "nodes", "hosts"):
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path


JOB = {
    "SLURM_JOB_ID": "40_[1]", "SLURM_JOB_NODELIST": "nid[001-002]", "SLURM_NTASKS": "7",
    "SLURM_TASKS_PER_NODE": "4,3",
}  # fmt: skip


@pytest.fixture
def env(files):
    """A job's environment in which every source is there."""
    return {
        **JOB, "PBS_NODEFILE": str(files / "nodes"), "HOSTFILE": str(files / "hosts"),
        "XDG_RUNTIME_DIR": str(files / "run"),
    }  # fmt: skip


def test_the_order_of_sources(files, env):
    argument = files / "argument"
    expected = Hosts((HostSlots("argument"),), "argument", str(argument))
    assert get_hosts(argument, env) == expected
    assert get_hostfile_with_fallback(argument, env) == argument

    assert get_hosts(env=env) == Hosts(
        (HostSlots("nodes", 1),), "PBS_NODEFILE", env["PBS_NODEFILE"]
    )
    assert get_hostfile_with_fallback(env=env) == files / "nodes"

    env["PBS_NODEFILE"] = ""
    assert get_hosts(env=env) == Hosts((HostSlots("hosts"),), "HOSTFILE", env["HOSTFILE"])
    assert get_hostfile_with_fallback(env=env) == files / "hosts"

    del env["HOSTFILE"]
    before = dict(env)
    hosts = Hosts((HostSlots("nid001", 4), HostSlots("nid002", 3)), "SLURM_JOB_NODELIST")
    assert get_hosts(env=env) == hosts
    assert not list((files / "run").iterdir())  # to get is not to write
    written = get_hostfile_with_fallback(env=env)
    assert written.parent == files / "run" / "ezpz"
    assert written.read_text() == "nid001\nnid002\n"
    assert env == before


def test_this_host_only_when_no_job_is_running(files):
    env = {"XDG_RUNTIME_DIR": str(files / "run")}
    all_here = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    for each in (env, all_here):
        assert get_hosts(env=each).entries == (HostSlots(get_hostname()),)
        assert "no job is running" in get_hosts(env=each).source
    assert get_hostfile_with_fallback(env=env).read_text() == f"{get_hostname()}\n"


@pytest.mark.parametrize("name", ["PBS_NODEFILE", "HOSTFILE"])
def test_a_named_file_is_never_passed_over(files, env, name):
    (path := files / "bad").touch()
    for other in ("PBS_NODEFILE", "HOSTFILE"):
        env.pop(other)
    for call in (get_hosts, get_hostfile_with_fallback):
        with pytest.raises(HostfileError, match=re.escape(str(path))):
            call(env={**env, name: str(path)})
        with pytest.raises(HostfileError, match=re.escape(str(path))):
            call(path, env)


@pytest.mark.parametrize(("env", "who"), [
    ({"FLUX_JOB_ID": "f1"}, "flux"),
    ({"LSB_JOBID": "9"}, "lsf"),
    ({"COBALT_JOBID": "9"}, "cobalt"),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "torchrun"),
    ({"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, "pmi"),
])  # fmt: skip
def test_a_job_without_a_scheduler_is_not_this_host(env, who):
    with pytest.raises(TopoError, match=f"{who}.*; expected .*HOSTFILE"):
        get_hosts(env=env)


# What is written.


def test_writing_a_list(tmp_path):
    path = write_localhost_to_hostfile(str(tmp_path / "hosts"))
    assert isinstance(path, Path)
    assert get_nodes_from_hostfile(path) == [get_hostname()]
    path = write_hostfile_from_list_of_hosts(("b", "a.site", "A", "::1"), tmp_path / "hosts")
    assert path == tmp_path / "hosts"
    assert path.read_bytes() == b"b\na.site\n::1\n"
    assert [entry.host for entry in read_hostfile(path)] == ["b", "a.site", "::1"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["hosts"]
    # again: it replaces, and follows links
    (tmp_path / "link").symlink_to("hosts")
    write_hostfile_from_list_of_hosts(["new"], tmp_path / "link")
    assert (tmp_path / "hosts").read_text() == "new\n"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(("hosts", "match"), [
    (["a", "--hostfile=x"], "expected a name of letters"),
    ([], "list of hosts is empty"),
    ("x1n0", "expected a list of names"),
    # without end: the list is not made first
    (map("n{}".format, itertools.count()), "at most 3"),
])  # fmt: skip
def test_hosts_that_are_not_written(monkeypatch, tmp_path, hosts, match):
    monkeypatch.setattr("ezpz_topo._hostfile.MAX_HOSTS", 3)
    with pytest.raises(HostfileError, match=match):
        write_hostfile_from_list_of_hosts(hosts, tmp_path / "hosts")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "match"),
    [("absent/hosts", "No such file"), ("a\0b", "null byte"), ("fifo", "is not a regular file"),
     (".", "is not a regular file")],
)  # fmt: skip
def test_a_place_where_nothing_can_be_written(tmp_path, name, match):
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(HostfileError, match=match):
        write_localhost_to_hostfile(f"{tmp_path}/{name}")
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "fifo"}
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


# The private folder.


@pytest.fixture
def job(files):
    # as that of the login node often is
    return {**JOB, "TMPDIR": str(files / "run"), "XDG_RUNTIME_DIR": str(files / "absent")}


def test_the_file_is_private_and_its_name_is_the_same_every_time(files, job):
    path = get_hostfile_with_fallback(env=job)
    folder = files / "run" / f"ezpz-{os.geteuid()}"
    assert path.parent == folder
    assert re.fullmatch(r"hosts-40__1_-[0-9a-f]{8}", path.name)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert get_hostfile_with_fallback(env=job) == path
    other = {**job, "SLURM_JOB_NODELIST": "nid[003-004]"}
    assert get_hostfile_with_fallback(env=other) != path
    # a job's id cannot lead out of the folder
    for job_id in ("../../x", "..", "/x", "x" * 300, "a\0b"):
        assert get_hostfile_with_fallback(env={**job, "SLURM_JOB_ID": job_id}).parent == folder


def test_a_list_without_a_file_goes_to_the_private_folder(files, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(files / "run"))
    before = sorted(files.iterdir())
    path = write_hostfile_from_list_of_hosts(["a", "b"])
    assert path.read_text() == "a\nb\n"
    assert path.is_relative_to(files / "run")
    assert sorted(files.iterdir()) == before


@pytest.mark.parametrize("kind", ["link", "file", "theirs", 0o770, 0o707])
def test_a_folder_that_is_not_mine_alone(files, job, monkeypatch, kind):
    me = os.geteuid()
    folder, message = files / "run" / f"ezpz-{me}", "expected a folder drwx------ of user"
    if kind == "theirs":
        get_hostfile_with_fallback(env=job)
        folder.rename(files / "run" / f"ezpz-{me + 1}")
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        message = f"of user {me}; expected .* of user {me + 1}"
    elif kind == "link":
        (files / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(files / "elsewhere")
    elif kind == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(kind)
    with pytest.raises(HostfileError, match=message):
        get_hostfile_with_fallback(env=job)


@pytest.mark.parametrize(
    ("tmpdir", "message"),
    [("a/b", "expected an absolute path"), ("/nonexistent", "cannot be made .*; set TMPDIR")],
)
def test_a_tmpdir_that_does_not_do(job, tmpdir, message):
    with pytest.raises(HostfileError, match=message):
        get_hostfile_with_fallback(env={**job, "TMPDIR": tmpdir})


def test_many_ranks_at_once(files, job):
    start = threading.Barrier(20)

    def rank(number):
        start.wait()
        path = get_hostfile_with_fallback(env=job)
        return path, tuple(get_nodes_from_hostfile(path))

    with ThreadPoolExecutor(20) as pool:
        found = set(pool.map(rank, range(20)))
    ((path, hosts),) = found
    assert hosts == ("nid001", "nid002")
    assert list(path.parent.iterdir()) == [path]
