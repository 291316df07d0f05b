"""Which hosts are used, and what is written where."""

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
    TopoError,
    get_hostfile_with_fallback,
    get_hostname,
    get_hosts,
    get_nodes_from_hostfile,
    read_hostfile,
    write_hostfile_from_list_of_hosts,
    write_localhost_to_hostfile,
)

# Which file is used.


@pytest.fixture
def files(tmp_path):
    for name in ("argument", "nodes", "hosts"):
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path


@pytest.fixture
def env(files):
    """A job's environment in which every source is there."""
    return {
        "PBS_NODEFILE": str(files / "nodes"),
        "HOSTFILE": str(files / "hosts"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "nid[001-002]",
        "SLURM_NODELIST": "nid[001-002]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2",
        "XDG_RUNTIME_DIR": str(files / "run"),
    }


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
    hosts = get_hosts(env=env)
    assert [entry.host for entry in hosts.entries] == ["nid001", "nid002"]
    assert hosts.path is None
    assert hosts.source in env
    assert not list((files / "run").iterdir())  # to get is not to write
    written = get_hostfile_with_fallback(env=env)
    assert written.parent == files / "run" / "ezpz"
    assert written.read_text() == "nid001\nnid002\n"


def test_slots_of_the_scheduler():
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b", "SLURM_NTASKS": "7",
           "SLURM_TASKS_PER_NODE": "4,3"}  # fmt: skip
    expected = Hosts((HostSlots("a", 4), HostSlots("b", 3)), "SLURM_JOB_NODELIST")
    assert get_hosts(env=env) == expected


def test_this_host_only_when_no_job_is_running(files):
    env = {"XDG_RUNTIME_DIR": str(files / "run")}
    assert get_hosts(env=env).entries == (HostSlots(get_hostname()),)
    assert "no job is running" in get_hosts(env=env).source
    assert get_hostfile_with_fallback(env=env).read_text() == f"{get_hostname()}\n"


@pytest.mark.parametrize("name", ["PBS_NODEFILE", "HOSTFILE"])
@pytest.mark.parametrize("content", [None, b"", b"n[1-2]\n", b"\xff"])
def test_a_named_file_is_never_passed_over(files, env, name, content):
    path = files / "bad"
    if content is not None:
        path.write_bytes(content)
    for other in ("PBS_NODEFILE", "HOSTFILE"):
        env.pop(other)
    for call in (get_hosts, get_hostfile_with_fallback):
        with pytest.raises(HostfileError, match=re.escape(str(path))):
            call(env={**env, name: str(path)})
        with pytest.raises(HostfileError, match=re.escape(str(path))):
            call(path, env)


def test_a_job_whose_scheduler_does_not_tell_is_an_error(files):
    env = {"SLURM_JOB_ID": "7", "PATH": "", "XDG_RUNTIME_DIR": str(files / "run")}
    with pytest.raises(TopoError):
        get_hosts(env=env)


@pytest.mark.parametrize(
    ("env", "who"),
    [
        ({"FLUX_JOB_ID": "f1"}, "flux"),
        ({"LSB_JOBID": "9"}, "lsf"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "0"}, "flux"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "torchrun"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, "pmi"),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
          "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "openmpi"),
    ],
)  # fmt: skip
def test_a_job_without_a_scheduler_is_not_this_host(env, who):
    with pytest.raises(TopoError, match=f"{who}.*; expected .*HOSTFILE"):
        get_hosts(env=env)


def test_all_ranks_on_this_node_are_this_host():
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert get_hosts(env=env).entries == (HostSlots(get_hostname()),)


def test_the_environment_is_not_changed(env):
    before = dict(env)
    get_hostfile_with_fallback(env=env)
    del env["PBS_NODEFILE"], env["HOSTFILE"], before["PBS_NODEFILE"], before["HOSTFILE"]
    get_hostfile_with_fallback(env=env)
    assert env == before


# What is written.


def test_writing_a_list(tmp_path):
    path = write_hostfile_from_list_of_hosts(("b", "a.site", "A", "::1"), tmp_path / "hosts")
    assert path == tmp_path / "hosts"
    assert path.read_bytes() == b"b\na.site\n::1\n"
    assert [entry.host for entry in read_hostfile(path)] == ["b", "a.site", "::1"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["hosts"]


def test_writing_this_host(tmp_path):
    path = write_localhost_to_hostfile(str(tmp_path / "hosts"))
    assert isinstance(path, Path)
    assert get_nodes_from_hostfile(path) == [get_hostname()]


def test_writing_again_replaces_and_follows_links(tmp_path):
    (tmp_path / "hosts").write_text("old\n" * 100)
    (tmp_path / "link").symlink_to("hosts")
    write_hostfile_from_list_of_hosts(["new"], tmp_path / "link")
    assert (tmp_path / "hosts").read_text() == "new\n"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        "a b",
        "a\tb",
        "a\n",
        "a,b",
        "a\0",
        "-n",
        "--hostfile=x",
        "#a",
        "n[1-2]",
        "h:2",
        "12",
    ],
)
def test_names_that_are_not_written(tmp_path, host):
    with pytest.raises(HostfileError, match="expected a name of letters"):
        write_hostfile_from_list_of_hosts(["a", host], tmp_path / "hosts")
    assert not list(tmp_path.iterdir())


def test_no_hosts_are_not_written(tmp_path):
    with pytest.raises(HostfileError, match="list of hosts is empty"):
        write_hostfile_from_list_of_hosts([], tmp_path / "hosts")
    with pytest.raises(HostfileError, match="expected a list of names"):
        write_hostfile_from_list_of_hosts("x1n0", tmp_path / "hosts")
    assert not list(tmp_path.iterdir())


def test_too_many_hosts_are_not_written(monkeypatch, tmp_path):
    monkeypatch.setattr("ezpz_topo._hostfile.MAX_HOSTS", 3)
    with pytest.raises(HostfileError, match="at most 3"):
        # without end: the list is not made first
        write_hostfile_from_list_of_hosts(map("n{}".format, itertools.count()), tmp_path / "hosts")


@pytest.mark.parametrize(
    ("name", "match"),
    [("absent/hosts", "No such file"), ("file/hosts", "Not a directory"), ("a\0b", "null byte"),
     ("x" * 300, "too long")],
)  # fmt: skip
def test_a_place_where_nothing_can_be_written(tmp_path, name, match):
    (tmp_path / "file").write_text("x")
    with pytest.raises(HostfileError, match=f"cannot be written .*{match}.*; expected a folder"):
        write_localhost_to_hostfile(f"{tmp_path}/{name}")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def unwritable(tmp_path):
    tmp_path.chmod(0o500)
    return tmp_path


def test_a_folder_without_permission(unwritable, unprivileged):
    with pytest.raises(HostfileError, match="Permission denied"):
        write_localhost_to_hostfile(unwritable / "hosts")


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "folder"):
        with pytest.raises(HostfileError, match="is not a regular file"):
            write_localhost_to_hostfile(tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


# The private folder.


@pytest.fixture
def job(files):
    return {
        "SLURM_JOB_ID": "40_[1]",
        "SLURM_JOB_NODELIST": "nid[001-002]",
        "SLURM_NODELIST": "nid[001-002]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2",
        "TMPDIR": str(files / "run"),
    }


def test_the_file_is_private_and_its_name_is_the_same_every_time(files, job):
    path = get_hostfile_with_fallback(env=job)
    folder = files / "run" / f"ezpz-{os.geteuid()}"
    assert path.parent == folder
    assert re.fullmatch(r"hosts-40__1_-[0-9a-f]{8}", path.name)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert get_hostfile_with_fallback(env=job) == path
    other = {**job, "SLURM_JOB_NODELIST": "nid[003-004]", "SLURM_NODELIST": "nid[003-004]"}
    assert get_hostfile_with_fallback(env=other) != path


def test_a_job_id_cannot_lead_out_of_the_folder(files, job):
    for job_id in ("../../x", "..", "/x", "x" * 300, "a\0b"):
        path = get_hostfile_with_fallback(env={**job, "SLURM_JOB_ID": job_id})
        assert path.parent == files / "run" / f"ezpz-{os.geteuid()}"


def test_a_list_without_a_file_goes_to_the_private_folder(files, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(files / "run"))
    before = sorted(files.iterdir())
    path = write_hostfile_from_list_of_hosts(["a", "b"])
    assert path.read_text() == "a\nb\n"
    assert path.is_relative_to(files / "run")
    assert sorted(files.iterdir()) == before


def test_a_runtime_folder_that_is_not_there_is_passed_over(files, job):
    job["XDG_RUNTIME_DIR"] = str(files / "absent")  # as that of the login node often is
    assert get_hostfile_with_fallback(env=job).is_relative_to(files / "run")


@pytest.mark.parametrize("tmpdir", [".", "relative/folder"])
def test_a_relative_folder_is_an_error(job, tmpdir):
    with pytest.raises(HostfileError, match=r"TMPDIR=.*expected an absolute path"):
        get_hostfile_with_fallback(env={**job, "TMPDIR": tmpdir})


def test_a_folder_that_cannot_be_made(files, job):
    with pytest.raises(HostfileError, match=r"cannot be made .*; set TMPDIR"):
        get_hostfile_with_fallback(env={**job, "TMPDIR": str(files / "absent")})


@pytest.mark.parametrize("kind", ["link", "file", "open"])
def test_a_folder_that_is_not_mine_alone(files, job, kind):
    folder = files / "run" / f"ezpz-{os.geteuid()}"
    if kind == "link":
        (files / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(files / "elsewhere")
    elif kind == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(HostfileError, match="expected a folder drwx------ of user"):
        get_hostfile_with_fallback(env=job)


def test_a_folder_of_somebody_else(files, job, monkeypatch):
    get_hostfile_with_fallback(env=job)
    me = os.geteuid()
    (files / "run" / f"ezpz-{me}").rename(files / "run" / f"ezpz-{me + 1}")
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(HostfileError, match=f"of user {me}; expected .* of user {me + 1}"):
        get_hostfile_with_fallback(env=job)


def test_a_hundred_ranks_at_once(files, job):
    start = threading.Barrier(20)

    def rank(number):
        start.wait()
        found = set()
        for _ in range(5):
            path = get_hostfile_with_fallback(env=job)
            found.add((path, tuple(get_nodes_from_hostfile(path))))
        return found

    with ThreadPoolExecutor(20) as pool:
        found = set().union(*pool.map(rank, range(20)))
    ((path, hosts),) = found
    assert hosts == ("nid001", "nid002")
    assert list(path.parent.iterdir()) == [path]
