"""`describe_mesh`: the groups of a mesh, and which of them cross the borders of nodes."""

from __future__ import annotations

import math
import os
import textwrap
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from ezpz_tp import (
    AXES,
    EXPERT_AXES,
    DegreeError,
    ParallelError,
    ParallelState,
    RankLayout,
    get_state,
)

from ._table import align_columns

# Which ranks share a node.

VARIABLE = "LOCAL_WORLD_SIZE"
"""The number of ranks on this node: set by torchrun and by ezpz-launch."""

LAUNCHED = ("RANK", "GROUP_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE")
"""A rank and its node, and how many there are of both; torchrun's names."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Which node each rank is on."""

    of: tuple[int, ...]
    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()
    source: str = ""
    in_blocks: bool = True

    @property
    def per_node(self) -> int | None:
        """The number of ranks on a node, where nodes are alike and ranks in blocks."""
        if len(set(self.sizes)) == 1 and self.in_blocks:
            return self.sizes[0]
        return None

    def __str__(self) -> str:
        count = len(self.sizes)
        if len(set(self.sizes)) == 1:
            words = f"{count:,} node{'s' * (count > 1)} of {self.sizes[0]:,}"
        elif count <= 4:
            sizes = list(map(str, self.sizes))
            words = f"{count} nodes of {', '.join(sizes[:-1])} and {sizes[-1]}"
        else:
            words = f"{count:,} nodes of {min(self.sizes)} to {max(self.sizes)}"
        placed = ", not numbered node by node"
        if self.in_blocks:
            placed = ""
        return words + (f" ({self.source})" if self.source else "") + placed


PerNode: TypeAlias = int | Sequence[int] | None
Hosts: TypeAlias = Sequence[str] | None


def find_nodes(
    world_size: int, ranks_per_node: PerNode, hosts: Hosts, environ: Mapping[str, str]
) -> tuple[Nodes | None, str]:
    # `describe_mesh` says what the arguments mean.
    if isinstance(hosts, str):
        raise DegreeError(f"hosts={hosts!r}; expected several names, as in [{hosts!r}]")
    if ranks_per_node is None and hosts is not None and len(hosts) == world_size:
        counts = Counter(hosts)  # in the order of their first rank
        numbers = {host: number for number, host in enumerate(counts)}
        of = tuple(map(numbers.__getitem__, hosts))
        return Nodes(of, tuple(counts.values()), tuple(counts), in_blocks=[*of] == sorted(of)), ""
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
    sizes = _node_sizes(world_size, ranks_per_node)
    if hosts is not None and (len(hosts) != len(sizes) or len(set(hosts)) < len(hosts)):
        raise DegreeError(
            f"{len(hosts)} hosts ({len(set(hosts))} different ones) for {len(sizes)} nodes of "
            f"ranks_per_node={ranks_per_node}; expected one for each node, or, without "
            "ranks_per_node, one for each rank"
        )
    node_of: list[int] = []
    for node, size in enumerate(sizes):
        node_of += [node] * size
    return Nodes(tuple(node_of), sizes, tuple(hosts or ()), source), ""


def _node_sizes(world_size: int, ranks_per_node: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(ranks_per_node, int):
        if ranks_per_node < 1:
            raise DegreeError(f"ranks_per_node={ranks_per_node}; expected at least 1")
        full, rest = divmod(world_size, ranks_per_node)
        if rest:
            remedy = "[...]"
            if full < 4:
                remedy = str([*[ranks_per_node] * full, rest])
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
    why = _find_uneven_nodes(int(found), environ)
    return None if why else int(found), why


def _find_uneven_nodes(size: int, environ: Mapping[str, str]) -> str:
    """Return what tells that the job's nodes do not have ``size`` ranks each, in turn."""
    numbers: list[int | None] = []
    for name in LAUNCHED:
        value = environ.get(name, "")
        numbers.append(int(value) if value.isdecimal() else None)
    rank, node, world, nodes = numbers
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


# The groups along an axis, and the nodes that they cross.


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    degree: int
    stride: int

    def group_of(self, rank: int) -> range:
        first = rank - rank // self.stride % self.degree * self.stride
        return range(first, first + self.degree * self.stride, self.stride)

    def groups(self, world_size: int) -> list[range]:
        """Return every group, ordered by its first rank."""
        span = self.stride * self.degree
        groups = []
        for start in range(0, world_size, span):
            for first in range(start, start + self.stride):
                group = range(first, first + span, self.stride)
                groups.append(group)
        return groups

    def nodes_spanned(self, nodes: Nodes) -> list[int]:
        """Return for every group on how many nodes its ranks are."""
        counts = []
        for group in self.groups(len(nodes.of)):
            of_group = nodes.of[group.start : group.stop : group.step]
            counts.append(len(set(of_group)))
        return counts


def _remedy(axis: Axis, nodes: Nodes) -> str:
    size = math.gcd(*nodes.sizes)
    words = list[str]()
    if not nodes.in_blocks:
        words.append("number the ranks node by node (srun --distribution=block)")
    if axis.stride > 1:
        words.append(f"let {axis.name} vary fastest (order='tp-cp-ep-dp-pp')")
    if size % axis.degree:
        divisors = [str(degree) for degree in range(1, size + 1) if size % degree == 0]
        words.append(
            f"choose a {axis.name} degree that divides the number of ranks of every node: "
            + " or ".join(filter(None, (", ".join(divisors[:-1]), divisors[-1])))
        )
    return "; ".join(words)


_NAMED_NODES = 16
_CLOSE = ("tensor", "expert_tensor")
"""Axes whose collectives every layer waits for."""


@dataclass(frozen=True, repr=False)
class Description:
    """The groups of a mesh, as a table. Made by `describe_mesh`.

    Args:
        axes: The model's, and its experts' where they have their own.
        world_size: Number of ranks in all.
        nodes: The node of every rank, or None if that is not known.
        rank: The rank whose groups are listed.
        unknown: Why the nodes are not known.
    """

    axes: tuple[Axis, ...]
    world_size: int
    nodes: Nodes | None = None
    rank: int = 0
    unknown: str = ""

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return every group of an axis, ordered by its first rank.

        Raises:
            ValueError: There is no such axis.
        """
        return list(map(tuple, self._find_axis(axis).groups(self.world_size)))

    def crossing(self, axis: str) -> list[tuple[int, ...]]:
        """Return the groups of an axis whose ranks are on several nodes.

        Raises:
            ValueError: There is no such axis.
            ParallelError: It is not known which ranks share a node.
        """
        found = self._find_axis(axis)
        if self.nodes is None:
            raise ParallelError(
                f"which {axis} groups cross nodes is not known: {self.unknown}; give "
                "describe_mesh(..., ranks_per_node=)"
            )
        groups = zip(self.groups(axis), found.nodes_spanned(self.nodes), strict=True)
        return [group for group, count in groups if count > 1]

    def __repr__(self) -> str:
        lines = [*_wrap(self._headline()), "", *self._table()]
        for note in self._notes():
            lines += _wrap(note)
        return "\n".join(lines).rstrip()

    def _find_axis(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        names = ", ".join(axis.name for axis in self.axes)
        raise ValueError(f"axis {name!r}; expected one of {names}")

    @property
    def _split_axes(self) -> list[Axis]:
        return [axis for axis in self.axes if axis.degree > 1]

    @cached_property
    def _spans_of_axes(self) -> dict[str, list[int]]:
        if self.nodes is None:
            return {}
        return {axis.name: axis.nodes_spanned(self.nodes) for axis in self._split_axes}

    def _headline(self) -> str:
        text = f"{self.world_size:,} rank"
        if self.world_size > 1:
            text += "s"
        degrees = []
        for axis in self._split_axes:
            if axis.name in AXES:
                degree = f"{axis.name} {axis.degree:,}"
                degrees.append(degree)
        if degrees:
            text += ": " + " x ".join(degrees)
        if self.nodes is not None:
            text += f", on {self.nodes}"
        return text

    def _table(self) -> list[str]:
        rows: list[tuple[str, ...]] = []
        for axis in self._split_axes:
            number = self.world_size // axis.degree
            ranks = axis.group_of(self.rank)
            group = " ".join(map(str, ranks))
            if len(group) > 22:
                group = f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"
            row: tuple[str, ...] = (axis.name, f"{axis.degree:,}", f"{number:,}", group)
            if self._spans_of_axes:
                crossing = _count_crossing(self._spans_of_axes[axis.name])
                words = {0: "none", number: "all"}.get(crossing, f"{crossing:,}")
                row = (*row, words, f"{max(self._spans_of_axes[axis.name]):,}")
            rows.append(row)
        if not rows:
            return []
        heading = ("axis", "degree", "groups", f"of rank {self.rank}", "cross nodes", "most nodes")
        rows.insert(0, heading[: len(rows[0])])
        return align_columns(rows, right={1, 2, 4, 5})

    def _notes(self) -> list[str]:
        """Return names of nodes, warnings, and what is not known."""
        if self.nodes is None:
            if self.world_size == 1:
                return []
            return [
                f"Which ranks share a node is not known ({self.unknown}); give ranks_per_node=."
            ]
        notes = []
        if self.nodes.names:
            names = self.nodes.names[:_NAMED_NODES]
            note = "Nodes: " + ", ".join(map("{} {}".format, range(len(names)), names))
            more = len(self.nodes.names) - len(names)
            if more:
                note += f", ... {more:,} more"
            notes.append(note)
        for warning in self._warnings():
            notes += [f"Warning: {warning}."]
        return notes

    def _warnings(self) -> list[str]:
        found = []
        for axis in self._split_axes:
            if self.nodes is None or axis.name not in _CLOSE:
                continue
            spans = self._spans_of_axes[axis.name]
            crossing = _count_crossing(spans)
            if crossing:
                found.append(
                    f"{crossing:,} of {len(spans):,} {axis.name} groups cross "
                    f"nodes, with ranks on up to {max(spans)}: the collectives of every layer "
                    f"leave the node; {_remedy(axis, self.nodes)}"
                )
        return found


def _count_crossing(spans: Sequence[int]) -> int:
    return sum(count > 1 for count in spans)


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, 80, subsequent_indent="  ", break_on_hyphens=False)


def _list_axes(layout: RankLayout) -> tuple[Axis, ...]:
    """Return the axes of a layout's model, and its experts' where they have their own."""
    names = [*AXES]
    if layout.expert > 1 or layout.expert_tensor is not None:
        names += EXPERT_AXES
    axes = []
    for name in dict.fromkeys(names):
        axis = Axis(name, layout.degree(name), layout.stride(name))
        axes.append(axis)
    # The model's first, and of each the fastest varying.
    return tuple(sorted(axes, key=lambda axis: (axis.name not in AXES, axis.stride)))


def describe_mesh(
    state: ParallelState | RankLayout | None = None,
    *,
    ranks_per_node: int | Sequence[int] | None = None,
    hosts: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Description:
    """Return the groups of each axis, and which of them cross nodes. Nothing is sent.

    A `UserWarning` names tensor groups that cross nodes: every layer waits for their collectives.

    Args:
        state: Whose groups; the state in use if None. A `RankLayout` is enough to plan with.
        ranks_per_node: Number of ranks on each node, or on every single one, where ranks are
            numbered node by node. ``LOCAL_WORLD_SIZE`` if None, where it divides the world and
            agrees with torchrun's other variables.
        hosts: The name of the host of each rank, in whatever order ranks were placed; or,
            where the ranks per node are known, the name of each node.
        environ: The environment to look into; that of this process if None.

    Raises:
        NotInitializedError: There is no state to describe.
        ParallelError: The state has no layout, being made of groups without one.
        DegreeError: The ranks of the nodes do not add up to the world.

    >>> print(describe_mesh(RankLayout(16, tensor=2, context=2), ranks_per_node=8))
    16 ranks: tensor 2 x context 2 x data 4, on 2 nodes of 8
    <BLANKLINE>
    axis     degree  groups  of rank 0  cross nodes  most nodes
    tensor        2       8  0 1               none           1
    context       2       8  0 2               none           1
    data          4       4  0 4 8 12           all           2
    """
    if state is None:
        state = get_state()
    rank = 0
    if isinstance(state, RankLayout):
        layout = state
    elif isinstance(state, ParallelState):
        if state.layout is None:
            raise ParallelError(
                f"{state!r} was made of groups without a layout, so where other ranks are is not "
                "known; make it by ParallelState.create, or give "
                "ParallelState.from_groups(layout=RankLayout(...))"
            )
        layout = state.layout
        rank = state.rank
    else:
        raise TypeError(
            f"describe_mesh({type(state).__name__}); expected a ParallelState or a RankLayout (of "
            "a DeviceMesh: ParallelState.from_mesh(mesh))"
        )
    if environ is None:
        environ = os.environ
    nodes, unknown = find_nodes(layout.world_size, ranks_per_node, hosts, environ)
    description = Description(_list_axes(layout), layout.world_size, nodes, rank, unknown)
    for warning in description._warnings():  # noqa: SLF001 - ours
        warnings.warn(warning, UserWarning, stacklevel=2)
    return description
