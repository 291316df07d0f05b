"""``ezpz test`` over nodeA and nodeB: trains on both, and measures the pair that they are."""

import json
import sys
from pathlib import Path

SMALL = ["--steps=6", "--layers=2", "--dim=64", "--seq=32", "--batch=4", "--sizes=64K"]


def test_ranks_of_two_hosts_train_and_are_measured(hosts, tool, tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("nodeA\nnodeB\n")
    path = f"{Path(tool('mpiexec')).parent}:{hosts.environment['PATH']}"
    environment = {
        "PATH": path, "OMP_NUM_THREADS": "1", "EZPZ_STATE_DIR": str(tmp_path / "state"),
        "HYDRA_LAUNCHER_EXEC": hosts.environment["HYDRA_LAUNCHER_EXEC"],
    }  # fmt: skip
    launch = ["-n", "2", "--ppn", "1", "--hostfile", str(hostfile)]
    done = hosts.run(
        [sys.executable, "-m", "ezpz", "test", *launch, *SMALL, "--pairs", "--json"],
        env=environment, timeout=300,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert (found["ok"], found["ranks"], found["nodes"]) == (True, 2, 2)
    assert found["losses"][-1] < 0.9 * found["losses"][0]
    (pair,) = found["node_pairs"]["pairs"]
    assert pair["hosts"] == ["nodeA", "nodeB"]
    assert (pair["ranks"], pair["bytes"], pair["is_right"]) == (2, 65536, True)
