"""What rank 0 bears while all ranks come to it: connections, facts, the roll call, the verdict."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from .fresh import answer
from .growth import NODES, PER_NODE, Curve, Fact, Found, fit

CLIENTS = (8, 16, 32, 64, 128, 256)
"""So many ranks meet for real: connections of their own, from four processes, to rank 0's store."""

# Rank 0 is this process, and its CPU time is what counts: the clients' own work, which takes the
# same cores here, is not in it.
MEET = """
import json, os, sys, time
from datetime import timedelta
from threading import Barrier, Thread
from torch.distributed import TCPStore
from ezpz_dist._meeting.agreement import agree
from ezpz_dist._meeting.facts import common_facts
from ezpz_topo import RankInfo

LONG = timedelta(seconds=300)
def info(rank, size):
    return RankInfo(rank, size, rank % 12, None, None, "none")
def process(rank):
    return f"x{4000 + rank // 864}c{rank // 144 % 6}s{rank // 24 % 6}b0n{rank // 12 % 2}", 1, 1
common = common_facts(arguments={}, device="cpu", backend="gloo")

def meet(size):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)
    ready, go = os.pipe(), os.pipe()
    children = []
    for part in range(4):
        ranks = range(1 + part, size, 4)
        child = os.fork()
        if not child:
            code = 1
            try:
                gate = Barrier(len(ranks) + 1)
                def run(rank):
                    mine = TCPStore("127.0.0.1", store.port, timeout=LONG)
                    gate.wait()
                    gate.wait()
                    agree(mine, info(rank, size), 300, common, process(rank))
                threads = [Thread(target=run, args=(rank,)) for rank in ranks]
                [thread.start() for thread in threads]
                gate.wait()
                os.write(ready[1], b"r")
                os.read(go[0], 1)
                gate.wait()
                [thread.join() for thread in threads]
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    for _ in children:
        os.read(ready[0], 1)
    # The others are there when the last one comes, which is rank 0: no time is spent on waiting.
    os.write(go[1], b"g" * 4)
    until = time.monotonic() + 60
    while store.num_keys() < 2 * (size - 1):
        assert time.monotonic() < until, f"{store.num_keys()} keys of {2 * (size - 1)}"
        time.sleep(0.01)
    before, began = time.process_time(), time.perf_counter()
    roster = agree(store, info(0, size), 300, common, process(0))
    assert len(roster.hosts) == size
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    return (time.process_time() - before) * 1e3, (time.perf_counter() - began) * 1e3

def forked(size):
    reading, writing = os.pipe()
    if not os.fork():
        try:
            os.write(writing, json.dumps(meet(size)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = json.loads(pipe.read())
    os.wait()
    return answer

sizes, runs = json.loads(sys.argv[1]), int(sys.argv[2])
rows = {size: [] for size in sizes}
for _ in range(runs):
    for size in sizes:
        rows[size].append(forked(size))
print(json.dumps(rows))
"""

# All ranks' facts lie in the store, put there by few connections: what rank 0 then does with them
# is the real thing, in size too.
JUDGE = (
    MEET[: MEET.index("def meet")]
    + """
from ezpz_dist._meeting.agreement import _judge
from ezpz_dist._store import _all_there

def judge(size):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)
    said = [json.dumps([*process(rank), {"world_size": size, **common}]) for rank in range(size)]
    for first in range(0, size, 5000):
        last = min(first + 5000, size)
        store.multi_set([f"facts/{rank}" for rank in range(first, last)], said[first:last])
    before = time.process_time()
    _judge(store, info(0, size), 300, process(0))
    judged = time.process_time() - before
    # The last to come is the one that is missing: the longest look.
    keys = [*(f"facts/{rank}" for rank in range(size - 1)), "absent"]
    before = time.process_time()
    assert not _all_there(store, keys)
    look = time.process_time() - before
    return judged * 1e3, look * 1e3, len(store.get("verdict")), len(said[-1])

sizes, runs = json.loads(sys.argv[1]), int(sys.argv[2])
judge(12)
rows = {size: [] for size in sizes}
for _ in range(runs):
    for size in sizes:
        rows[size].append(judge(size))
print(json.dumps(rows))
"""
)


def rendezvous(runs: int) -> Iterator[Found]:
    """Yield the load at rank 0, met and judged for real, and extrapolated beyond."""
    words = (json.dumps(CLIENTS), str(runs))
    met = {int(size): rows for size, rows in answer(MEET, *words).items()}
    cpu = {size: [row[0] for row in rows] for size, rows in met.items()}
    found = fit([(size, sample) for size, some in cpu.items() for sample in some])
    per_rank = min(cpu[CLIENTS[-1]]) / CLIENTS[-1]
    beyond = {
        nodes * PER_NODE: per_rank * nodes * PER_NODE
        for nodes in NODES
        if nodes * PER_NODE > CLIENTS[-1]
    }
    yield Curve(
        "rendezvous", "CPU time of rank 0 while ranks meet", "ms", "ranks", "measured", cpu, 1,
        f"real connections to {CLIENTS[-1]}; dashed: as much for each further rank", beyond,
    )  # fmt: skip
    yield Fact("rendezvous", "the same at 120,960 ranks", max(beyond.values()) / 1e3, "s",
               "extrapolated", f"linear; the fitted exponent is {found.exponent:.2f}")  # fmt: skip
    sizes = [nodes * PER_NODE for nodes in NODES]
    rows = answer(JUDGE, json.dumps(sizes), str(runs))
    yield from _judged({int(size): some for size, some in rows.items()})


def _judged(rows: Mapping[int, list[list[float]]]) -> Iterator[Found]:
    def column(number: int) -> dict[int, list[float]]:
        return {size: [row[number] for row in some] for size, some in rows.items()}

    yield Curve("rendezvous", "rank 0 compares what all ranks said", "ms", "ranks", "measured",
                column(0), 1, "the facts are in its store already")  # fmt: skip
    yield Curve("rendezvous", "one look of rank 0 at who is missing", "ms", "ranks", "measured",
                column(1), 1, "up to 20 times a second while it waits, then once")  # fmt: skip
    verdict = column(2)
    yield Curve("rendezvous", "the verdict, which each rank gets", "bytes", "ranks", "counted",
                verdict, 1)  # fmt: skip
    sent = {size: [size * sample for sample in some] for size, some in verdict.items()}
    yield Curve("rendezvous", "all verdicts, which rank 0 sends", "bytes", "ranks", "model", sent,
                None, "ranks times the verdict: grows with the square")  # fmt: skip
    said = max(row[3] for row in rows[max(rows)])
    yield Fact("rendezvous", "facts that rank 0 is sent, of 120,960 ranks", said * max(rows) / 1e6,
               "MB", "model", f"{said:.0f} bytes a rank")  # fmt: skip
    yield Fact("rendezvous", "connections that rank 0 holds", 2 * max(rows), "files", "model",
               "each rank's, and its watcher's: see ulimit -Hn")  # fmt: skip
