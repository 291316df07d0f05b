"""What rank 0 bears while all ranks come to it: ours, a call a node; torch's store, one a rank."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Generator, Iterator, Mapping

from .discovery import names
from .fresh import PRINT_ALL, answer
from .growth import NODES, PER_NODE, Curve, Fact, Found, fit

CLIENTS = (32, 64, 128, 256, 512)
"""So many ranks connect to torch's store for real, from four processes."""

ROOTS = 64
"""NCCL's numbers that each rank reads (ezpz-launch sets TORCH_NCCL_RANKS_PER_ROOT; else 945)."""

COMMON = (
    PRINT_ALL
    + """
import sys, time, zlib
from dataclasses import asdict
from datetime import timedelta
from torch.distributed import PrefixStore, TCPStore
from ezpz_dist import _members
from ezpz_dist._addresses import message, read_message
from ezpz_dist._members import agree, common_facts, unfold_hosts
from ezpz_dist._rendezvous import Job, Place, connect, open_server
from ezpz_dist._setup import SetupArgs
from ezpz_topo import RankInfo
# What a training script has imported, whose versions are compared.
import ezpz, ezpz_dist, ezpz_obs, ezpz_topo, numpy

LONG = timedelta(seconds=300)
with open(sys.argv[1]) as file:
    NAMES = json.load(file)
sizes, runs = json.loads(sys.argv[2]), int(sys.argv[3])
asked = []
sys.addaudithook(lambda event, _: event.startswith(
    ("socket.getaddrinfo", "socket.gethostby", "socket.getnameinfo")) and asked.append(event))

def opened(size):
    job = Job.of(RankInfo(0, size, 0, size, 0, "none"), 0, {})
    place = Place("127.0.0.1", ("127.0.0.1",), (0,), job, "scale")
    # On one node it listens at 127.0.0.1, whose name /etc/hosts knows: no name server is asked.
    return open_server(place, RankInfo(0, size, 0, size, 0, "none"), LONG), job

def in_four(work):
    "Have four processes do their parts; return how to start them, and to wait for all."
    go, children = os.pipe(), []
    for part in range(4):
        child = os.fork()
        if not child:
            code = 1
            try:
                os.read(go[0], 1)
                work(part)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    def ended():
        for child in children:
            assert os.waitpid(child, 0)[1] == 0
        [os.close(end) for end in go]
    return lambda: os.write(go[1], b"g" * 4), ended
"""
)

# Rank 0 is this process, and its CPU time is what counts: the others' own work, which takes the
# same cores here, is not in it. One call of each node does what its leader's does: it is greeted,
# says who is on its node, and waits for the verdict, which it keeps until all have it.
MEET = (
    COMMON
    + """
args = SetupArgs("DDP", None, 42, 600.0, 12, 1, 1)
common = common_facts(arguments=asdict(args), device="xpu", backend="xccl")
judge, spent = _members.judge, []
def timed(*given):
    began = time.thread_time()
    told = judge(*given)
    spent.append(time.thread_time() - began)
    return told
_members.judge = timed

def meet(nodes):
    size = 12 * nodes
    met, job = opened(size)
    facts = json.dumps({"world_size": size, **common})
    def lead(part):
        def said(node):
            ranks = range(max(1, 12 * node), 12 * node + 12)
            who = [[rank, NAMES[node], 100_000 + rank, 4_026_531_836] for rank in ranks]
            return {"setup": "scale", "said": {facts: who}}
        calls = []
        for node in range(part, nodes, 4):
            call, _ = connect("127.0.0.1", met.master_port, 60, job)
            call.sendall(message(said(node)))
            calls.append(call)
        for call in calls:
            read_message(call, time.monotonic() + 300)
    start, ended = in_four(lead)
    files = [len(os.listdir("/proc/self/fd"))]
    # The others are there when the last one comes, which is rank 0: no time is spent on waiting.
    heard = met.server.rounds["scale"]
    asked.clear()
    began = time.process_time()
    start()
    met.server.serve(lambda: len(heard.said) == size - 1, 240)
    assert len(heard.said) == size - 1, f"{len(heard.said)} of {size} ranks"
    files.append(len(os.listdir("/proc/self/fd")))
    rank_0 = RankInfo(0, size, 0, 12, 0, "none")
    line = met.participant(rank_0, "scale", 60)
    agreed = agree(line, rank_0, 300, common, (NAMES[0], 1, 4_026_531_836))
    took, names = time.process_time() - began, len(asked)
    ended()
    assert len(agreed.hosts) == size and agreed.hosts[-1] == NAMES[nodes - 1]
    verdict, wire = heard.verdict, len(message({"setup": "scale", "said": {facts: [
        [rank, NAMES[-1], 100_000 + rank, 4_026_531_836] for rank in range(12)]}}))
    began = time.process_time()
    unfold_hosts(json.loads(zlib.decompress(verdict))["hosts"])
    read = time.process_time() - began
    more = files[1] - files[0]
    return took * 1e3, spent[-1] * 1e3, more, names, read * 1e3, len(verdict), wire

print_all(meet, sizes, runs)
"""
)

# What torch's own store has to do then, for the backend: every rank connects, reads one key, as of
# XCCL's unique number or NCCL's for few ranks, and says that it is through, which is ours. NCCL,
# for many, reads a number of every 128th rank instead.
STORE = (
    COMMON
    + """
def join(size):
    met, _ = opened(size + 1)
    port, store = met.server.store_port, met.store
    store = PrefixStore("group", PrefixStore("ezpz-0", store))
    roots = [str(root) for root in range(int(sys.argv[4]))]
    store.multi_set(roots, ["x" * 128] * len(roots))
    told = b""
    def client(part):
        mine = []
        for rank in range(part, size, 4):
            one = TCPStore("127.0.0.1", port, None, is_master=False, timeout=LONG,
                           wait_for_workers=False)
            one = PrefixStore("group", PrefixStore("ezpz-0", one))
            assert len(one.get("0")) == 128
            one.add("through", 1)
            mine.append(one)
        # Only then the others' keys, to count their cost alone.
        os.write(done[1], b".")
        os.read(more[0], 1)
        for one in mine:
            assert len(one.multi_get(roots)) == len(roots)
    done, more = os.pipe(), os.pipe()
    start, ended = in_four(client)
    began = time.process_time()
    start()
    while len(told) < 4:
        told += os.read(done[0], 4)
    once = time.process_time()
    os.write(more[1], b"...." )
    ended()
    return (once - began) * 1e3, (time.process_time() - once) * 1e3

print_all(join, sizes, runs)
"""
)


def rendezvous(runs: int, name_lookup: float) -> Iterator[Found]:
    """Yield the load at rank 0: ours in the real size, torch's store extrapolated.

    Args:
        runs: Samples of each size.
        name_lookup: Milliseconds in which the name service tells the name of an address, assumed.
    """
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        json.dump(names(NODES[-1]), file)
        file.flush()
        met = answer(MEET, file.name, json.dumps(NODES[1:]), str(runs))
        joined = answer(STORE, file.name, json.dumps(CLIENTS), str(runs), str(ROOTS))
    ours = yield from _met({int(nodes): some for nodes, some in met.items()})
    torchs = yield from _joined({int(size): some for size, some in joined.items()}, name_lookup)
    yield Fact("rendezvous", "rank 0's time in all", ours + torchs, "s", "extrapolated",
               "ours, measured, and torch's store; the goal is 40")  # fmt: skip


def _met(rows: Mapping[int, list[list[float]]]) -> Generator[Found, None, float]:
    def column(number: int) -> dict[int, list[float]]:
        return {size: [row[number] for row in some] for size, some in rows.items()}

    most = max(rows)
    cpu = Curve(
        "rendezvous", "CPU time of rank 0 while ranks meet", "ms", "nodes", "measured", column(0),
        1, f"one real call of each node, {PER_NODE} ranks each, greeted and told", most=10e3,
    )  # fmt: skip
    yield cpu
    for number, what, unit, limit, note in (
        (1, "of it: rank 0 compares what all said", "ms", None, ""),
        (2, "descriptors of rank 0 for it", "files", 2 * most + 1000, "a call of each node"),
        (4, "a rank reads the verdict", "ms", None, ""),
        (5, "the verdict, which each node gets", "bytes", None, ""),
    ):
        kind = "measured" if unit == "ms" else "counted"
        yield Curve("rendezvous", what, unit, "nodes", kind, column(number), 1, note, most=limit)
    yield Fact("rendezvous", "names that rank 0 asks for", max(map(max, column(3).values())),
               "names", "counted", "by Python's audit events")  # fmt: skip
    verdict = max(column(5)[most])
    yield Fact("rendezvous", "all verdicts, which rank 0 sends", verdict * most / 1e6, "MB",
               "counted", "each node's, which passes it on to its ranks")  # fmt: skip
    yield Fact("rendezvous", "what rank 0 is told by all", max(column(6)[most]) * most / 1e6, "MB",
               "counted", "a message of each node")  # fmt: skip
    return cpu.at(most) / 1e3


def _joined(
    rows: Mapping[int, list[list[float]]], name_lookup: float
) -> Generator[Found, None, float]:
    cpu, roots = ({size: [row[at] for row in some] for size, some in rows.items()} for at in (0, 1))
    found = fit([(size, sample) for size, some in cpu.items() for sample in some])
    ranks = PER_NODE * NODES[-1]
    seconds = min(cpu[CLIENTS[-1]]) / CLIENTS[-1] * ranks / 1e3
    yield Curve(
        "rendezvous", "CPU time of torch's store for the backend", "ms", "ranks", "measured", cpu,
        1, "a connection of each rank, one key read as for XCCL's unique number, one "
        "count; dashed: as much for each further rank", {ranks: seconds * 1e3},
    )  # fmt: skip
    yield Fact("rendezvous", f"the same at {ranks:,} ranks", seconds, "s", "extrapolated",
               f"linear; the fitted exponent is {found.exponent:.2f}")  # fmt: skip
    scaled = min(roots[CLIENTS[-1]]) / CLIENTS[-1] * ranks / 1e3
    yield Fact(
        "rendezvous",
        f"more, where each rank reads {ROOTS} keys, as for NCCL",
        scaled,
        "s",
        "extrapolated",
        "from 2.23 on; 945 keys without ezpz-launch's TORCH_NCCL_RANKS_PER_ROOT",
    )
    yield Fact("rendezvous", "connections that torch's store holds", ranks, "files", "model",
               "one of each rank: see ulimit -Hn")  # fmt: skip
    # torch's server asks for the name of each client on the thread that serves all (torch 2.13).
    yield Fact("rendezvous", "time to ask for the name of each", ranks * name_lookup / 1e3, "s",
               "model", f"{name_lookup:g} ms each, assumed; torch's store only")  # fmt: skip
    return seconds
