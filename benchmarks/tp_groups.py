"""Making the groups of a rank, for ``hatch run bench:tp``.

In fake worlds of up to 120,960 ranks, and as 8 real ranks.
``tp_groups.py '{"world": "fake", ...}'`` prints JSON for its parent.
"""

import json
import os
import sys
import time
import tracemalloc
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import ezpz_tp

# Calls are counted and groups found where torch keeps them: it has no public place for either.
c10d: Any = distributed_c10d
WAYS = ("ezpz", "all", "mesh")


def initialize(way: str, degrees: dict[str, int]) -> None:
    """Make the groups of a rank, in one of three ways."""
    tensor, context, pipeline = (degrees[axis] for axis in ("tensor", "context", "pipeline"))
    if way == "ezpz":
        ezpz_tp.initialize_tensor_parallel(tensor, pipeline, context)
        return
    size = dist.get_world_size()
    data = size // (tensor * context * pipeline)
    if way == "mesh":
        device_mesh.init_device_mesh(
            "cpu", (pipeline, data, context, tensor), mesh_dim_names=("pp", "dp", "cp", "tp")
        )
        return
    # As the predecessor did: every group of every axis, on every rank.
    ranks = torch.arange(size).view(pipeline, data, context, tensor)
    for dim in range(4):
        for group in ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist():
            dist.new_group(group)


def timed(way: str, degrees: dict[str, int]) -> dict[str, float]:
    """CPU time, because a busy machine is not the groups' fault."""
    began = time.process_time()
    initialize(way, degrees)
    return {"ms": (time.process_time() - began) * 1000}


def counted(way: str, degrees: dict[str, int]) -> dict[str, float]:
    """Calls and peak memory, apart from the time: tracing memory is slow."""
    calls = 0
    make = c10d._new_process_group_helper  # noqa: SLF001

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return make(*args, **options)

    # Every way ends here, once a group.
    c10d._new_process_group_helper = counting  # noqa: SLF001
    tracemalloc.start()
    initialize(way, degrees)
    return {"mib": tracemalloc.get_traced_memory()[1] / 2**20, "calls": calls}


def fresh(measure: Any, way: str, size: int, degrees: dict[str, int]) -> dict[str, float]:
    """Measure as rank 0 of a fake world, in a fork: a process that has made no group before."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
            os.write(writing, json.dumps(measure(way, degrees)).encode())
        finally:
            os._exit(0)  # without taking 85,872 groups down
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer: dict[str, float] = json.loads(pipe.read())
    os.waitpid(child, 0)
    return answer


def fake_groups(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Every size, by every way in turn (A B C C B A ...)."""
    rows: list[dict[str, Any]] = []
    for size, degrees in job["layouts"]:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(job["rounds"]):
            for way in WAYS[:: -1 if turn % 2 else 1]:
                times[way].append(fresh(timed, way, size, degrees)["ms"])
        rows += [
            {"ranks": size, "way": way, "ms": samples} | fresh(counted, way, size, degrees)
            for way, samples in times.items()
        ]
    return rows


def real_groups(job: dict[str, Any]) -> dict[str, list[float]]:
    """Make the groups over gloo in turn (A B C C B A ...), and take them down again.

    The slowest rank counts. The other ranks are forks, which saves them importing torch.
    """
    rank, size = 0, job["degree"]
    while rank < size - 1 and not os.fork():
        rank += 1
    store = dist.TCPStore("127.0.0.1", job["port"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(job["rounds"] + 1):
        for way in WAYS[:: -1 if turn % 2 else 1]:
            before = set(c10d._world.pg_map)  # noqa: SLF001
            dist.barrier()
            began = time.perf_counter()
            initialize(way, job["degrees"])
            slowest = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            taken[way].append(slowest.item() * 1000)
            if way == "ezpz":
                ezpz_tp.destroy_tensor_parallel()
            for group in set(c10d._world.pg_map) - before:  # noqa: SLF001
                dist.destroy_process_group(group)
    dist.destroy_process_group()
    if rank < size - 1:
        os.wait()
    if rank:
        os._exit(0)
    return {way: samples[1:] for way, samples in taken.items()}


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    answer = fake_groups(task) if task["world"] == "fake" else real_groups(task)
    print(json.dumps(answer))
