"""One rank of the worlds in which ``hatch run bench:obs`` measures; see there.

``obs_ranks.py '{"calls": 1000, ...}'`` prints samples as JSON, in seconds: of an update with
statistics over the ranks, of a deferred one, and of one bare all-gather of as many bytes.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ezpz_obs

METRICS = {f"train/metric{i}": 0.123456789 * (i + 1) for i in range(10)}


def main(job: dict[str, Any]) -> dict[str, list[float]]:
    """Be one rank, and return what it found."""
    ranks = job["ranks"]
    os.environ |= {
        "RANK": str(job["rank"]), "LOCAL_RANK": str(job["rank"]), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }  # fmt: skip
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", job["port"])
    dist.init_process_group("gloo", store=store, rank=job["rank"], world_size=ranks)
    folder = tempfile.TemporaryDirectory()
    history = ezpz_obs.History(folder.name, cross_rank=True)
    later = ezpz_obs.History(f"{folder.name}/later", cross_rank=True, deferred=True)
    mine = torch.ones(32, dtype=torch.float64)
    every = [torch.empty(32, dtype=torch.float64) for _ in range(ranks)]
    bare = dist.new_group()
    calls_of: dict[str, Callable[[], object]] = {
        "ours": lambda: history.record(METRICS),
        "deferred": lambda: later.record(METRICS),
        "all_gather": lambda: dist.all_gather(every, mine, group=bare),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls_of}
    for turn in range(job["calls"] + 20):
        for name, call in list(calls_of.items())[:: -1 if turn % 2 else 1]:
            time.sleep(0.002)  # a step: what was deferred is exchanged beside no other's call
            dist.barrier()
            began = time.perf_counter_ns()
            call()
            if turn >= 20:
                taken[name].append((time.perf_counter_ns() - began) / 1e9)
    history.close()
    later.close()
    dist.destroy_process_group()
    folder.cleanup()
    return taken


if __name__ == "__main__":
    answer = main(json.loads(sys.argv[1]))
    print(json.dumps(answer))
