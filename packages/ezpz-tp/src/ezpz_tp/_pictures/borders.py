"""Where, in a matrix of ranks, one node ends and another begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .arrange import Row
from .nodes import Nodes

OUTSIDE = -1


def node_map(block: Sequence[Row], nodes: Nodes | None) -> list[list[int]]:
    """Return the node of each rank of a matrix, with `OUTSIDE` all around it.

    Where nodes are not known all is outside, and there are no borders.
    """
    inner = [
        [OUTSIDE if rank is None or nodes is None else nodes.of[rank] for rank in row]
        for row in block
    ]
    around = [OUTSIDE] * (len(block[0]) + 2)
    return [around, *([OUTSIDE, *row, OUTSIDE] for row in inner), around]


def beginnings(above: Sequence[int], below: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield which nodes begin in a row, and so want their name written above it.

    Args:
        above: The nodes of the row before, from `node_map`.
        below: The nodes of the row.

    Yields:
        The column of the node's first rank, how many columns follow until a border comes down
        from the row above, and the node.
    """
    start = 1
    while start < len(below) - 1:
        end = start
        while end < len(below) - 1 and below[end] == below[start]:
            end += 1
        if below[start] != OUTSIDE and below[start] not in above[start:end]:
            clear = start + 1
            while clear < end and above[clear] == above[clear - 1]:
                clear += 1
            yield start - 1, clear - start, below[start]
        start = end
