"""Report what ezpz_topo says of this process, its job and its hosts into a directory.

usage: say.py DIRECTORY [--mpi] [--torch [--timeout SECONDS]]

Errors are reported as text.
"""

import argparse
import json
import os
import resource
from dataclasses import asdict
from pathlib import Path

import ezpz_topo
from ezpz_topo import TopoError

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--mpi", action="store_true", help="also what MPI itself says")
parser.add_argument("--torch", action="store_true", help="also a sum of all ranks by torch")
parser.add_argument("--timeout", type=float, default=60, help="that long the ranks wait")
args = parser.parse_args()


def answer(question):
    try:
        return question()
    except TopoError as error:
        return f"{type(error).__name__}: {error}"


def as_said(topology):
    return {**asdict(topology), "explained": {row[0]: row[1:] for row in topology.explain()}}


def by_mpi():
    from mpi4py import MPI

    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    return {
        "rank": MPI.COMM_WORLD.rank,
        "world_size": MPI.COMM_WORLD.size,
        "local_rank": node.rank,
        "local_world_size": node.size,
        "host": MPI.Get_processor_name(),
        "hosts": MPI.COMM_WORLD.allgather(os.uname().nodename),
    }


def by_torch():
    import torch
    import torch.distributed as dist

    import ezpz_dist

    rank = ezpz_dist.setup_torch(timeout=args.timeout)
    # More than one packet, so that it takes the path that a gradient takes.
    numbers = torch.full((1 << 20,), float(rank + 1))
    dist.all_reduce(numbers)
    found = {
        "rank": rank,
        "backend": dist.get_backend(),
        "sums": numbers.unique().tolist(),
        "address": os.environ["MASTER_ADDR"],
    }
    ezpz_dist.cleanup()
    return found


said = {
    "rank": int(os.environ.get("PMI_RANK", "-1")),
    "host": os.uname().nodename,
    "rank_info": answer(lambda: asdict(ezpz_topo.get_rank_info())),
    "num_nodes": answer(ezpz_topo.get_num_nodes),
    "node_index": answer(ezpz_topo.get_node_index),
    "topology": answer(lambda: as_said(ezpz_topo.detect())),
    "hosts": answer(lambda: asdict(ezpz_topo.get_hosts())),
    # Memory of the largest child that has ended: 0 where there was none.
    "started_commands": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0,
    "mpi": by_mpi() if args.mpi else None,
    "torch": by_torch() if args.torch else None,
}
path = args.directory / f"{os.getpid()}.json"
path.write_text(json.dumps(said, default=str), encoding="utf-8")
