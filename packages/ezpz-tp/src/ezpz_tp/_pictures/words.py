"""What is said below a picture: degrees, groups, and the nodes that they cross."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from .grid import Axis, Grid
from .nodes import Nodes

if TYPE_CHECKING:
    from .arrange import Picture

CLOSE = ("tensor", "expert_tensor", "tp")
"""The axes whose groups should stay within a node: they communicate in every layer."""

NAMED_NODES = 16

Spans = Mapping[str, Sequence[int]]


def axes_of(grids: Sequence[Grid]) -> Iterator[tuple[Grid, Axis]]:
    """Yield the axes that have several ranks, each once: model and experts share pipelines."""
    seen = set()
    for grid in grids:
        for axis in grid.several:
            if axis.name not in seen:
                seen.add(axis.name)
                yield grid, axis


def headline(grid: Grid, nodes: Nodes | None) -> str:
    """Return the first line: how many ranks, along which axes, on which nodes."""
    ranks = f"{grid.world_size:,} rank{'s' * (grid.world_size > 1)}"
    return ranks + (f": {grid}" if grid.several else "") + (f", on {nodes}" if nodes else "")


def table(grids: Sequence[Grid], rank: int, spans: Spans) -> list[str]:
    """Return one line for each axis that has several ranks, below a heading."""
    rows: list[tuple[str, ...]] = []
    for grid, axis in axes_of(grids):
        number = grid.world_size // axis.degree
        group = shortened(axis.group_of(rank))
        row: tuple[str, ...] = (axis.name, f"{axis.degree:,}", f"{number:,}", group)
        if spans:
            crossing = sum(count > 1 for count in spans[axis.name])
            words = {0: "none", number: "all"}.get(crossing, f"{crossing:,}")
            row = (*row, words, f"{max(spans[axis.name]):,}")
        rows.append(row)
    if not rows:
        return []
    heading = ("axis", "degree", "groups", f"of rank {rank}", "cross nodes", "most nodes")
    rows.insert(0, heading[: len(rows[0])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    to_left = ("axis", heading[3])
    return [
        "  ".join(
            cell.ljust(width) if name in to_left else cell.rjust(width)
            for name, cell, width in zip(heading[: len(row)], row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def shortened(ranks: Sequence[int]) -> str:
    """Return ranks as text: all of them, or the first, the second and the last."""
    text = " ".join(map(str, ranks))
    return text if len(text) <= 22 else f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"


def elided(grid: Grid, picture: Picture, nodes: Nodes | None) -> list[str]:
    """Say how the ranks that are not drawn follow from those that are."""
    if not picture.hidden:
        return []
    drawn = picture.ranks
    rest = []
    for axis, count in picture.hidden:
        more = f"{count:,}" + (f" to {axis.degree - 1:,}" if count < axis.degree - 1 else "")
        rest.append(f"{axis.name} {more}: {axis.stride:,} more at each step")
    lines = [f"Drawn: {len(drawn):,} of {grid.world_size:,} ranks. {'; '.join(rest)}."]
    if nodes is not None and nodes.per_node is not None:
        complete = len({nodes.of[rank] for rank in drawn})
        if complete * nodes.per_node == len(drawn):
            lines.append(f"... {len(nodes.sizes) - complete:,} more nodes like these")
    return lines


def notes(grids: Sequence[Grid], nodes: Nodes | None, unknown: str, spans: Spans) -> list[str]:
    """Return what is to be said besides: names of nodes, warnings, and what is not known."""
    world_size = grids[0].world_size
    if nodes is None:
        if world_size == 1:
            return []
        return [f"Which ranks share a node is not known ({unknown}); give ranks_per_node=."]
    found = []
    if nodes.names:
        named = [f"{number} {name}" for number, name in enumerate(nodes.names[:NAMED_NODES])]
        more = len(nodes.names) - NAMED_NODES
        found.append("Nodes: " + ", ".join(named) + (f", ... {more:,} more" * (more > 0)))
    return found + [f"Warning: {warning}." for warning in warnings_of(grids, nodes, spans)]


def warnings_of(grids: Sequence[Grid], nodes: Nodes | None, spans: Spans) -> list[str]:
    """Return what is wrong with the groups that should stay within a node."""
    found = []
    for grid, axis in axes_of(grids):
        if nodes is None or axis.name not in CLOSE:
            continue
        crossing = sum(count > 1 for count in spans[axis.name])
        if crossing:
            found.append(
                f"{crossing:,} of {grid.world_size // axis.degree:,} {axis.name} groups cross "
                f"nodes, with ranks on up to {max(spans[axis.name])}: the collectives of every "
                f"layer leave the node; {_remedy(axis, nodes)}"
            )
    return found


def _remedy(axis: Axis, nodes: Nodes) -> str:
    size, words = nodes.common_size, []
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
