"""What ezpz-launch adds: ``hatch run bench:launch [--runs=9] [--json=FILE]``.

Start to process group ready is measured on two ranks, under ezpz-launch, bare mpiexec, spawn and
torchrun, in turn (A B C D A B C D ...), and compared as ratios: each rank notes when its group is
ready, and the later one counts. Planning is measured in this process, for 10,080 nodes x 12 ranks.
"""

import json as json_module
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import fire
from startup import seconds

from ezpz_launch import Request, plan
from ezpz_launch._planning.identify import Launcher
from ezpz_launch._planning.launchers import argv, hostfile_of
from ezpz_topo import imagine

READY = """
import os, sys, time
import torch.distributed as dist
rank = os.environ.get("RANK") or os.environ["PMI_RANK"]
os.environ.update(RANK=rank, WORLD_SIZE="2")
dist.init_process_group("gloo")
dist.barrier()
with open(os.path.join(sys.argv[1], rank), "w") as file:
    file.write(repr(time.time()))
dist.destroy_process_group()
"""


def ready_after(words: list[str], env: dict[str, str]) -> float:
    """Start two ranks and return the seconds until the later one's process group was ready."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        subprocess.run(
            [*words, sys.executable, "-c", READY, folder], env=env, check=True, capture_output=True
        )
        return max(float(path.read_text()) for path in Path(folder).iterdir()) - began


def planning_ms(machine: str, kind: str, runs: int) -> float:
    """Return the median time to plan 10,080 nodes x 12 ranks, with command line and hostfile."""
    topology = imagine(machine, 10080, {})
    request, launcher = Request(("python", "train.py"), ppn=12), Launcher(kind, kind, "")
    samples = []
    for _ in range(runs):
        began = time.perf_counter()
        planned = plan(
            topology, request, launcher, hosts=topology.allocation.hosts, hosts_source="job",
            hostfile="HOSTFILE", port=29500, user_env={},
        )  # fmt: skip
        argv(planned)
        hostfile_of(planned)
        samples.append((time.perf_counter() - began) * 1000)
    return statistics.median(samples)


def main(runs: int = 9, json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        runs: How often each command is run.
        json: A file to write the figures to.
    """
    scripts = sysconfig.get_path("scripts")
    env = {**os.environ, "PATH": os.pathsep.join([scripts, os.environ["PATH"]])}
    env |= {"MASTER_ADDR": "127.0.0.1"}
    env.pop("OMP_NUM_THREADS", None)
    ways = {
        "ezpz-launch": ["ezpz-launch", "-n", "2"],
        "spawn": ["ezpz-launch", "--launcher", "spawn", "-n", "2"],
        "mpiexec": ["mpiexec", "-n", "2"],
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node=2", "--no-python"],
    }
    ready: dict[str, list[float]] = {name: [] for name in ways}
    true: dict[str, list[float]] = {name: [] for name in ways if name != "torchrun"}
    for turn in range(runs + 1):
        for name, words in ways.items():
            port = str(20000 + (os.getpid() * 7 + turn * 4 + len(ready[name])) % 10000)
            ready[name].append(ready_after(words, {**env, "MASTER_PORT": port}))
            if name in true:
                true[name].append(seconds([*words, "true"], env))
    ready_s = {name: statistics.median(times[1:]) for name, times in ready.items()}
    true_ms = {name: statistics.median(times[1:]) * 1000 for name, times in true.items()}
    figures: dict[str, float] = {
        f"{name}: process group ready, s": round(value, 3) for name, value in ready_s.items()
    }
    figures |= {
        "ready, over bare mpiexec (wanted 1.05)": round(
            ready_s["ezpz-launch"] / ready_s["mpiexec"], 3
        ),
        "ready, over torchrun (wanted 0.75)": round(
            ready_s["ezpz-launch"] / ready_s["torchrun"], 3
        ),
    }
    figures |= {f"{name} -n 2 true, ms": round(value, 1) for name, value in true_ms.items()}
    figures["true, over mpiexec, ms (wanted 60)"] = round(
        true_ms["ezpz-launch"] - true_ms["mpiexec"], 1
    )
    for machine, kind in (("aurora", "pals"), ("frontier", "srun"), ("generic-pbs", "hydra")):
        name = f"plan 10,080 nodes x 12 for {kind}, ms (wanted 100)"
        figures[name] = round(planning_ms(machine, kind, runs), 1)
    for name, value in figures.items():
        print(f"{name:<52} {value}")
    if json:
        Path(json).write_text(json_module.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    fire.Fire(main)
