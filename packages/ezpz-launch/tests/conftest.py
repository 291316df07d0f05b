"""The real command and the real mpiexec of this environment; without one, a skip that says so."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")


@pytest.fixture
def clean_env(tmp_path_factory):
    """The environment of a user outside of any job, with this environment's commands first."""
    scripts = sysconfig.get_path("scripts")
    env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    env = {
        name: value
        for name, value in env.items()
        if not name.startswith(("EZPZ_", "SLURM_", "PBS_", "PMI", "OMPI_", "TORCHELASTIC"))
    }
    # Records of the tests' launches are none of the user's.
    state = str(tmp_path_factory.mktemp("state"))
    return {**env, "PATH": os.pathsep.join([scripts, env["PATH"]]), "EZPZ_STATE_DIR": state}


@pytest.fixture
def mpiexec(clean_env):
    """Path of a real mpiexec."""
    path = shutil.which("mpiexec", path=clean_env["PATH"])
    if path is None:
        pytest.skip("no mpiexec here: pip install mpich")
    return path


@pytest.fixture
def launch(clean_env, mpiexec, tmp_path):
    """Run ezpz-launch to its end; nothing may be left running or lying about afterwards."""
    reports = tmp_path / "reports"
    reports.mkdir()

    def run(*words, env=None, timeout=180, **kwargs):
        return subprocess.run(
            [sys.executable, "-m", "ezpz_launch", *words],
            env={**clean_env, "TMPDIR": str(reports), **(env or {})},
            capture_output=True,
            timeout=timeout,
            check=False,
            **{"text": True, **kwargs},
        )

    yield run
    assert list(Path(reports).iterdir()) == []


@pytest.fixture
def until():
    """Wait for a condition; fail if it is still false after a generous time."""

    def wait(condition, seconds=20):
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, f"not within {seconds} s"
            time.sleep(0.02)
        return value

    return wait


@pytest.fixture
def process():
    """Start processes that are gone afterwards, each in a process group of its own by default."""
    started = []

    def start(*words, process_group=0, **options):
        child = subprocess.Popen(words, process_group=process_group, **options)
        started.append((child, process_group == 0 or options.get("start_new_session", False)))
        return child

    yield start
    for child, leads in started:
        if leads:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        for pipe in filter(None, (child.stdin, child.stdout, child.stderr)):
            pipe.close()
        child.wait()


@pytest.fixture
def background(clean_env, process):
    """Start ezpz-launch with the spawner, without waiting for it."""

    def start(*words, env=None, **options):
        return process(
            *(sys.executable, "-m", "ezpz_launch", "--launcher", "spawn", *words),
            env={**clean_env, **(env or {})},
            **options,
        )

    return start
