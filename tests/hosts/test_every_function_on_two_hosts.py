"""ezpz_dist on two hosts under bare mpiexec: every function, and a rank that is missing."""

import json
import re
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "worlds" / "every_function.py"
STAYS = PROGRAM.read_text(encoding="utf-8").partition("# the missing rank")[0].count("\n") + 1


def test_every_function(hosts, tool, tmp_path):
    hostfile = tmp_path / "hostfile"
    # mpiexec itself runs on nodeA: rank 0 need not.
    hostfile.write_text("nodeB\nnodeA\n", encoding="utf-8")
    hosts.run(
        [tool("mpiexec"), "--envall", "--np=2", "--ppn=1", f"--hostfile={hostfile}",
         sys.executable, str(PROGRAM), str(tmp_path), "--mpi"],
        env={"TORCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (first["host"], second["host"]) == ("nodeB", "nodeA")
    stands = rf"rank 1 on nodeA stands at every_function\.py:{STAYS} in load_batch"
    assert re.search(rf"barrier\(\) at .* on rank 0 \(nodeB\) .* {stands}", first["missing"]), first
    assert first["seconds"] < 60, "the time-out and two seconds for the name; a busy machine"
