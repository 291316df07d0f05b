"""Process groups: what one rank makes, of whatever world it is in."""

from __future__ import annotations

import json
from collections.abc import Iterator

from .fresh import PRINT_ALL, answer
from .growth import NODES, PER_NODE, Curve, Fact, Found

# As a rank in the middle of a fake world: torch's own machinery, and no connections. Each world is
# a fork, which has made no group before, and whose time is its own; tracing memory takes more.
MAKE = (
    PRINT_ALL
    + """
import sys, time, tracemalloc
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
import ezpz_tp

sizes, degrees, runs = map(json.loads, sys.argv[1:])

def measure(size):
    dist.init_process_group("fake", store=FakeStore(), rank=size // 2, world_size=size)
    ezpz_tp.initialize_tensor_parallel(**degrees)  # what is imported at first use
    ezpz_tp.destroy_tensor_parallel()
    calls, make = [], c10d._new_process_group_helper
    def counting(group_size, group_rank, ranks, *more, **options):
        calls.append(len(ranks))
        return make(group_size, group_rank, ranks, *more, **options)
    c10d._new_process_group_helper = counting
    began = time.process_time()
    ezpz_tp.initialize_tensor_parallel(**degrees)
    took = time.process_time() - began
    looked = time.process_time()
    for _ in range(10_000):
        ezpz_tp.get_data_parallel_rank(), ezpz_tp.get_tensor_parallel_group()
    look = (time.process_time() - looked) / 20_000
    ezpz_tp.destroy_tensor_parallel()
    made, longest = len(calls), max(calls, default=0)
    tracemalloc.start()
    ezpz_tp.initialize_tensor_parallel(**degrees)
    peak = tracemalloc.get_traced_memory()[1]
    return took * 1e3, made, longest, peak / 2**20, look * 1e6

print_all(measure, sizes, runs)
"""
)

LAYOUTS = {
    # The tensor groups of a node, and data parallel over everything else.
    "TP 12 x DP": {"tensor_parallel_size": 12},
    # Of bounded degree but for data parallelism, which takes what the job grows by.
    "TP 12 x CP 2 x PP 8 x DP": {
        "tensor_parallel_size": 12, "context_parallel_size": 2, "pipeline_parallel_size": 8,
    },
}  # fmt: skip

# Real gloo ranks as forks, and the keys that their store holds before and after.
KEYS = """
import json, os, sys, time
import torch.distributed as dist
import ezpz_tp
size, degree = int(sys.argv[1]), int(sys.argv[2])
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
rank = 0
while rank < size - 1 and not os.fork():
    rank += 1
store = dist.TCPStore("127.0.0.1", server.port)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
dist.barrier()
before = server.num_keys() if rank == 0 else 0
dist.barrier()
ezpz_tp.initialize_tensor_parallel(tensor_parallel_size=degree)
dist.barrier()
if rank == 0:
    print(json.dumps([before, server.num_keys()]), flush=True)
dist.barrier()
if rank < size - 1:
    os.wait()
os._exit(0)
"""


def groups(runs: int) -> Iterator[Found]:
    """Yield what making its groups costs one rank, and what it leaves in the store."""
    for name, degrees in LAYOUTS.items():
        least = PER_NODE
        for degree in list(degrees.values())[1:]:
            least *= degree
        sizes = [nodes * PER_NODE for nodes in NODES if not nodes * PER_NODE % least]
        sizes = [size for size in sizes if size > least] or sizes
        words = (json.dumps(each) for each in (sizes, degrees, runs))
        rows = {int(size): some for size, some in answer(MAKE, *words).items()}
        columns = (
            (
                "making a rank's groups",
                "ms",
                "measured",
                1,
                "torch is given the ranks of each group",
            ),
            ("groups that it makes", "calls", "counted", 0, ""),
            ("ranks in its largest group", "ranks", "counted", 1, "its data-parallel group"),
            ("memory for them", "MiB", "measured", 1, ""),
            ("asking for a rank or a group", "us", "measured", 0, "mean of two look-ups"),
        )
        for number, (what, unit, kind, goal, note) in enumerate(columns):
            points = {size: [row[number] for row in some] for size, some in rows.items()}
            yield Curve("groups", f"{what}, {name}", unit, "ranks", kind, points, goal, note)  # type: ignore[arg-type]
    keys = {}
    for size in (4, 8, 12, 16):
        before, after = answer(KEYS, str(size), "2")
        keys[size] = [float(after - before) / size]
    yield Curve(
        "groups", "keys in the store, a rank (gloo, TP 2)", "keys", "ranks", "counted", keys, 0,
        "real ranks, whose store is rank 0's",
    )  # fmt: skip
    yield Fact(
        "groups", "keys in rank 0's store for the groups of 120,960 ranks",
        max(map(max, keys.values())) * NODES[-1] * PER_NODE, "keys", "extrapolated",
        "linear in ranks",
    )  # fmt: skip
