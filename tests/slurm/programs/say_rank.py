"""Report what ezpz_topo says of this process, and what Slurm says, into a directory.

usage: say_rank.py DIRECTORY [--mpi]

With ``--mpi`` also what MPI itself says.
"""

import json
import os
import sys
from pathlib import Path

from ezpz_topo import get_rank_info

info = get_rank_info()
said = {
    "rank": info.rank,
    "world_size": info.world_size,
    "local_rank": info.local_rank,
    "local_world_size": info.local_world_size,
    "node_rank": info.node_rank,
    "launcher": info.launcher,
    "node": os.environ.get("SLURMD_NODENAME"),
    "procid": os.environ.get("SLURM_PROCID"),
    "ntasks": os.environ.get("SLURM_NTASKS"),
    "step": os.environ.get("SLURM_STEP_ID"),
    "tasks_per_node": os.environ.get("SLURM_STEP_TASKS_PER_NODE"),
}
if "--mpi" in sys.argv[2:]:
    from mpi4py import MPI

    said["mpi"] = [MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size]
Path(sys.argv[1], f"{os.getpid()}.json").write_text(json.dumps(said), encoding="utf-8")
