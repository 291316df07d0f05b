"""Which ranks share a node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, repeat

from ezpz_tp._errors import DegreeError

VARIABLE = "LOCAL_WORLD_SIZE"
"""The number of ranks on this node: set by torchrun and by ezpz-launch."""

LAUNCHED = ("RANK", "GROUP_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE")
"""A rank and its node, and how many there are of both; torchrun's names."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The node of every rank.

    Args:
        of: By rank, the number of its node.
        sizes: By node, the number of its ranks.
        names: By node, its host's name; empty where names are not known.
        source: Where this comes from, if not from the caller.
        in_blocks: Whether the ranks of every node are numbered one after another.
    """

    of: tuple[int, ...]
    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()
    source: str = ""
    in_blocks: bool = True

    @property
    def per_node(self) -> int | None:
        """The number of ranks on a node, where nodes are alike and ranks in blocks."""
        return self.sizes[0] if len(set(self.sizes)) == 1 and self.in_blocks else None

    @property
    def common_size(self) -> int:
        """The largest number of ranks that divides every node."""
        return math.gcd(*self.sizes)

    def __str__(self) -> str:
        """Say it in words: ``2 nodes of 8``."""
        count = len(self.sizes)
        if len(set(self.sizes)) == 1:
            words = f"{count:,} node{'s' * (count > 1)} of {self.sizes[0]:,}"
        elif count <= 4:
            sizes = [str(size) for size in self.sizes]
            words = f"{count} nodes of {', '.join(sizes[:-1])} and {sizes[-1]}"
        else:
            words = f"{count:,} nodes of {min(self.sizes)} to {max(self.sizes)}"
        placed = "" if self.in_blocks else ", not numbered node by node"
        return words + (f" ({self.source})" if self.source else "") + placed


def find_nodes(
    world_size: int,
    ranks_per_node: int | Sequence[int] | None,
    hosts: Sequence[str] | None,
    environ: Mapping[str, str],
) -> tuple[Nodes | None, str]:
    """Return the nodes of all ranks; or None, and why they are not known.

    `describe` says what the arguments mean.

    Raises:
        DegreeError: The numbers do not add up to the world size.
    """
    if isinstance(hosts, str):
        raise DegreeError(f"hosts={hosts!r}; expected several names, as in [{hosts!r}]")
    if ranks_per_node is None and hosts is not None and len(hosts) == world_size:
        return _of_hosts(hosts), ""
    source = why = ""
    if ranks_per_node is None:
        ranks_per_node, why = _from_environ(world_size, environ)
        source = VARIABLE
    if ranks_per_node is None:
        if hosts is not None:
            raise DegreeError(
                f"{len(hosts)} hosts for {world_size} ranks; give the host of every rank, or "
                "ranks_per_node= too"
            )
        return None, why
    sizes = _sizes(world_size, ranks_per_node)
    if hosts is not None and (len(hosts) != len(sizes) or len(set(hosts)) < len(hosts)):
        raise DegreeError(
            f"{len(hosts)} hosts ({len(set(hosts))} different ones) for {len(sizes)} nodes of "
            f"ranks_per_node={ranks_per_node}; expected one for each node, or, without "
            "ranks_per_node, one for each rank"
        )
    of = tuple(chain.from_iterable(map(repeat, range(len(sizes)), sizes)))
    return Nodes(of, sizes, tuple(hosts or ()), source), ""


def _of_hosts(hosts: Sequence[str]) -> Nodes:
    """Return the nodes of ranks whose hosts' names are known, in the order of their first rank."""
    counts = Counter(hosts)
    numbers = {host: number for number, host in enumerate(counts)}
    of = tuple(numbers[host] for host in hosts)
    in_blocks = all(one <= other for one, other in pairwise(of))
    return Nodes(of, tuple(counts.values()), tuple(counts), in_blocks=in_blocks)


def _sizes(world_size: int, ranks_per_node: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(ranks_per_node, int):
        if ranks_per_node < 1:
            raise DegreeError(f"ranks_per_node={ranks_per_node}; expected at least 1")
        full, rest = divmod(world_size, ranks_per_node)
        if rest:
            remedy = [*[ranks_per_node] * full, rest] if full < 4 else "[...]"
            raise DegreeError(
                f"ranks_per_node={ranks_per_node} does not divide {world_size} ranks; if nodes "
                f"differ give the number of each, as in ranks_per_node={remedy}"
            )
        return (ranks_per_node,) * full
    if isinstance(ranks_per_node, (str, bytes)) or not isinstance(ranks_per_node, Sequence):
        raise TypeError(
            f"ranks_per_node={ranks_per_node!r}; expected a number, or one for each node"
        )
    sizes = tuple(ranks_per_node)
    if sum(sizes) != world_size or min(sizes, default=0) < 1:
        raise DegreeError(
            f"ranks_per_node={list(sizes)} is {sum(sizes)} ranks; expected numbers of at least 1 "
            f"that add up to the {world_size} ranks of the world"
        )
    return sizes


def _from_environ(world_size: int, environ: Mapping[str, str]) -> tuple[int | None, str]:
    found = environ.get(VARIABLE)
    if found is None:
        return None, f"{VARIABLE} is not set"
    if not found.isdecimal() or int(found) < 1:
        return None, f"{VARIABLE}={found!r} is no number of ranks"
    if world_size % int(found):
        return None, f"{VARIABLE}={found} does not divide {world_size:,} ranks"
    why = _other_nodes(int(found), environ)
    return None if why else int(found), why


def _other_nodes(size: int, environ: Mapping[str, str]) -> str:
    """Return what tells that the job's nodes do not have ``size`` ranks each, in turn."""
    facts = {name: environ.get(name, "") for name in LAUNCHED}
    told = {name: int(value) for name, value in facts.items() if value.isdecimal()}
    rank, node, world, nodes = map(told.get, LAUNCHED)
    if rank is not None and node is not None and rank // size != node:
        return (
            f"RANK={rank} is on GROUP_RANK={node}, not on node {rank // size} of nodes of "
            f"{VARIABLE}={size}"
        )
    if world is not None and nodes is not None and world != nodes * size:
        return (
            f"nodes differ: {VARIABLE}={size} here, and WORLD_SIZE={world} on "
            f"GROUP_WORLD_SIZE={nodes} nodes"
        )
    return ""
