"""What rank 0 bears while all ranks come to it: connections, facts, the roll call, the verdict."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping

from .discovery import names
from .fresh import answer
from .growth import NODES, PER_NODE, Curve, Fact, Found, fit

CLIENTS = (16, 32, 64, 128, 256, 512)
"""So many ranks meet for real, from four processes, with two connections each to rank 0's store."""

COMMON = """
import json, os, random, sys, time, zlib
from dataclasses import asdict
from datetime import timedelta
from threading import Thread
from torch.distributed import TCPStore
from ezpz_dist import _members
from ezpz_dist._diagnosis import all_there, arrived
from ezpz_dist._members import agree, common_facts, judge, unfold_hosts
from ezpz_dist._rendezvous import Job, Place, connect, open_store
from ezpz_dist._setup import SetupArgs
from ezpz_topo import RankInfo
# What a training script has imported, whose versions are compared.
import ezpz, ezpz_dist, ezpz_obs, ezpz_topo, numpy

LONG = timedelta(seconds=300)
def info(rank, size):
    return RankInfo(rank, size, rank % 12, None, None, "none")
with open(sys.argv[1]) as file:
    NAMES = json.load(file)
def process(rank):
    return NAMES[rank // 12], 100_000 + rank, 4_026_531_836
args = SetupArgs("DDP", None, 42, 600.0, 12, 1, 1)
common = common_facts(arguments=asdict(args), device="xpu", backend="xccl")
sizes, runs = json.loads(sys.argv[2]), int(sys.argv[3])
"""

# Rank 0 is this process, and its CPU time is what counts: the clients' own work, which takes the
# same cores here, is not in it. A client does what a rank does: it probes, connects, reads whose
# store it is, says who it is, waits for the verdict and reads it, connects once more for its
# responder, and says that it is through.
MEET = (
    COMMON
    + """
pack, padding = _members.pack, random.Random(0).randbytes(int(sys.argv[4])).hex()
def padded(verdict):  # as long as the one for all ranks: hexadecimal digits shrink to half
    return pack({**verdict, "padding": padding})
_members.pack = padded

def rank_of(rank, size, port, job):
    mine, _ = connect("127.0.0.1", port, 60, LONG, job, patience=1)
    agree(mine, info(rank, size), 300, common, process(rank))
    responders, _ = connect("127.0.0.1", port, 60, LONG, None)
    responders.add("events", 0)
    mine.add("through", 1)
    return mine, responders

def meet(size):
    job = Job.of(info(0, size), 0, {})
    place = Place("127.0.0.1", ("127.0.0.1",), (0,), job, "scale")
    # On one node it listens at 127.0.0.1, whose name /etc/hosts knows: no name server is asked.
    store, _, port = open_store(place, RankInfo(0, size, 0, size, 0, "none"), LONG)
    go, children = os.pipe(), []
    for part in range(4):
        child = os.fork()
        if not child:
            code = 1
            try:
                held = []
                def run(rank):
                    held.append(rank_of(rank, size, port, job))
                threads = [Thread(target=run, args=(rank,)) for rank in range(1 + part, size, 4)]
                os.read(go[0], 1)
                [thread.start() for thread in threads]
                [thread.join() for thread in threads]
                code = len(held) != len(threads)
            finally:
                os._exit(code)
        children.append(child)
    began = time.process_time()
    os.write(go[1], b"g" * 4)
    # The others are there when the last one comes, which is rank 0: no time is spent on waiting.
    # Two keys a rank, and the job's.
    until = time.monotonic() + 120
    while store.num_keys() < 2 * (size - 1) + 1:
        assert time.monotonic() < until, f"{store.num_keys()} keys of {2 * size - 1}"
        time.sleep(0.01)
    hosts, _ = agree(store, info(0, size), 300, common, process(0))
    assert len(hosts) == size
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    assert store.add("through", 0) == size - 1
    return (time.process_time() - began) * 1e3

def forked(size):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps(meet(size)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said)

rows = {size: [] for size in sizes}
for _ in range(runs):
    for size in sizes:
        rows[size].append(forked(size))
print(json.dumps(rows))
"""
)

# All ranks' facts lie in the store, put there by few connections: what rank 0 then does with them
# is the real thing, in size too.
JUDGE = (
    COMMON
    + """
def judge(size):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)
    said = [json.dumps([*process(rank), {"world_size": size, **common}]) for rank in range(size)]
    for first in range(0, size, 5000):
        last = min(first + 5000, size)
        store.multi_set([f"facts/{rank}" for rank in range(first, last)], said[first:last])
    began = time.process_time()
    judge(store, info(0, size), 300, process(0))
    judged = time.process_time() - began
    keys = [*(f"facts/{rank}" for rank in range(size - 1)), "absent"]
    began = time.process_time()
    assert not all_there(store, keys)
    look = time.process_time() - began
    # Every second node is there, as while a job starts.
    keys = [f"{'facts' if rank // 12 % 2 else 'absent'}/{rank}" for rank in range(size)]
    began = time.process_time()
    assert len(arrived(store, keys, 0.0)) == size // 24 * 12
    half = time.process_time() - began
    verdict = store.get("verdict")
    began = time.process_time()
    hosts = unfold_hosts(json.loads(zlib.decompress(verdict))["hosts"])
    read = time.process_time() - began
    assert hosts[-1] == NAMES[(size - 1) // 12] and len(hosts) == size
    return judged * 1e3, look * 1e3, half * 1e3, read * 1e3, len(verdict), len(said[-1])

judge(12)
rows = {size: [] for size in sizes}
for _ in range(runs):
    for size in sizes:
        rows[size].append(judge(size))
print(json.dumps(rows))
"""
)


def rendezvous(runs: int, name_lookup: float) -> Iterator[Found]:
    """Yield the load at rank 0, met and judged for real, and extrapolated beyond.

    Args:
        runs: Samples of each size.
        name_lookup: Milliseconds in which the name service tells the name of an address, assumed.
    """
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        json.dump(names(NODES[-1]), file)
        file.flush()
        sizes = [nodes * PER_NODE for nodes in NODES]
        judged = answer(JUDGE, file.name, json.dumps(sizes), str(runs))
        verdict = int(judged[str(sizes[-1])][0][4])
        met = answer(MEET, file.name, json.dumps(CLIENTS), str(runs), str(verdict))
    yield from _met({int(size): some for size, some in met.items()}, verdict)
    yield from _judged({int(size): some for size, some in judged.items()})
    # torch's server asks for the name of each client on the thread that serves all (torch 2.13).
    connections = 4 * sizes[-1]
    yield Fact("rendezvous", "connections that rank 0 accepts", connections, "connections", "model",
               "a rank's and its responder's, each after one that probes")  # fmt: skip
    yield Fact("rendezvous", "time to ask for the name of each", connections * name_lookup / 1e3,
               "s", "model", f"{name_lookup:g} ms each, assumed")  # fmt: skip


def _met(cpu: Mapping[int, list[float]], verdict: int) -> Iterator[Found]:
    found = fit([(size, sample) for size, some in cpu.items() for sample in some])
    per_rank = min(cpu[CLIENTS[-1]]) / CLIENTS[-1]
    beyond = {
        nodes * PER_NODE: per_rank * nodes * PER_NODE
        for nodes in NODES
        if nodes * PER_NODE > CLIENTS[-1]
    }
    yield Curve(
        "rendezvous", "CPU time of rank 0 while ranks meet", "ms", "ranks", "measured", cpu, 1,
        f"{CLIENTS[-1]} real ranks with two connections each, and a verdict of {verdict:,} bytes, "
        "as for all; dashed: as much for each further rank", beyond,
    )  # fmt: skip
    yield Fact("rendezvous", "the same at 120,960 ranks", max(beyond.values()) / 1e3, "s",
               "extrapolated", f"linear; the fitted exponent is {found.exponent:.2f}")  # fmt: skip


def _judged(rows: Mapping[int, list[list[float]]]) -> Iterator[Found]:
    def column(number: int) -> dict[int, list[float]]:
        return {size: [row[number] for row in some] for size, some in rows.items()}

    for number, what, note in (
        (0, "rank 0 compares what all ranks said", "the facts are in its store already"),
        (1, "rank 0 asks whether all are there", "up to 20 times a second while it waits"),
        (2, "rank 0 finds who is there: every second node", "once a second"),
        (3, "a rank reads the verdict", ""),
    ):
        yield Curve("rendezvous", what, "ms", "ranks", "measured", column(number), 1, note)
    verdict = column(4)
    yield Curve("rendezvous", "the verdict, which each rank gets", "bytes", "ranks", "counted",
                verdict, 1)  # fmt: skip
    sent = {size: [size * sample for sample in some] for size, some in verdict.items()}
    yield Curve("rendezvous", "all verdicts, which rank 0 sends", "bytes", "ranks", "model", sent,
                None, "ranks times the verdict: grows with the square")  # fmt: skip
    said = max(row[5] for row in rows[max(rows)])
    yield Fact("rendezvous", "facts that rank 0 is sent, of 120,960 ranks", said * max(rows) / 1e6,
               "MB", "model", f"{said:.0f} bytes a rank")  # fmt: skip
    yield Fact("rendezvous", "connections that rank 0 holds", 2 * max(rows), "files", "model",
               "each rank's, and its responder's; for moments a third: see ulimit -Hn")  # fmt: skip
