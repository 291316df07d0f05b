"""Under each launcher that is installed: two ranks train, one fails and is named, all resume."""

import os
import shutil
import sys
import sysconfig

import pytest
from tests.conftest import load

everywhere = load("launchers.test_one_script_everywhere")

LAUNCHERS = {"mpiexec": "mpiexec", "torchrun": "torchrun", "spawn": sys.executable}
"""Words after --launcher, and the command that must be there."""


@pytest.mark.end_to_end
@pytest.mark.parametrize("kind", LAUNCHERS)
def test_ranks_train_fail_and_resume(kind, program, tmp_path):
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    if shutil.which(LAUNCHERS[kind], path=path) is None:
        pytest.skip(f"{LAUNCHERS[kind]} is not installed")
    words = ["ezpz-launch", "--launcher", kind, "-n", "2", *program("train_twice")]
    words.append(str(tmp_path / "checkpoints"))
    state = str(tmp_path / "state")
    failed = everywhere.start(words, tmp_path, EZPZ_STATE_DIR=state)
    assert failed.returncode == 3, failed.stderr
    host = os.uname().nodename
    named = f"ezpz-launch: exit status 3, that of rank 1 on {host}"
    assert named in failed.stderr.splitlines(), failed.stderr
    done = everywhere.start(words, tmp_path, EZPZ_STATE_DIR=state)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "rank 0 of 2: steps 2 to 5",
        "rank 1 of 2: steps 2 to 5",
    ]
