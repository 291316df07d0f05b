"""Detection and planning: what one process does with the names of all nodes."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .fresh import answer
from .growth import NODES, PER_NODE, Curve, Found

MAX_ARG_STRLEN = 131_071
"""Bytes of one word of a command line. Source: Linux, include/uapi/linux/binfmts.h: 32 pages."""

DETECT = """
import json, os, resource, sys, time
import ezpz_topo
env = json.loads(sys.argv[1])
began = time.process_time()
topology = ezpz_topo.detect(env)
took = time.process_time() - began
text = sys.argv[2]
assert topology.allocation.num_nodes == int(text), topology.allocation.num_nodes
assert topology.rank.world_size == 12 * int(text)
def thousand():
    began = time.process_time()
    for _ in range(1000):
        ezpz_topo.get_rank(env)
    return time.process_time() - began
rank = min(thousand() for _ in range(5))  # what disturbs it only adds
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([took * 1e3, rank * 1e3, peak / 1024]))
"""

PLAN = """
import dataclasses, json, sys, time
from ezpz_launch import Request, plan
from ezpz_launch._plan.kind import Launcher
from ezpz_launch._plan.launchers import build_argv, build_hostfile
from ezpz_launch._run.record import record_of, to_json
from ezpz_topo import imagine
machine, kind, path, each = *sys.argv[1:4], int(sys.argv[4])
request, launcher = Request(("python", "train.py"), ppn=12), Launcher(kind, kind, "")
def once(job):
    topology = imagine(machine, len(job), {})
    allocation = dataclasses.replace(topology.allocation, hosts=tuple(job), node_name=job[0])
    topology = dataclasses.replace(topology, allocation=allocation)
    began = time.process_time()
    planned = plan(topology, request, launcher, hosts=job[::each], hosts_source="job",
                   hostfile="HOSTFILE", port=29500, user_env={})
    words, hostfile = build_argv(planned), build_hostfile(planned)
    took = time.process_time() - began
    return took, words, hostfile, to_json(record_of("scale", planned, words, allocation))
with open(path) as file:
    job = json.load(file)
once(["warm1", "warm2"])  # what is imported at first use
took, words, hostfile, record = once(job)  # once, as in a launch: nothing of this job is known
print(json.dumps([took * 1e3, sum(map(len, words)) + len(words), max(map(len, words)),
                  sum(len(host) + 1 for host in hostfile or ()), len(record)]))
"""


def place(nodes: int) -> dict[str, str]:
    """Return what PALS tells the last rank of a job."""
    ranks = PER_NODE * nodes
    return {
        "PALS_RANKID": str(ranks - 1), "PMI_RANK": str(ranks - 1), "PMI_SIZE": str(ranks),
        "PALS_LOCAL_RANKID": str(PER_NODE - 1), "PALS_LOCAL_SIZE": str(PER_NODE),
        "PALS_NODEID": str(nodes - 1),
    }  # fmt: skip


def names(nodes: int) -> list[str]:
    """Return hosts named as Aurora's (cabinet, chassis, slot, board, node), as a job has them.

    A job gets the nodes that are free: here nineteen of twenty, the same at each run.
    """
    last = nodes * 20 // 19
    free = sorted(random.Random(0).sample(range(last), nodes))  # noqa: S311
    return [f"x{4000 + n // 72}c{n // 12 % 6}s{n // 2 % 6}b0n{n % 2}" for n in free]


def jobs(folder: Path, nodes: int) -> dict[str, dict[str, str]]:
    """Return the environments of a rank in jobs of so many nodes, by how the job names them."""
    hosts = names(nodes)
    full = [f"{host}.hsn.cm.aurora.alcf.anl.gov\n" for host in hosts]
    a_node, a_slot = folder / f"nodes-{nodes}", folder / f"slots-{nodes}"
    a_node.write_text("".join(full), "utf-8")
    a_slot.write_text("".join(line * PER_NODE for line in full), "utf-8")
    # As a busy machine gives them: no two neighbours, so that nothing folds.
    mixed = [f"nid{n:06}" for n in range(0, 7 * nodes, 7)]
    random.Random(0).shuffle(mixed)  # noqa: S311  # the same at each run
    slurm = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(PER_NODE * nodes), "SLURM_TASKS_PER_NODE": f"{PER_NODE}(x{nodes})",
    }  # fmt: skip
    here = place(nodes)
    return {
        "PBS, a line a node": here | {"PBS_JOBID": "1.pbs", "PBS_NODEFILE": str(a_node)},
        "PBS, a line a rank": here | {"PBS_JOBID": "1.pbs", "PBS_NODEFILE": str(a_slot)},
        "Slurm, one range": here | slurm | {"SLURM_JOB_NODELIST": f"nid[000001-{nodes:06}]"},
        "Slurm, scattered": here | slurm | {"SLURM_JOB_NODELIST": f"nid[{_numbers(mixed)}]"},
    }


def _numbers(hosts: list[str]) -> str:
    return ",".join(host.removeprefix("nid") for host in hosts)


def detection(runs: int) -> Iterator[Found]:
    """Yield what it costs one rank to know where it is; the curves are of nodes."""
    taken: dict[str, dict[int, list[list[float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(runs):
            for nodes in NODES:
                for how, env in jobs(Path(folder), nodes).items():
                    figures = answer(DETECT, json.dumps(env), str(nodes))
                    taken.setdefault(how, {}).setdefault(nodes, []).append(figures)
    for how, by_nodes in taken.items():
        spent = {nodes: [row[0] for row in rows] for nodes, rows in by_nodes.items()}
        yield Curve("detection", f"detect(), {how}", "ms", "nodes", "measured", spent, 1)
    some = taken["PBS, a line a rank"]
    ranks = {nodes * PER_NODE: [row[1] for row in rows] for nodes, rows in some.items()}
    yield Curve("detection", "get_rank()", "us", "ranks", "measured", ranks, 0)
    peak = {nodes: [row[2] for row in rows] for nodes, rows in some.items()}
    yield Curve("detection", "memory of the process", "MiB", "nodes", "measured", peak, 1)


def planning(runs: int) -> Iterator[Found]:
    """Yield what it costs ezpz-launch to plan, and how large what it writes is; of nodes."""
    ways = (
        ("PALS", "aurora", "pals", 1),
        ("srun", "frontier", "srun", 1),
        # The others are named on the command line, or in a file where that is too long for it.
        ("srun, every second node", "frontier", "srun", 2),
        ("Hydra", "generic-pbs", "hydra", 1),
    )
    for name, machine, kind, each in ways:
        rows = {}
        for nodes in NODES:
            with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
                json.dump(names(nodes * each), file)
                file.flush()
                words = (machine, kind, file.name, str(each))
                rows[nodes] = [answer(PLAN, *words) for _ in range(runs)]
        columns = (
            ("planning", f"plan, command line and hostfile for {name}", "ms", 1),
            ("planning", f"command line for {name}", "bytes", 1),
            ("planning", f"its longest word, for {name}", "bytes", None),
            ("planning", f"hostfile for {name}", "bytes", 1),
            ("records", f"record of a launch by {name}", "bytes", 1),
        )
        for number, (section, what, unit, goal) in enumerate(columns):
            points = {nodes: [row[number] for row in some] for nodes, some in rows.items()}
            if not max(max(samples) for samples in points.values()):
                continue  # this launcher needs no hostfile
            kind_of = "measured" if unit == "ms" else "counted"
            most = MAX_ARG_STRLEN if "longest" in what else None
            # Of some nodes it grows until their names go into a file, and shrinks.
            shrinks = each > 1 and unit == "bytes" and "hostfile" not in what
            yield Curve(section, what, unit, "nodes", kind_of, points, None if shrinks else goal,
                        most=most)  # fmt: skip
