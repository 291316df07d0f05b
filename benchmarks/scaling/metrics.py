"""What History sends at a step where it gathers statistics over ranks."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .fresh import STRACE, environment
from .growth import NODES, PER_NODE, Absent, Curve, Found

METRICS = 10
_STEPS = 200

RANK = """
import sys, tempfile
import torch.distributed as dist
import ezpz_obs
path, rank, size, steps, metrics = sys.argv[1], *map(int, sys.argv[2:])
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
with tempfile.TemporaryDirectory() as folder:
    history = ezpz_obs.History(folder, cross_rank=True, summary=False)
    for step in range(steps):
        history.update({f"metric{n}": float(n + rank) for n in range(metrics)})
    history.close()
dist.destroy_process_group()
"""
_SENT = re.compile(r"\w+\(\d+<(?:TCP|TCPv6|socket):.*\) += (\d+)$")


def sent_by_rank_0(size: int, steps: int) -> int:
    """Return the bytes that rank 0 of real gloo ranks writes to its sockets."""
    assert STRACE is not None
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        strace = [STRACE, "-f", "-yy", "-qq", "-s", "0", "-e",
                  "trace=write,writev,sendto,sendmsg", "-o", str(trace)]  # fmt: skip
        words = [str(size), str(steps), str(METRICS)]
        env = environment(GLOO_SOCKET_IFNAME="lo")
        ranks = [
            subprocess.Popen(
                [*(strace if rank == 0 else []), sys.executable, "-W", "ignore", "-c", RANK,
                 str(Path(folder, "store")), str(rank), *words],
                env=env, stdin=subprocess.DEVNULL,
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            ended = [rank.wait(timeout=300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(ended):
            raise SystemExit(f"scale: {size} ranks with a History ended with {ended}")
        lines = trace.read_text("utf-8", "replace").splitlines()
    return sum(int(match[1]) for line in lines if (match := _SENT.search(line)))


def metrics() -> Iterator[Found]:
    """Yield the bytes that a step of History sends, on real ranks and by the model."""
    what = f"History sends, a rank and step of {METRICS} metrics"
    value = 8 * (4 + 28)  # _HEAD and _ROOM of ezpz_obs._history.across: doubles of one exchange
    sizes = [nodes * PER_NODE for nodes in NODES]
    modelled = {size: [float(value * (size - 1))] for size in sizes}  # payload alone
    if STRACE is None:
        yield Absent("metrics", what, "strace is not installed")
    else:
        real = {
            size - 1: [(sent_by_rank_0(size, _STEPS) - sent_by_rank_0(size, 0)) / _STEPS]
            for size in (2, 4, 8)
        }
        yield Curve("metrics", f"{what}, to 1, 3 and 7 others", "bytes", "ranks", "measured", real,
                    1, "gloo over TCP, its own messages with it")  # fmt: skip
    yield Curve("metrics", f"{what}, all-gather", "bytes", "ranks", "model", modelled, 1,
                f"a ring passes on {value} bytes of each other rank; two reductions would send "
                "as much at every size, and have no names and no ranks at the ends")  # fmt: skip
    room = {size: [float(value * size)] for size in sizes}
    yield Curve("metrics", "memory for what the others sent", "bytes", "ranks", "model", room, 1)
