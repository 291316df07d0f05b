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
from ezpz_obs import _across as across
path, rank, size, steps, metrics, across.GATHERED = sys.argv[1], *map(int, sys.argv[2:])
across.is_ring = lambda *_: False  # which would have gloo gather
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
with tempfile.TemporaryDirectory() as folder:
    history = ezpz_obs.History(folder, cross_rank=True, summary=False)
    for step in range(steps):
        history.update({f"metric{n}": float(n + rank) for n in range(metrics)})
    history.close()
dist.destroy_process_group()
"""
_SENT = re.compile(r"\w+\(\d+<(?:TCP|TCPv6|socket):.*\) += (\d+)$")


def sent_by_rank_0(size: int, steps: int, gathered: int) -> int:
    """Return the bytes that rank 0 of real gloo ranks writes to its sockets.

    Args:
        size: Of the world.
        steps: Updates.
        gathered: The size up to which metrics are gathered; beyond, they are reduced.
    """
    assert STRACE is not None
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        strace = [STRACE, "-f", "-yy", "-qq", "-s", "0", "-e",
                  "trace=write,writev,sendto,sendmsg", "-o", str(trace)]  # fmt: skip
        words = [str(size), str(steps), str(METRICS), str(gathered)]
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


def _a_step(size: int, gathered: int) -> float:
    one, none = (sent_by_rank_0(size, steps, gathered) for steps in (_STEPS, 0))
    return (one - none) / _STEPS


def metrics() -> Iterator[Found]:
    """Yield the bytes that a step of History sends, on real ranks and by the model."""
    what = f"History sends, a rank and step of {METRICS} metrics"
    few = _across.GATHERED
    if STRACE is None:
        yield Absent("metrics", what, "strace is not installed")
    else:
        for how, gathered in (("gathered", few), ("reduced", 1)):
            real = {size - 1: [_a_step(size, gathered)] for size in (2, 4, 8)}
            yield Curve("metrics", f"{what}, {how}, to 1, 3 and 7 others", "bytes", "ranks",
                        "measured", real, 1, "gloo over TCP, its own messages with it: a rank's "
                        "all-reduce is 2 (ranks - 1) of them")  # fmt: skip
    # Payload alone, around a ring: what is gathered passes each rank once, what is reduced twice.
    value = 8 * (_across.HEAD + _across.ROOM)
    words = 8 * (_across.ENDS_HEAD + (4 + 2) * _across.ROOM)
    sizes = [nodes * PER_NODE for nodes in NODES]

    def sent(size: int) -> float:
        return value * (size - 1) if size <= few else 2 * words * (size - 1) / size

    yield Curve("metrics", f"{what}, by the model", "bytes", "ranks", "model",
                {size: [sent(size)] for size in sizes}, 1,
                f"gathered up to {few:,} ranks: {value} bytes of each other one; beyond, reduced: "
                f"{words:,} bytes, twice; gloo gathers at every size")  # fmt: skip
    odd = {size: [float(value * (size - 1))] for size in sizes}
    yield Curve("metrics", "the same by gloo, or where ranks differ, or a number is NaN", "bytes",
                "ranks", "model", odd, 1, "gathered at every size")  # fmt: skip
