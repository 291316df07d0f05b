"""What it costs to know where we are: ``hatch run bench:topology [--runs=41] [--json=FILE]``.

What is measured once per process runs in fresh ones.
"""

import sys
import tempfile
from pathlib import Path

import fire
from callee import fresh
from paired import Row, alone, seconds
from table import finish

import ezpz_topo

# A rank of 120,960 in a Slurm job, and in a PBS job whose node file has one line a node, or a slot.
SIMULATED = """
import sys, time
import ezpz_topo
env = dict(PALS_RANKID="120959", PMI_RANK="120959", PMI_SIZE="120960", PALS_LOCAL_RANKID="11",
           PALS_LOCAL_SIZE="12", PALS_NODEID="10079")
if sys.argv[1] == "slurm":
    env |= dict(SLURM_JOB_ID="7", SLURM_JOB_NODELIST="x[1000-1139]c0s[0-71]", SLURM_NTASKS="120960",
                SLURM_JOB_NUM_NODES="10080", SLURM_TASKS_PER_NODE="12(x10080)")
else:
    env |= dict(PBS_JOBID="1.pbs-0001", PBS_NODEFILE=sys.argv[1])
began = time.perf_counter()
topology = ezpz_topo.detect(env)
seconds = time.perf_counter() - began
assert topology.allocation.num_nodes == 10080 and topology.rank.world_size == 120960
print(seconds * 1000, peak_mb())
"""
FIRST_DETECT = """
import time, ezpz_topo
began = time.perf_counter(); ezpz_topo.detect(); first = time.perf_counter() - began
print(first * 1000)
"""


def columns(code: str, *words: str, runs: int) -> list[list[float]]:
    """Run a program in fresh processes; return the samples of each number that it prints."""
    # The first run compiles what the others import.
    rows = [fresh(sys.executable, code, *words) for _ in range(runs + 1)][1:]
    return [list(column) for column in zip(*rows, strict=True)]


def measure(runs: int) -> list[Row]:
    """Return all rows of this section."""
    few = min(runs, 9)
    here = [seconds(ezpz_topo.detect) * 1e3 for _ in range(runs)]
    (first,) = columns(FIRST_DETECT, runs=few)
    rows = [
        alone("topology/detect", "detect()", "ms", here),
        alone("topology/detect-first", "detect(), the first of a process", "ms", first),
    ]
    with tempfile.TemporaryDirectory() as folder:
        a_node, a_slot = Path(folder, "nodes"), Path(folder, "slots")
        hosts = ezpz_topo.expand_nodelist("nid[000001-010080]")
        lines = [f"{host}.hsn.cm.aurora.alcf.anl.gov\n" for host in hosts]
        a_node.write_text("".join(lines), encoding="utf-8")
        a_slot.write_text("".join(line * 12 for line in lines), encoding="utf-8")
        for name, what, word in (
            ("rank-slurm", "rank of 120,960, Slurm", "slurm"),
            ("rank-pbs-nodes", "rank of 120,960, PBS", str(a_node)),
            ("rank-pbs-slots", "rank of 120,960, PBS, 12 lines", str(a_slot)),
        ):
            took, peak = columns(SIMULATED, word, runs=few)
            rows += [
                alone(f"topology/{name}", what, "ms", took),
                alone(f"topology/{name}-memory", f"{what}: memory", "MB", peak),
            ]
    return rows


def main(runs: int = 41, json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        runs: How often `detect` is called; fresh processes are at most nine.
        json: A file to write the figures to.
    """
    finish(measure(runs), json)


if __name__ == "__main__":
    fire.Fire(main)
