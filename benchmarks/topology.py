"""What it costs to know where we are: ``hatch run bench:topology [--json=FILE]``.

Nodelists are expanded by us and by python-hostlist in turn (A B A B ...) in one process, and
medians are compared; what is measured once per process runs in a fresh one.
"""

import json as json_module
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import fire
import hostlist

import ezpz_topo

RANGE = "nid[000001-010080]"
TWO_BRACKETS = "x[1000-1139]c0s[0-71]"
HOSTILE = ["n[1-100000000]", "n[1-1000]m[1-1000]o[1-1000]", "n[" * 100_000, "n[1-2]" * 10_000]

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
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(seconds * 1000, int(peak) / 1024)
"""
FIRST_DETECT = """
import time, ezpz_topo
began = time.perf_counter(); ezpz_topo.detect(); first = time.perf_counter() - began
print(first * 1000)
"""


def ms(call: Callable[[], object]) -> float:
    """Time one call, in ms."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000


def ratio(ours: Callable[[], object], theirs: Callable[[], object], runs: int) -> tuple[float, ...]:
    """Return the medians of both, in ms, and the ratio of the medians."""
    pairs = [(ms(ours), ms(theirs)) for _ in range(runs)]
    mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    return mine, other, mine / other


def refused(nodelist: str) -> None:
    """Expand a nodelist that must be refused."""
    try:
        ezpz_topo.expand_nodelist(nodelist)
    except ezpz_topo.NodelistError:
        return
    raise AssertionError(nodelist[:40])


def fresh(code: str, *words: str, runs: int = 9) -> list[float]:
    """Run a program in fresh processes; return the median of each number that it prints."""
    # The first run compiles what the others import.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        env.setdefault("PYTHONPYCACHEPREFIX", cache)
        for _ in range(runs + 1):
            done = subprocess.run([sys.executable, "-c", code, *words], env=env,
                                  capture_output=True, text=True, check=True)  # fmt: skip
            rows.append([float(word) for word in done.stdout.split()])
    return [statistics.median(column) for column in zip(*rows[1:], strict=True)]


def import_ms(module: str, prefix: str) -> list[float]:
    """Return what importing a module costs: its own modules alone, and all that it brings."""
    code = f"""
import subprocess, sys
done = subprocess.run([sys.executable, "-X", "importtime", "-c", "import {module}"],
                      capture_output=True, text=True, check=True)
rows = [line.split(":")[1].split("|") for line in done.stderr.splitlines() if "|" in line][1:]
print(sum(int(own) for own, _, name in rows if name.strip().startswith("{prefix}")) / 1000,
      int(rows[-1][1]) / 1000)
"""
    return fresh(code)


def main(runs: int = 41, json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        runs: How often each pair is run.
        json: A file to write the figures to.
    """
    plain = ",".join(ezpz_topo.expand_nodelist(RANGE))
    hosts = plain.split(",")
    figures: dict[str, float] = {}
    for name, nodelist in (("range", RANGE), ("two brackets", TWO_BRACKETS), ("plain", plain)):
        assert len(ezpz_topo.expand_nodelist(nodelist)) == 10080
        mine, other, over = ratio(
            lambda text=nodelist: ezpz_topo.expand_nodelist(text),
            lambda text=nodelist: hostlist.expand_hostlist(text),
            runs,
        )
        figures[f"expand 10,080, {name}, ms"] = mine
        figures[f"  {name}: python-hostlist {hostlist.__version__}, ms"] = other
        figures[f"  {name}: ours over theirs"] = over
    mine, other, over = ratio(
        lambda: ezpz_topo.fold_nodelist(hosts), lambda: hostlist.collect_hostlist(hosts), 9
    )
    figures |= {"fold 10,080, ms": mine, "fold: ours over theirs": over}
    figures["refuse the worst hostile list, ms"] = max(
        ms(lambda text=text: refused(text)) for text in HOSTILE
    )
    figures["detect(), ms"] = statistics.median(ms(ezpz_topo.detect) for _ in range(runs))
    (figures["detect(), the first call of a process, ms"],) = fresh(FIRST_DETECT)
    own, everything = import_ms("ezpz_topo", "ezpz_topo")
    figures |= {"import ezpz_topo, own modules, ms": own, "  with the library's, ms": everything}
    with tempfile.TemporaryDirectory() as folder:
        a_node, a_slot = Path(folder, "nodes"), Path(folder, "slots")
        lines = [f"{host}.hsn.cm.aurora.alcf.anl.gov\n" for host in hosts]
        a_node.write_text("".join(lines), encoding="utf-8")
        a_slot.write_text("".join(line * 12 for line in lines), encoding="utf-8")
        for name, word in (
            ("Slurm", "slurm"),
            ("PBS", str(a_node)),
            ("PBS, 12 lines", str(a_slot)),
        ):
            took, peak = fresh(SIMULATED, word)
            figures[f"rank of 120,960, {name}, ms"] = took
            figures[f"  whole process, {name}, MiB"] = peak
    for name, value in figures.items():
        print(f"{name:<46} {value:.3f}")
    if json:
        Path(json).write_text(json_module.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    fire.Fire(main)
