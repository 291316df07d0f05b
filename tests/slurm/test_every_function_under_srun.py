"""ezpz_dist on two nodes under srun: every function, and a rank that is missing."""

import json
import os
import re
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "worlds" / "every_function.py"
STAYS = PROGRAM.read_text(encoding="utf-8").partition("# the missing rank")[0].count("\n") + 1


def test_every_function(slurm, sandbox, tmp_path):
    # The names of the sandbox's nodes resolve to nothing: nobody else can name the address.
    (port,) = sandbox.free_ports(1)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    slurm.run(
        ["srun", "-N", "2", "-n", "2", sys.executable, str(PROGRAM), str(tmp_path)],
        env={"TORCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1", **env},
    )
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (first["size"], second["size"]) == (2, 2)
    host = re.escape(os.uname().nodename)
    stands = rf"rank 1 on {host} stands at every_function\.py:{STAYS} in load_batch"
    assert re.search(rf"barrier\(\) at .* on rank 0 .* {stands}", first["missing"]), first
    assert first["seconds"] < 60, "the time-out and two seconds for the name; a busy machine"
