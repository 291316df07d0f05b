"""How fast all-reduce is: by the size of the message, and within each pair of nodes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ezpz_dist
from ezpz_topo import get_hostname, get_rank, get_rank_info

_FEWEST, _MOST = 5, 50  # repeats of a size
_SECONDS = 0.5  # what they may take, unless they are the fewest


@dataclass(frozen=True, slots=True)
class Bandwidth:
    size: int
    ranks: int
    seconds: float
    repeats: int
    is_right: bool

    @property
    def algorithm(self) -> float:
        """Bytes a second."""
        return self.size / self.seconds

    @property
    def bus(self) -> float:
        """Bytes a second through each rank's link: what each of n ranks has to send and receive."""
        # NCCL tests, PERFORMANCE.md: it can be compared with the hardware's.
        return self.algorithm * 2 * (self.ranks - 1) / self.ranks

    def facts(self) -> dict[str, Any]:
        return {
            "bytes": self.size, "ranks": self.ranks, "seconds": self.seconds,
            "repeats": self.repeats, "algorithm_bytes_per_s": self.algorithm,
            "bus_bytes_per_s": self.bus, "is_right": self.is_right,
        }  # fmt: skip


def default_sizes(device_type: str) -> tuple[int, ...]:
    """Return sizes from where latency counts to where bandwidth does, in bytes."""
    largest = 24 if device_type == "cpu" else 28
    return tuple(1 << power for power in range(10, largest + 1, 2))


def measure(size: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Bandwidth:
    """Time all-reduces (sums) of fp32 messages of so many bytes. Collective in the group."""
    message = torch.empty(size // 4, device=device)
    ranks = dist.get_world_size(group)

    def once() -> float:
        # From a device that is idle to one that has the result, on the host.
        message.fill_(1.0)
        ezpz_dist.synchronize()
        begun = time.perf_counter()
        dist.all_reduce(message, group=group)
        ezpz_dist.synchronize()
        return time.perf_counter() - begun

    once(), once()  # warm up
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
    found = torch.tensor(values, dtype=torch.float32, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [float(value) for value in found.cpu()]


Pair = tuple[int, int]
"""Two numbers of nodes, the smaller first."""


class Node(NamedTuple):
    host: str
    ranks: list[int]


@dataclass(frozen=True, slots=True)
class Pairs:
    hosts: tuple[str, ...]
    found: dict[Pair, Bandwidth]

    def slowest(self) -> Pair:
        return min(self.found, key=lambda pair: self.found[pair].bus)

    def median(self) -> float:
        return statistics.median(one.bus for one in self.found.values())

    def of_node(self, node: int) -> float:
        """Return the median bus bandwidth of the pairs that a node is in, B/s."""
        return statistics.median(one.bus for pair, one in self.found.items() if node in pair)

    def facts(self) -> dict[str, Any]:
        each = [
            {"hosts": [self.hosts[node] for node in pair], "nodes": list(pair), **one.facts()}
            for pair, one in sorted(self.found.items())
        ]
        return {"slowest": list(self.slowest()), "pairs": each}


def rounds(nodes: int) -> list[list[Pair]]:
    """Return all pairs of nodes, in rounds in which no node is in two pairs."""
    # The circle method of round-robin tournaments: one stays, the others turn. That makes n - 1
    # rounds of n / 2 pairs; with an odd n, n rounds in each of which another node rests.
    places: list[int | None] = [*range(nodes)]
    if nodes % 2:
        places.append(None)
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def find_nodes() -> list[Node]:
    """Return the nodes of all ranks, in the order of their first. Collective."""
    # Not every launcher says how many there are, or numbers them: the ranks ask each other.
    info, host = get_rank_info(), get_hostname()
    node = host if info.node_rank is None else info.node_rank
    found: dict[int | str, Node] = {}
    for rank, (key, name) in enumerate(ezpz_dist.all_gather_object((node, host))):
        found.setdefault(key, Node(name, [])).ranks.append(rank)
    return list(found.values())


def measure_pairs(
    nodes: Sequence[Node], size: int, device: torch.device, say: Callable[[int, int], object]
) -> Pairs | None:
    """Time all-reduces within each pair of nodes; None of one node. Collective."""
    ranks = [node.ranks for node in nodes]
    if len(ranks) < 2:
        return None
    rank = get_rank()
    mine: dict[Pair, Bandwidth] = {}
    schedule = rounds(len(ranks))
    for number, pairs in enumerate(schedule):
        # Together, so that each pair has the network to share with all others of its round.
        ezpz_dist.barrier()
        for first, second in pairs:
            both = sorted(ranks[first] + ranks[second])
            if rank in both:
                found = _within(both, size, device)
                if rank == both[0]:
                    mine[first, second] = found
        say(number + 1, len(schedule))
    every = {pair: one for part in ezpz_dist.all_gather_object(mine) for pair, one in part.items()}
    return Pairs(tuple(node.host for node in nodes), every)


def _within(ranks: Sequence[int], size: int, device: torch.device) -> Bandwidth:
    import ezpz_tp  # noqa: PLC0415 - only where its groups are used

    # The other ranks make their own at the same time, so nobody waits for all.
    group = ezpz_tp.make_group(ranks)
    try:
        return measure(size, device, group)
    finally:
        dist.destroy_process_group(group)
