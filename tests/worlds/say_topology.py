"""Report what ezpz_topo says of this process, its job and its hosts into a directory.

usage: say_topology.py DIRECTORY [--ask] [--job-of NODE]... [--no-scontrol] [--mpi]
                                 [--torch SECONDS]

Errors are reported as text. What scontrol says of the same is reported with it; its times are
seconds since 1970, so no time zone is involved.
"""

import argparse
import json
import os
import re
import resource
import subprocess
from dataclasses import asdict
from functools import partial
from pathlib import Path

import ezpz_topo
from ezpz_topo import TopoError, _slurm

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--ask", action="store_true", help="the scheduler may be asked for more")
parser.add_argument("--job-of", action="append", default=[], metavar="NODE")
parser.add_argument("--no-scontrol", action="store_true", help="start no command ourselves")
parser.add_argument("--mpi", action="store_true", help="also what MPI itself says")
parser.add_argument("--torch", type=float, help="also set up, waiting so many seconds")
args = parser.parse_args()


def answer(question):
    try:
        return question()
    except TopoError as error:
        return f"{type(error).__name__}: {error}"


def as_said(job):
    return {**asdict(job), "on_node": job.on_node}


def job_of(node):
    job = _slurm.job_of_this_host(os.environ, node)
    return None if job is None else as_said(job)


def scontrol(*words):
    plain = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    done = subprocess.run(
        ["scontrol", *words], env=plain, check=True, capture_output=True, text=True
    )
    return done.stdout


def hostnames(nodelists):
    return [host for part in nodelists for host in scontrol("show", "hostnames", part).split()]


def facts_of(job_id):
    # Of an array its other tasks are told as well.
    mine = re.compile(rf"(JobId=|.* HetJobId=){job_id} ")
    records = scontrol("--oneliner", "show", "job", job_id).splitlines()
    told = [record for record in records if mine.match(record)]
    ends = [re.search(" EndTime=(\\S+) ", record) for record in told]
    nodelists = [match[1] for record in told if (match := re.search(" NodeList=(\\S+) ", record))]
    return {"job": hostnames(nodelists), "end": ends[0][1] if ends and ends[0] else None}


def by_mpi():
    from mpi4py import MPI

    world, node = MPI.COMM_WORLD, MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    return [world.rank, world.size, node.rank, node.size, MPI.Get_processor_name()]


topology = answer(lambda: ezpz_topo.detect(ask=args.ask or None))
rank = answer(ezpz_topo.get_rank_info)
known, looked = not isinstance(rank, str), not isinstance(topology, str)
said = {
    "rank": rank.rank if known else -1,
    "rank_info": asdict(rank) if known else rank,
    "allocation": as_said(topology.allocation) if looked else topology,
    "explained": {row[0]: row[1:] for row in topology.explain()} if looked else topology,
    "hostname": ezpz_topo.get_hostname(),
    "num_nodes": answer(ezpz_topo.get_num_nodes),
    "node_index": answer(ezpz_topo.get_node_index),
    "total": answer(ezpz_topo.get_world_size_total),
    "in_use": answer(ezpz_topo.get_world_size_in_use),
    "hosts": answer(lambda: asdict(ezpz_topo.get_hosts())),
    "job_of": {node: answer(partial(job_of, node)) for node in args.job_of},
    "env": {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("SLURM", "PMI_", "MPI_", "EZPZ_"))
    },
    # Memory of the largest child that has ended: 0 where there was none.
    "started_commands": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0,
    "mpi": by_mpi() if args.mpi else None,
}
if args.torch:
    import ezpz_dist

    ezpz_dist.setup_torch(timeout=args.torch)
    ezpz_dist.cleanup()
if not args.no_scontrol:
    found = [job["job_id"] for job in said["job_of"].values() if isinstance(job, dict)]
    job_id = os.environ.get("SLURM_JOB_ID") or next(iter(found), None)
    said["scontrol"] = facts_of(job_id) if job_id else {}
    said["scontrol"]["step"] = hostnames([os.environ.get("SLURM_STEP_NODELIST", "")])
path = args.directory / f"{os.getpid()}.json"
path.write_text(json.dumps(said, default=str), encoding="utf-8")
