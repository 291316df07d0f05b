"""The real command and the real mpiexec of this environment; without one, a skip that says so."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")


@pytest.fixture
def clean_env():
    """The environment of a user outside of any job, with this environment's commands first."""
    scripts = sysconfig.get_path("scripts")
    env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    env = {
        name: value
        for name, value in env.items()
        if not name.startswith(("EZPZ_", "SLURM_", "PBS_", "PMI", "OMPI_", "TORCHELASTIC"))
    }
    return {**env, "PATH": os.pathsep.join([scripts, env["PATH"]])}


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

    def run(*words, env=None, timeout=60, **kwargs):
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
