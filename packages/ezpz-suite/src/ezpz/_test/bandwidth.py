"""How fast all-reduce is, by the size of the message."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import ezpz_dist

_WARM_UP = 2
_FEWEST, _MOST = 5, 50
"""Repeats of a size."""

_SECONDS = 0.5
"""What the repeats of a size may take, unless they are the fewest."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What one size of message took.

    Attributes:
        size: Bytes of the message on each rank.
        ranks: How many they were.
        seconds: Median over the repeats of the time of the slowest rank.
        repeats: How many there were.
        is_right: Whether the sums were right on every rank.
    """

    size: int
    ranks: int
    seconds: float
    repeats: int
    is_right: bool

    @property
    def algorithm(self) -> float:
        """Bytes a second: the message's size by the time."""
        return self.size / self.seconds

    @property
    def bus(self) -> float:
        """Bytes a second through each rank's link, which can be compared with the hardware's.

        ``algorithm * 2 (n - 1) / n``: what each of n ranks has to send and receive (NCCL
        tests, PERFORMANCE.md).
        """
        return self.algorithm * 2 * (self.ranks - 1) / self.ranks

    def facts(self) -> dict[str, Any]:
        """Return what is written for programs: sizes in bytes, times in seconds, rates in B/s."""
        return {
            "bytes": self.size, "ranks": self.ranks, "seconds": self.seconds,
            "repeats": self.repeats, "algorithm_bytes_per_s": self.algorithm,
            "bus_bytes_per_s": self.bus, "is_right": self.is_right,
        }  # fmt: skip


def default_sizes(device_type: str) -> tuple[int, ...]:
    """Return sizes from where latency counts to where bandwidth does, in bytes."""
    largest = 24 if device_type == "cpu" else 28
    return tuple(1 << power for power in range(10, largest + 1, 2))


def measure(
    sizes: Sequence[int], device: torch.device, say: Callable[[Bandwidth], object]
) -> list[Bandwidth]:
    """Time all-reduces of these sizes over all ranks. Collective: every rank calls this.

    Args:
        sizes: Bytes, multiples of 4.
        device: Where the messages lie.
        say: Told of each size when it is done.
    """
    found = []
    for size in sizes:
        found.append(measure_one(size, device))
        say(found[-1])
    return found


def measure_one(
    size: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> Bandwidth:
    """Time all-reduces (sums) of fp32 messages of a size. Collective: every rank of the group.

    Each is timed by itself, from a device that is idle to one that has the result, on the host.

    Args:
        size: Bytes, a multiple of 4.
        device: Where the messages lie.
        group: The ranks; None: all.
    """
    message = torch.empty(size // 4, device=device)
    ranks = dist.get_world_size(group)

    def once() -> float:
        message.fill_(1.0)
        ezpz_dist.synchronize()
        begun = time.perf_counter()
        dist.all_reduce(message, group=group)
        ezpz_dist.synchronize()
        return time.perf_counter() - begun

    for _ in range(_WARM_UP):
        once()
    # All ranks repeat as often as the slowest can.
    (trial,) = _largest([once()], device, group)
    repeats = min(_MOST, max(_FEWEST, int(_SECONDS / trial)))
    times, wrong = [], 0.0
    for _ in range(repeats):
        times.append(once())
        wrong = max(wrong, float((message != ranks).any()))
    *slowest, wrong = _largest([*times, wrong], device, group)
    return Bandwidth(size, ranks, statistics.median(slowest), repeats, is_right=not wrong)


def _largest(
    values: Sequence[float], device: torch.device, group: dist.ProcessGroup | None
) -> list[float]:
    """Return the largest over the ranks of each value."""
    found = torch.tensor(values, dtype=torch.float32, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [float(value) for value in found.cpu()]
