"""The checks of ``ezpz doctor``: with a real MPI and a false one, full and read-only places."""

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ezpz_launch import _checks
from ezpz_launch._checks import (
    check_mpi,
    disk,
    shared_memory,
)
from ezpz_launch._nodes.preflight import Ended, run

VERSION = 'if [ "$1" = --version ]; then echo {}; exit; fi\n'

# What a check starts.


def test_a_command_that_hangs_is_ended(tmp_path):
    # What it started holds the pipes for longer than anyone waits.
    hangs = f"echo begun; sleep 1000 & echo $! > {tmp_path}/pid; wait"
    ended = run(["sh", "-c", hangs], os.environ, 0.5)
    assert (ended.status, ended.stdout) == (None, "begun\n")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    ends = "trap 'echo ended; exit 3' TERM; echo begun; while :; do sleep 0.05; done"
    ended = run(["sh", "-c", ends], os.environ, 0.5, grace=20)
    assert (ended.status, ended.stdout) == (None, "begun\nended\n")


@pytest.mark.parametrize(
    ("out", "err", "last"), [("a\n", "b\nc\n\n", "c"), ("a\n--\n", "", "a"), ("", "", "nothing")]
)
def test_last_words(out, err, last):
    assert Ended(1, out, err).last_words == last


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


def test_two_ranks_of_the_real_mpi_also_inside_a_rank_of_another_launch(clean_env, mpiexec, mpi4py):
    outer = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "1"}
    result = check_mpi(60, {**clean_env, **outer})
    assert (result.status, result.details["mpiexec"]) == ("ok", mpiexec)
    assert result.details["library"] in result.message


@pytest.mark.parametrize(("body", "seconds", "said"), [
    # as Open MPI's mpiexec does with MPICH's library: two processes, and no one tells them
    (
        VERSION.format('"mpiexec (Open MPI) 5.0.11"')
        + 'while [ "$1" != -P ]; do last=$1; shift; done\n"$last" "$@" & "$last" "$@"; wait',
        60,
        "mpiexec (openmpi) starts ranks of another MPI: each of two is rank 0 of a world of 1",
    ),
    (VERSION.format("HYDRA") + "echo no such fabric >&2; exit 5", 60, "end with 5: no such fabric"),
    (VERSION.format("HYDRA") + "exec sleep 1000", 1, "did not end in 0.8 s"),
])  # fmt: skip
@pytest.mark.usefixtures("mpi4py")
def test_an_mpiexec_that_is_anothers_fails_or_hangs(clean_env, program, body, seconds, said):
    path = os.path.dirname(program("bin/mpiexec", body))
    result = check_mpi(seconds, {**clean_env, "PATH": f"{path}:{clean_env['PATH']}"})
    assert (result.status, said in result.message) == ("error", True), result.message
    assert ("first on PATH" in result.remedy) == ("another MPI" in said)


def test_mpi4py_without_a_library_and_none_at_all(clean_env, mpiexec, mpi4py, tmp_path):
    result = check_mpi(60, {**clean_env, "MPI4PY_LIBMPI": "/nonexistent/libmpi.so"})
    assert result.status == "error"
    assert "mpi4py cannot load an MPI library" in result.message
    (tmp_path / "mpi4py.py").write_text("raise ImportError")
    result = check_mpi(60, {**clean_env, "PYTHONPATH": str(tmp_path)})
    assert (result.status, "mpi4py is not installed" in result.message) == ("ok", True)


@pytest.mark.usefixtures("mpi4py", "mpiexec")
def test_an_mpi4py_that_takes_long_to_import_is_a_warning(clean_env, tmp_path, monkeypatch):
    (tmp_path / "mpi4py.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(_checks, "_COLD", 0.5)
    check_mpi.prepare()  # it does not wait for that
    result = check_mpi(5, {**clean_env, "PYTHONPATH": str(tmp_path)})
    said = "not done in 4.0 s: still importing mpi4py and its MPI library"
    assert (result.status, result.message) == ("warning", said)
    assert "--timeout=60 --only=mpi" in result.remedy


def test_without_an_mpiexec(elsewhere, program):
    result = check_mpi(60, elsewhere)
    assert result.status == "warning"
    assert "no mpiexec on PATH or in this environment" in result.message
    assert "pip install mpich" in result.remedy
    srun = program("bin/srun", "exit 0")
    with_srun = check_mpi(60, elsewhere)
    assert (with_srun.status, with_srun.details["srun"]) == ("ok", srun)


def test_a_workstation_without_any_mpi_needs_none(elsewhere, tmp_path):
    env = {**elsewhere, "MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
    result = check_mpi(60, env)
    assert (result.status, "it starts plain processes" in result.message) == ("ok", True)
    (tmp_path / "nodes").write_text(f"{os.uname().nodename}\n")
    in_job = check_mpi(60, {**env, "PBS_JOBID": "1.x", "PBS_NODEFILE": str(tmp_path / "nodes")})
    assert in_job.status == "warning"
    assert "load the site's MPI module" in in_job.remedy


@pytest.mark.parametrize(
    ("library", "status"), [("CRAY MPICH version 8.1.28", "ok"), ("Open MPI v5.0.11", "error")]
)
def test_pals_outside_of_a_job_is_judged_by_name(
    *, library, status, tmp_path, clean_env, program, monkeypatch
):
    pals = os.path.dirname(program("pals/mpiexec", "exit 9"))
    monkeypatch.setattr("ezpz_launch._plan.launchers.pals.Pals.folder", pals)
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text(
        "class COMM_WORLD:\n    rank, size = 0, 1\n    allreduce = staticmethod(lambda x: x)\n"
        "def Init_thread(): pass\nFinalize = Init_thread\n"
        f"def Get_library_version(): return {library!r}\n"
    )
    result = check_mpi(60, {**clean_env, "PATH": pals, "PYTHONPATH": str(tmp_path)})
    assert (result.status, result.details["library"]) == (status, library)


# Room.


def test_there_is_room_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = disk(5, {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)})
    assert result.status in ("ok", "warning")
    assert result.details["the folder of records"]["folder"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing is left, and nothing is made"
    result = disk(5, {"HOME": str(tmp_path), "TMPDIR": str(tmp_path / "none")})
    assert (result.status, "set TMPDIR" in result.remedy) == ("error", True)
    assert "none (TMPDIR) cannot be written: No such file" in result.message
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = disk(5, {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
    assert (result.status, "is gone" in result.message) == ("error", True)


@pytest.fixture
def on_a_small_disk(small_disk):
    """Run a check where a folder is a file system of so many bytes."""

    def run_there(size, call, folder):
        code = f"from ezpz_launch import _checks; r = _checks.{call}"
        code += "; print(r.status, r.message, r.remedy, sep='\\t')"
        words = [*small_disk(size, folder), sys.executable, "-c", code]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return done.stdout.split("\t")

    return run_there


def test_a_full_disk_is_an_error(on_a_small_disk, tmp_path):
    call = f"disk(5, {{'HOME': {str(tmp_path)!r}, 'TMPDIR': {str(tmp_path)!r}}})"
    status, message, remedy = on_a_small_disk("512k", call, tmp_path)
    assert (status, "remove what is old there" in remedy) == ("error", True)
    assert f"{tmp_path} (the working directory) cannot be written: No space left" in message
    status, message, _ = on_a_small_disk("8m", call, tmp_path)
    assert (status, "(the working directory) has 8.0 MiB free" in message) == ("warning", True)


def test_the_shared_memory_of_a_container_and_of_this_host(on_a_small_disk, tmp_path):
    assert shared_memory(5).status in ("ok", "warning")
    missing = shared_memory(5, folder=str(tmp_path / "shm"))
    assert missing.status == ("error" if sys.platform == "linux" else "ok")
    status, message, remedy = on_a_small_disk("64m", "shared_memory(5)", "/dev/shm")
    assert (status, message[:28]) == ("warning", "64.0 MiB free in /dev/shm: b")
    assert "--shm-size=8g" in remedy
    status, message, _ = on_a_small_disk("512k", "shared_memory(5)", "/dev/shm")
    assert status == "error"
    assert "/dev/shm cannot be written: No space left on device" in message
