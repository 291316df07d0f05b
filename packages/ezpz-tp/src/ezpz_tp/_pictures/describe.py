"""`describe`: which rank is where, and which groups cross the borders of nodes."""

from __future__ import annotations

import os
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ezpz_tp._errors import ParallelError
from ezpz_tp._groups.default import get_state
from ezpz_tp._groups.ranks import RankLayout
from ezpz_tp._groups.state import ParallelState

from . import words
from .grid import Axis, Grid, grids_of_layout
from .nodes import Nodes, find_nodes


@dataclass(frozen=True, repr=False)
class Description:
    """Which rank is where. Its text is the picture; a notebook shows the SVG.

    Made by `describe`. Its picture is a matrix of matrices: the fastest axis runs to the right,
    the next one down, the third repeats that matrix to the right, the fourth downwards. Lines
    are the borders of nodes.

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
        grid, found = self._find(axis)
        return [tuple(group) for group in grid.groups(found)]

    def crossing(self, axis: str) -> list[tuple[int, ...]]:
        """Return the groups of an axis whose ranks are on several nodes.

        Raises:
            ValueError: There is no such axis.
            ParallelError: It is not known which ranks share a node.
        """
        grid, found = self._find(axis)
        if self.nodes is None:
            raise ParallelError(
                f"which {axis} groups cross nodes is not known: {self.unknown}; give "
                "describe(..., ranks_per_node=)"
            )
        spans = grid.nodes_spanned(found, self.nodes)
        return [
            tuple(group)
            for group, count in zip(grid.groups(found), spans, strict=True)
            if count > 1
        ]

    def text(self, *, ascii_only: bool = False, width: int = 80) -> str:
        """Return the picture in characters; ``str`` of it is the same.

        Args:
            ascii_only: Without characters that draw boxes, for what cannot encode them.
            width: Columns of the terminal.
        """
        # What draws is imported when something is drawn: it would be half of this module's cost.
        from .terminal import ASCII, Terminal  # noqa: PLC0415

        def wrapped(text: str) -> list[str]:
            return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)

        lines = wrapped(words.headline(self.grids[0], self.nodes))
        for grid in self.grids:
            drawn = Terminal(grid, self.nodes, width)
            lines += ["", *([f"{grid.title}: {grid}"] if grid.title else []), *drawn.lines()]
            for note in words.elided(grid, drawn.picture, self.nodes):
                lines += wrapped(note)
        lines += ["", *self._table()]
        for note in self._notes():
            lines += wrapped(note)
        text = "\n".join(lines).rstrip()
        return text.translate(ASCII) if ascii_only else text

    def svg(self) -> str:
        """Return the picture as SVG: one ``svg`` element that needs nothing else."""
        from .svg import draw  # noqa: PLC0415 - as in `text`

        return draw(
            words.headline(self.grids[0], self.nodes),
            self._table(),
            self._notes(),
            self.grids,
            self.nodes,
        )

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

    def _find(self, axis: str) -> tuple[Grid, Axis]:
        for grid in self.grids:
            for found in grid.axes:
                if found.name == axis:
                    return grid, found
        known = dict.fromkeys(one.name for grid in self.grids for one in grid.axes)
        raise ValueError(f"axis {axis!r}; expected one of {', '.join(known)}")

    @cached_property
    def _spans(self) -> dict[str, list[int]]:
        """The number of nodes of each group, by axis; empty if nodes are not known."""
        if self.nodes is None:
            return {}
        return {
            axis.name: grid.nodes_spanned(axis, self.nodes)
            for grid, axis in words.axes_of(self.grids)
        }

    def _table(self) -> list[str]:
        return words.table(self.grids, self.rank, self._spans)

    def _notes(self) -> list[str]:
        return words.notes(self.grids, self.nodes, self.unknown, self._spans)


def describe(
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

    >>> print(describe(RankLayout(16, tensor=2, context=2), ranks_per_node=8))
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
    if state is None:
        state = get_state()
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
            f"describe({type(state).__name__}); expected a ParallelState or a RankLayout (of a "
            "DeviceMesh: ParallelState.from_mesh(mesh))"
        )
    return describe_grids(grids_of_layout(layout), rank, ranks_per_node, hosts, environ)


def describe_grids(
    grids: tuple[Grid, ...],
    rank: int,
    ranks_per_node: int | Sequence[int] | None,
    hosts: Sequence[str] | None,
    environ: Mapping[str, str] | None,
) -> Description:
    """Describe grids, and warn as `describe` does, in the name of the caller's caller."""
    nodes, unknown = find_nodes(
        grids[0].world_size, ranks_per_node, hosts, os.environ if environ is None else environ
    )
    description = Description(grids, nodes, rank, unknown)
    for warning in words.warnings_of(grids, nodes, description._spans):  # noqa: SLF001 - ours
        warnings.warn(warning, UserWarning, stacklevel=3)
    return description
