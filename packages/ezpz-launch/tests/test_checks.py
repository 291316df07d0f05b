"""The checks of ``ezpz doctor``: with a real MPI and a false one, full and read-only places."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from ezpz_launch import _checks
from ezpz_launch._checks import Ended, run


def program(path, body):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


# What a check starts.


def test_a_command_that_hangs_is_ended(tmp_path):
    script = tmp_path / "hangs"
    # What it started holds the pipes for longer than anybody waits.
    program(script, f"echo begun; sleep 1000 & echo $! > {tmp_path}/pid; wait")
    begun = time.monotonic()
    ended = run([str(script)], os.environ, 0.5)
    assert time.monotonic() - begun < 120
    assert (ended.status, ended.stdout) == (None, "begun\n")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_command_has_time_to_end_others(tmp_path):
    script = tmp_path / "ends"
    program(script, "trap 'echo ended; exit 3' TERM; echo begun; while :; do sleep 0.05; done")
    ended = run([str(script)], os.environ, 0.5, grace=20)
    assert (ended.status, ended.stdout) == (None, "begun\nended\n")


def test_last_words():
    assert Ended(1, "a\n", "b\nc\n\n").last_words == "c"
    assert Ended(1, "a\n", "").last_words == "a"
    assert Ended(1, "", "").last_words == "nothing"


# MPI.


@pytest.fixture
def mpi4py(clean_env):
    words = [sys.executable, "-c", "import mpi4py"]
    if subprocess.run(words, env=clean_env, check=False, capture_output=True).returncode:
        pytest.skip("no mpi4py here: pip install mpi4py")


@pytest.fixture
def elsewhere(clean_env, mpi4py, tmp_path, monkeypatch):
    """This Python where no mpiexec lies beside it, and an environment whose PATH has none."""
    python = tmp_path / "alone" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    packages = os.pathsep.join(path for path in sys.path if path)
    libraries = Path(sysconfig.get_path("data"), "lib").glob("libmpi.so.*")
    known = dict.fromkeys(["MPI4PY_LIBMPI"], next(map(str, libraries), ""))
    monkeypatch.setattr(sys, "executable", str(python))
    return {**clean_env, **known, "PATH": str(tmp_path / "bin"), "PYTHONPATH": packages}


def test_two_ranks_of_the_real_mpi(clean_env, mpiexec, mpi4py):
    result = _checks.check_mpi(60, clean_env)
    assert result.status == "ok"
    assert result.details["mpiexec"] == mpiexec
    assert result.details["library"] in result.message


def test_a_rank_of_another_launch_is_not_in_the_way(clean_env, mpiexec, mpi4py):
    outer = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "1"}
    assert _checks.check_mpi(60, {**clean_env, **outer}).status == "ok"


def test_an_mpiexec_of_another_mpi_makes_worlds_of_one(clean_env, mpi4py, tmp_path):
    """As Open MPI's mpiexec does with MPICH's library: two processes, and nobody tells them."""
    body = (
        'if [ "$1" = --version ]; then echo "mpiexec (Open MPI) 5.0.11"; exit; fi\n'
        'while [ "$1" != -P ]; do last=$1; shift; done\n'
        '"$last" "$@" & "$last" "$@"; wait'
    )
    program(tmp_path / "bin" / "mpiexec", body)
    result = _checks.check_mpi(60, {**clean_env, "PATH": f"{tmp_path}/bin:{clean_env['PATH']}"})
    assert result.status == "error"
    assert f"{tmp_path}/bin/mpiexec (openmpi) starts ranks of another MPI" in result.message
    assert "each of two is rank 0 of a world of 1" in result.message
    assert "first on PATH" in result.remedy


def test_an_mpiexec_that_fails_or_hangs(clean_env, mpi4py, tmp_path):
    env = {**clean_env, "PATH": f"{tmp_path}/bin:{clean_env['PATH']}"}
    version = 'if [ "$1" = --version ]; then echo HYDRA; exit; fi'
    program(tmp_path / "bin" / "mpiexec", f"{version}\necho no such fabric >&2; exit 5")
    failed = _checks.check_mpi(60, env)
    assert (failed.status, "end with 5: no such fabric" in failed.message) == ("error", True)
    program(tmp_path / "bin" / "mpiexec", f"{version}\nexec sleep 1000")
    hung = _checks.check_mpi(1, env)
    assert (hung.status, "did not end in 0.8 s" in hung.message) == ("error", True)


def test_an_mpiexec_that_nobody_knows(clean_env, tmp_path, monkeypatch):
    program(tmp_path / "bin" / "mpiexec", "echo Acme MPI 1.0")
    beside = tmp_path / "python" / "bin"  # no MPI's follows
    monkeypatch.setattr("sys.executable", str(beside / "python"))
    result = _checks.check_mpi(60, {**clean_env, "PATH": f"{tmp_path}/bin"})
    assert result.status == "error"
    assert "says 'Acme MPI 1.0'" in result.message


def test_mpi4py_without_a_library(clean_env, mpiexec, mpi4py):
    result = _checks.check_mpi(60, {**clean_env, "MPI4PY_LIBMPI": "/nonexistent/libmpi.so"})
    assert result.status == "error"
    assert "mpi4py cannot load an MPI library" in result.message


def test_without_mpi4py_there_is_nothing_to_agree_with(clean_env, mpiexec, tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError")
    result = _checks.check_mpi(60, {**clean_env, "PYTHONPATH": str(tmp_path)})
    assert result.status == "ok"
    assert "mpi4py is not installed" in result.message


def test_without_an_mpiexec(elsewhere, tmp_path):
    result = _checks.check_mpi(60, elsewhere)
    assert result.status == "warning"
    assert "no mpiexec on PATH or in this environment" in result.message
    assert "pip install mpich" in result.remedy
    program(tmp_path / "bin" / "srun", "exit 0")
    with_srun = _checks.check_mpi(60, elsewhere)
    assert (with_srun.status, with_srun.details["srun"]) == ("ok", f"{tmp_path}/bin/srun")


def test_a_workstation_without_any_mpi_needs_none(elsewhere, tmp_path):
    env = {**elsewhere, "MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
    result = _checks.check_mpi(60, env)
    assert (result.status, "it starts plain processes" in result.message) == ("ok", True)
    (tmp_path / "nodes").write_text(f"{os.uname().nodename}\n")
    job = {"PBS_JOBID": "1.x", "PBS_NODEFILE": str(tmp_path / "nodes")}
    in_job = _checks.check_mpi(60, {**env, **job})
    assert in_job.status == "warning"
    assert "load the site's MPI module" in in_job.remedy


@pytest.mark.parametrize(
    ("library", "status"),
    [("CRAY MPICH version 8.1.28", "ok"), ("Open MPI v5.0.11", "error")],
)
def test_pals_outside_of_a_job_is_judged_by_name(library, status, tmp_path, clean_env, monkeypatch):
    monkeypatch.setattr("ezpz_launch.launchers.pals.Pals.folder", str(tmp_path / "pals"))
    program(tmp_path / "pals" / "mpiexec", "exit 9")
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text(
        "class COMM_WORLD:\n    rank, size = 0, 1\n    allreduce = staticmethod(lambda x: x)\n"
        "def Init_thread(): pass\nFinalize = Init_thread\n"
        f"def Get_library_version(): return {library!r}\n"
    )
    env = {**clean_env, "PATH": str(tmp_path / "pals"), "PYTHONPATH": str(tmp_path)}
    result = _checks.check_mpi(60, env)
    assert result.status == status
    assert result.details["library"] == library


# Room.


def test_there_is_room_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    result = _checks.disk(5, env)
    assert result.status in ("ok", "warning")
    assert result.details["the folder of records"]["folder"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing is left, and nothing is made"


@pytest.fixture
def unprivileged(monkeypatch):
    # Which goes back to the working directory after this: not everybody may enter that.
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    yield
    os.seteuid(me)


def test_a_folder_that_may_not_be_written_is_an_error(tmp_path, unprivileged, monkeypatch):
    monkeypatch.chdir("/")
    result = _checks.disk(5, {"HOME": "/", "TMPDIR": "/"})
    assert result.status == "error"
    assert "/ (the working directory) cannot be written: Permission denied" in result.message


def test_a_tmpdir_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = _checks.disk(5, {"HOME": str(tmp_path), "TMPDIR": str(tmp_path / "none")})
    assert result.status == "error"
    assert "none (TMPDIR) cannot be written: No such file" in result.message
    assert "set TMPDIR" in result.remedy


def test_a_working_directory_that_is_gone_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = _checks.disk(5, {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
    monkeypatch.chdir(tmp_path)
    assert (result.status, "is gone" in result.message) == ("error", True)


def on_a_small_disk(size, code, folder):
    """Run code where ``folder`` is a file system of so many bytes, seen by that process only."""
    unshare = shutil.which("unshare")
    mount = f"mount -t tmpfs -o size={size} none {folder}"
    words = [unshare or "unshare", "--mount", "--propagation", "private", "sh", "-c"]
    probe = [*words, f"{mount} && true"]
    if not unshare or subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip("a file system of our own needs root and unshare --mount")
    words += [f'{mount} && cd {folder} && exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split("\t")


def test_a_full_disk_is_an_error(tmp_path):
    code = (
        "from ezpz_launch._checks import disk\n"
        f"r = disk(5, {{'HOME': {str(tmp_path)!r}, 'TMPDIR': {str(tmp_path)!r}}})\n"
        "print(r.status, r.message, r.remedy, sep='\\t')"
    )
    status, message, remedy = on_a_small_disk("512k", code, tmp_path)
    assert status == "error"
    assert f"{tmp_path} (the working directory) cannot be written: No space left" in message
    assert "remove what is old there" in remedy
    status, message, _ = on_a_small_disk("8m", code, tmp_path)
    assert (status, "(the working directory) has 8.0 MiB free" in message) == ("warning", True)


def test_the_shared_memory_of_a_container(tmp_path):
    code = (
        "from ezpz_launch._checks import shared_memory\n"
        "r = shared_memory(5)\nprint(r.status, r.message, r.remedy, sep='\\t')"
    )
    status, message, remedy = on_a_small_disk("64m", code, "/dev/shm")
    assert (status, message[:28]) == ("warning", "64.0 MiB free in /dev/shm: b")
    assert "--shm-size=8g" in remedy
    status, message, _ = on_a_small_disk("512k", code, "/dev/shm")
    assert status == "error"
    assert "/dev/shm cannot be written: No space left on device" in message


def test_shared_memory_of_this_host(tmp_path):
    assert _checks.shared_memory(5).status in ("ok", "warning")
    missing = _checks.shared_memory(5, folder=str(tmp_path / "shm"))
    assert missing.status == ("error" if sys.platform == "linux" else "ok")


# Versions.


def told(**hosts):
    found = dict.fromkeys(_checks.PACKAGES, "1.0") | {"python": "3.11.2"}
    lines = [[host, found | changes] for host, changes in hosts.items()]
    import json

    return "".join(f"ezpz-versions {json.dumps(line)}\n" for line in lines)


def test_one_host_has_nothing_to_compare():
    result = _checks.check_versions(5, {"PATH": "/nonexistent"})
    assert (result.status, result.message) == ("ok", "one host: nothing to compare")


def test_what_the_program_says_is_read():
    done = run([sys.executable, "-c", _checks.PROGRAM], os.environ, 60)
    ((host, found),) = _checks.said(f"a launcher's banner\n{done.stdout}").items()
    assert host == (os.environ.get("SLURMD_NODENAME") or os.uname().nodename)
    assert found["python"] == sys.version.split()[0]
    assert found["ezpz-launch"]
    assert set(found) == {"python", *_checks.PACKAGES}


def test_versions_that_differ_are_an_error_that_names_the_hosts():
    out = told(n1={}, n2={}, n3={"torch": "2.6.0"}, n4={"torch": "not installed"})
    result = _checks.judge(("n1", "n2", "n3", "n4"), Ended(0, out, ""), 5)
    assert result.status == "error"
    assert result.message == "torch is 1.0 on n[1-2], 2.6.0 on n3, not installed on n4"


def test_hosts_that_are_silent():
    slow = _checks.judge(("n1", "n2"), Ended(None, told(n1={}), ""), 5)
    assert (slow.status, slow.message) == ("warning", "1 of 2 hosts answered in 3.5 s")
    failed = _checks.judge(("n1", "n2"), Ended(1, told(n1={}), "rank 1 on n2: exit 127\n"), 5)
    assert failed.status == "error"
    assert "1 of 2 hosts told their versions" in failed.message
    assert "rank 1 on n2: exit 127" in failed.message
    same = _checks.judge(("n1", "n2"), Ended(0, told(n1={}, n2={}), ""), 5)
    assert (same.status, same.message) == (
        "ok", "Python 3.11.2, torch 1.0 and ezpz's packages are the same on 2 hosts"
    )  # fmt: skip
