"""Ranks on a grid of axes: pure arithmetic, quick also for a hundred thousand ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ezpz_tp._groups.ranks import AXES, EXPERT_AXES, RankLayout

from .nodes import Nodes


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: ranks along it are ``stride`` apart, and there are ``degree`` of them."""

    name: str
    degree: int
    stride: int

    def index(self, rank: int) -> int:
        """Return the position of a rank along this axis, from 0."""
        return rank // self.stride % self.degree

    def group_of(self, rank: int) -> range:
        """Return the ranks that differ from ``rank`` along this axis only."""
        first = rank - self.index(rank) * self.stride
        return range(first, first + self.degree * self.stride, self.stride)

    def number_of(self, rank: int) -> int:
        """Return the number of the group of a rank: groups are ordered by their first rank."""
        return rank // (self.stride * self.degree) * self.stride + rank % self.stride


@dataclass(frozen=True, slots=True)
class Grid:
    """Every rank of a world, by its position along axes.

    Args:
        title: What lies on it, for a heading.
        world_size: Number of ranks: the product of the degrees.
        axes: The fastest varying first.
    """

    title: str
    world_size: int
    axes: tuple[Axis, ...]

    @property
    def several(self) -> tuple[Axis, ...]:
        """The axes along which there is more than one rank."""
        return tuple(axis for axis in self.axes if axis.degree > 1)

    def groups(self, axis: Axis) -> list[range]:
        """Return every group of an axis, ordered by its first rank."""
        return self._groups_within(axis, self.world_size)

    def nodes_spanned(self, axis: Axis, nodes: Nodes) -> list[int]:
        """Return for every group of an axis, in order, on how many nodes its ranks are."""
        # Where all nodes are alike, groups lie on them in the same way again and again.
        size = self.world_size
        if nodes.per_node is not None:
            size = math.lcm(axis.stride * axis.degree, nodes.per_node)
        spans = [
            len(set(nodes.of[group.start : group.stop : group.step]))
            for group in self._groups_within(axis, size)
        ]
        return spans * (self.world_size // size)

    def _groups_within(self, axis: Axis, ranks: int) -> list[range]:
        span = axis.stride * axis.degree
        return [
            range(first, first + span, axis.stride)
            for start in range(0, ranks, span)
            for first in range(start, start + axis.stride)
        ]

    def __str__(self) -> str:
        """Say it in words: ``tensor 2 x data 4``."""
        return " x ".join(f"{axis.name} {axis.degree:,}" for axis in self.several)


def grid_of_mesh(title: str, axes: Iterable[tuple[str, int]]) -> Grid:
    """Return the grid of a mesh.

    Args:
        title: What lies on it.
        axes: Names and degrees, the slowest varying first, as `init_device_mesh` takes them.
    """
    found, stride = [], 1
    for name, degree in reversed(list(axes)):
        found.append(Axis(name, degree, stride))
        stride *= degree
    return Grid(title, stride, tuple(found))


def grids_of_layout(layout: RankLayout) -> tuple[Grid, ...]:
    """Return the grid of a layout's model, and its experts' where they have their own."""
    found = [_grid("", layout, AXES)]
    if layout.expert > 1 or layout.expert_tensor is not None:
        found.append(_grid("experts", layout, (*EXPERT_AXES, "pipeline")))
    return tuple(found)


def _grid(title: str, layout: RankLayout, names: Iterable[str]) -> Grid:
    axes = [Axis(name, layout.degree(name), layout.stride(name)) for name in names]
    # An axis of degree 1 has the stride of its neighbor; which of them is first does not matter.
    return Grid(title, layout.world_size, tuple(sorted(axes, key=lambda axis: axis.stride)))
