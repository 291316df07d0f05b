"""Under each launcher that is installed: two ranks train, one fails and is named, all resume."""

import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

LAUNCHERS = {"mpiexec": "mpiexec", "torchrun": "torchrun", "spawn": sys.executable}
"""Words after --launcher, and the command that must be there."""


def launch(kind, words, folder):
    scripts = sysconfig.get_path("scripts")
    path = os.pathsep.join([scripts, os.environ["PATH"]])
    env = {
        **os.environ,
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "EZPZ_STATE_DIR": str(folder / "state"),
    }
    if shutil.which(LAUNCHERS[kind], path=path) is None:
        pytest.skip(f"{LAUNCHERS[kind]} is not installed")
    command = [sys.executable, "-m", "ezpz_launch", "--launcher", kind, "-n", "2", *words]
    return subprocess.run(
        command, env=env, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.end_to_end
@pytest.mark.parametrize("kind", LAUNCHERS)
def test_ranks_train_fail_and_resume(kind, program, tmp_path):
    words = [*program("train_twice"), str(tmp_path / "checkpoints")]
    failed = launch(kind, words, tmp_path)
    assert failed.returncode == 3, failed.stderr
    host = os.uname().nodename
    named = f"ezpz-launch: exit status 3, that of rank 1 on {host}"
    assert named in failed.stderr.splitlines(), failed.stderr
    done = launch(kind, words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "rank 0 of 2: steps 2 to 5",
        "rank 1 of 2: steps 2 to 5",
    ]
