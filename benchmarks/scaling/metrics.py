"""What History sends at a step where it gathers statistics over ranks."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ezpz_obs import _across

from .fresh import STRACE, environment, whole
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
    history = ezpz_obs.History(folder, cross_rank=True)
    for step in range(steps):
        history.record({f"metric{n}": float(n + rank) for n in range(metrics)})
    history.close()
dist.destroy_process_group()
"""
_SENT = re.compile(r"\w+\(\d+<(?:TCP|TCPv6|socket):.*\) += (\d+)$")


def sent_by_rank_0(size: int, steps: int) -> int:
    """Return the bytes that rank 0 of real gloo ranks writes to its sockets.

    Args:
        size: Of the world.
        steps: Updates.
    """
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
        lines = whole(trace.read_text("utf-8", "replace").splitlines())
    return sum(int(match[1]) for line in lines if (match := _SENT.search(line)))


def _measure_step(size: int) -> float:
    return (sent_by_rank_0(size, _STEPS) - sent_by_rank_0(size, 0)) / _STEPS


def metrics() -> Iterator[Found]:
    """Yield the bytes that a step of History sends, on real ranks and by the model."""
    what = f"History sends, a rank and step of {METRICS} metrics"
    if STRACE is None:
        yield Absent("metrics", what, "strace is not installed")
    else:
        real = {size - 1: [_measure_step(size)] for size in (2, 4, 8)}
        yield Curve("metrics", f"{what}, to 1, 3 and 7 others", "bytes", "ranks", "measured", real,
                    1, "gloo over TCP, its own messages with it")  # fmt: skip
    # Payload alone, around a ring: what is gathered passes each rank once.
    sizes = [nodes * PER_NODE for nodes in NODES]
    model = {size: [float(_across.ROW_BYTES * (size - 1))] for size in sizes}
    yield Curve("metrics", f"{what}, by the model", "bytes", "ranks", "model", model, 1,
                f"{_across.ROW_BYTES} bytes of each other rank; `cross_rank=100` sends them at one "
                "update in a hundred")  # fmt: skip
