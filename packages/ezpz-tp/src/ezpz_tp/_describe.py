"""`describe_mesh`: which rank is where, and which groups cross the borders of nodes."""

from __future__ import annotations

import math
import os
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from . import _pictures as pictures
from ._current import get_state
from ._errors import ParallelError
from ._pictures import Axis, Grid, Hosts, Nodes, PerNode
from ._ranks import RankLayout
from ._state import ParallelState

# What is said below a picture: degrees, groups, and the nodes that they cross.

NAMED_NODES = 16


def _remedy(axis: Axis, nodes: Nodes) -> str:
    size, words = math.gcd(*nodes.sizes), list[str]()
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


@dataclass(frozen=True, repr=False)
class Description:
    """Which rank is where. Its text is the picture; a notebook shows the SVG.

    Made by `describe_mesh`. Its picture is a matrix of matrices: the fastest axis runs to the
    right, the next one down, the third repeats that matrix to the right, the fourth downwards.
    Lines are the borders of nodes.

    Args:
        grids: The model's, and its experts' where they have their own.
        nodes: The node of every rank, or None if that is not known.
        rank: The rank whose groups are listed.
        unknown: Why the nodes are not known.
    """

    grids: tuple[Grid, ...]
    nodes: Nodes | None = None
    rank: int = 0
    unknown: str = ""

    @property
    def world_size(self) -> int:
        """Number of ranks in all."""
        return self.grids[0].world_size

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return every group of an axis, ordered by its first rank.

        Raises:
            ValueError: There is no such axis.
        """
        return [tuple(group) for group in self._axis(axis).groups(self.world_size)]

    def crossing(self, axis: str) -> list[tuple[int, ...]]:
        """Return the groups of an axis whose ranks are on several nodes.

        Raises:
            ValueError: There is no such axis.
            ParallelError: It is not known which ranks share a node.
        """
        found = self._axis(axis)
        if self.nodes is None:
            raise ParallelError(
                f"which {axis} groups cross nodes is not known: {self.unknown}; give "
                "describe_mesh(..., ranks_per_node=)"
            )
        groups = zip(self.groups(axis), found.nodes_spanned(self.nodes), strict=True)
        return [group for group, count in groups if count > 1]

    def text(self, *, ascii_only: bool = False, width: int = 80) -> str:
        """Return the picture in characters; ``str`` of it is the same.

        Args:
            ascii_only: Without characters that draw boxes, for what cannot encode them.
            width: Columns of the terminal.
        """

        def wrapped(text: str) -> list[str]:
            return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)

        lines = wrapped(self._headline())
        for grid in self.grids:
            drawn = pictures.Terminal(grid, self.nodes, width)
            lines += ["", *([f"{grid.title}: {grid}"] if grid.title else []), *drawn.lines()]
            for note in pictures.elided(grid, drawn.picture, self.nodes):
                lines += wrapped(note)
        lines += ["", *self._table()]
        for note in self._notes():
            lines += wrapped(note)
        text = "\n".join(lines).rstrip()
        return text.translate(pictures.ASCII) if ascii_only else text

    def svg(self) -> str:
        """Return the picture as SVG: one ``svg`` element that needs nothing else."""
        page, title = pictures.Page(), self._headline()
        page.paragraph(title)
        for grid in self.grids:
            if grid.title:
                page.paragraph(f"{grid.title}: {grid}")
            picture = pictures.Drawing(page, grid, self.nodes).draw()
            for note in pictures.elided(grid, picture, self.nodes):
                page.paragraph(note)
        for note in self._notes():
            page.paragraph(note)
        return page.svg(title, self._table())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the SVG into a file.

        Raises:
            ValueError: The name does not end in ``.svg``.
        """
        path = Path(path)
        if path.suffix != ".svg":
            raise ValueError(f"{path} does not end in .svg; of a Description only SVG is saved")
        path.write_text(self.svg(), encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg()

    def __repr__(self) -> str:
        return self.text()

    @cached_property
    def _axes(self) -> dict[str, Axis]:
        """The axes by name: model and experts share their pipelines."""
        return {axis.name: axis for grid in self.grids for axis in grid.axes}

    def _axis(self, name: str) -> Axis:
        if name not in self._axes:
            raise ValueError(f"axis {name!r}; expected one of {', '.join(self._axes)}")
        return self._axes[name]

    @property
    def _several(self) -> list[Axis]:
        return [axis for axis in self._axes.values() if axis.degree > 1]

    @cached_property
    def _spans(self) -> dict[str, list[int]]:
        if self.nodes is None:
            return {}
        return {axis.name: axis.nodes_spanned(self.nodes) for axis in self._several}

    def _headline(self) -> str:
        ranks = f"{self.world_size:,} rank{'s' * (self.world_size > 1)}"
        along = f": {self.grids[0]}" if self.grids[0].several else ""
        return ranks + along + (f", on {self.nodes}" if self.nodes else "")

    def _table(self) -> list[str]:
        rows: list[tuple[str, ...]] = []
        for axis in self._several:
            number = self.world_size // axis.degree
            ranks = axis.group_of(self.rank)
            group = " ".join(map(str, ranks))
            if len(group) > 22:
                group = f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"
            row: tuple[str, ...] = (axis.name, f"{axis.degree:,}", f"{number:,}", group)
            if self._spans:
                crossing = sum(count > 1 for count in self._spans[axis.name])
                words = {0: "none", number: "all"}.get(crossing, f"{crossing:,}")
                row = (*row, words, f"{max(self._spans[axis.name]):,}")
            rows.append(row)
        if not rows:
            return []
        heading = ("axis", "degree", "groups", f"of rank {self.rank}", "cross nodes", "most nodes")
        rows.insert(0, heading[: len(rows[0])])
        columns = []
        for number, column in enumerate(zip(*rows, strict=True)):
            justify = str.ljust if number in {0, 3} else str.rjust  # names, and ranks
            width = max(map(len, column))
            columns.append([justify(cell, width) for cell in column])
        return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]

    def _notes(self) -> list[str]:
        """Return what is to be said besides: names of nodes, warnings, and what is not known."""
        nodes, why, found = self.nodes, self.unknown, []
        if nodes is None:
            note = f"Which ranks share a node is not known ({why}); give ranks_per_node=."
            return [note] if self.world_size > 1 else []
        if nodes.names:
            named = [f"{number} {name}" for number, name in enumerate(nodes.names[:NAMED_NODES])]
            more = len(nodes.names) - NAMED_NODES
            found.append("Nodes: " + ", ".join(named) + (f", ... {more:,} more" * (more > 0)))
        return found + [f"Warning: {warning}." for warning in self._warnings()]

    def _warnings(self) -> list[str]:
        found = []
        for axis in self._several:
            if self.nodes is None or axis.name not in pictures.CLOSE:
                continue
            spans = self._spans[axis.name]
            crossing = sum(count > 1 for count in spans)
            if crossing:
                found.append(
                    f"{crossing:,} of {len(spans):,} {axis.name} groups cross "
                    f"nodes, with ranks on up to {max(spans)}: the collectives of every layer "
                    f"leave the node; {_remedy(axis, self.nodes)}"
                )
        return found


def describe_mesh(
    state: ParallelState | RankLayout | None = None,
    *,
    ranks_per_node: int | Sequence[int] | None = None,
    hosts: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Description:
    """Picture which rank is where, and which groups cross nodes. Nothing is sent.

    A `UserWarning` tells of tensor groups that cross nodes.

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
         data      0            1            2            3
       tensor   0    1       0    1       0    1       0    1
              ┌ node 0 ─┐  ┌ node 0 ─┐  ┌ node 1 ─┐  ┌ node 1 ─┐
    context 0 │  0    1 │  │  4    5 │  │  8    9 │  │ 12   13 │
            1 │  2    3 │  │  6    7 │  │ 10   11 │  │ 14   15 │
              └─────────┘  └─────────┘  └─────────┘  └─────────┘
    <BLANKLINE>
    axis     degree  groups  of rank 0  cross nodes  most nodes
    tensor        2       8  0 1               none           1
    context       2       8  0 2               none           1
    data          4       4  0 4 8 12           all           2
    """
    state = get_state() if state is None else state
    if isinstance(state, RankLayout):
        layout, rank = state, 0
    elif isinstance(state, ParallelState):
        if state.layout is None:
            raise ParallelError(
                f"{state!r} was made of groups without a layout, so where other ranks are is not "
                "known; make it by ParallelState.create, or give "
                "ParallelState.from_groups(layout=RankLayout(...))"
            )
        layout, rank = state.layout, state.rank
    else:
        raise TypeError(
            f"describe_mesh({type(state).__name__}); expected a ParallelState or a RankLayout (of "
            "a DeviceMesh: ParallelState.from_mesh(mesh))"
        )
    return describe_grids(pictures.grids_of_layout(layout), rank, ranks_per_node, hosts, environ)


describe = describe_mesh  # its name of old


def describe_grids(
    grids: Sequence[Grid], rank: int, ranks_per_node: PerNode, hosts: Hosts, environ: Any
) -> Description:
    """Describe grids, and warn as `describe_mesh` does, in the name of the caller's caller."""
    grids, environ = tuple(grids), os.environ if environ is None else environ
    nodes, unknown = pictures.find_nodes(grids[0].world_size, ranks_per_node, hosts, environ)
    description = Description(grids, nodes, rank, unknown)
    for warning in description._warnings():  # noqa: SLF001 - ours
        warnings.warn(warning, UserWarning, stacklevel=3)
    return description
