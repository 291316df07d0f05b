"""Every function of ezpz_dist in ranks that know nothing of MPI: one process, torchrun's, plain."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "worlds" / "every_function.py"
LAUNCHERS = {
    "python": (1, []),
    "torchrun": (2, ["torchrun", "--nproc-per-node", "2", "--no-python"]),
    "spawn": (4, ["ezpz-launch", "-n", "4", "--launcher", "spawn"]),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_function(launcher, tmp_path):
    size, words = LAUNCHERS[launcher]
    env = {
        **os.environ, "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1", "TORCH_DEVICE": "cpu", "RES_OPTIONS": "timeout:1 attempts:1",
    }  # fmt: skip
    done = subprocess.run(
        [*words, sys.executable, str(PROGRAM), str(tmp_path)], env=env, timeout=180,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    assert [one["size"] for one in said] == [size] * size
    for one in said[:-1]:
        stands = rf"rank {size - 1} on \S+ stands at every_function\.py:\d+ in load_batch"
        assert re.search(stands, one["missing"]), one
