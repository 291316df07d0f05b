"""Where each rank stands in a picture: a matrix of matrices.

The fastest axis runs to the right, the next one down; the matrix that the two make is repeated
to the right along the third axis, and the row of matrices downwards along the fourth. (The
idea is Edward Yang's: blog.ezyang.com, "Draw high dimensional tensors as a matrix of
matrices", 2025.) An axis too long for its direction is folded into both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .grid import Axis, Grid

TALLEST = 16  # rows of one matrix, beyond which a second one is put beside it
ELIDED = 48  # ranks that stand for all, where there are too many to draw

Row = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Labels:
    """The positions along one direction of the picture, and the axis that they are on."""

    axis: str
    positions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """Matrices of ranks in rows and columns, and their labels.

    Args:
        blocks: Rows of matrices; a matrix is rows of ranks, None where there is none.
        columns: The labels within a matrix, from left to right.
        rows: The labels within a matrix, from top to bottom.
        block_columns: The labels of the columns of matrices, the outermost axis first.
        block_rows: The label of each row of matrices.
        hidden: Axes that are not drawn to their end, and how many positions are.
    """

    blocks: tuple[tuple[tuple[Row, ...], ...], ...]
    columns: Labels
    rows: Labels
    block_columns: tuple[Labels, ...]
    block_rows: tuple[str, ...]
    hidden: tuple[tuple[Axis, int], ...]

    @property
    def ranks(self) -> set[int]:
        """The ranks that are drawn."""
        cells = itertools.chain.from_iterable(itertools.chain.from_iterable(self.blocks))
        return {rank for row in cells for rank in row if rank is not None}


@dataclass(frozen=True, slots=True)
class Factor:
    """One axis, or a part of a folded one: ``count`` steps of ``step`` positions."""

    axis: Axis
    step: int
    count: int
    is_inner: bool = False

    def label(self, index: int) -> str:
        """Return what to call a position: relative to the outer part of a folded axis."""
        return f"+{index}" if self.is_inner else str(index * self.step)


def visible_counts(grid: Grid, most: int) -> dict[str, int]:
    """Return how many positions of each axis to draw, so that at most ``most`` ranks are."""
    counts, drawn, most_here = {}, 1, most
    for axis in grid.several:
        if axis.degree * drawn > most_here:
            most_here = min(most, ELIDED)  # and whatever is slower is elided too
        counts[axis.name] = max(1, min(axis.degree, most_here // drawn))
        drawn *= counts[axis.name]
    return counts


def arrange(
    grid: Grid,
    counts: dict[str, int],
    width_of: Callable[[int, int], float],
    width: float,
    per_node: int | None,
) -> Picture:
    """Place ranks.

    Args:
        grid: The ranks and their axes.
        counts: Of each axis, how many positions are drawn.
        width_of: Gives the width of so many columns of matrices of so many columns each.
        width: The width that there is.
        per_node: The number of ranks on a node, at which a fold is best; None if that varies.
    """
    right: list[Factor] = []
    down: list[Factor] = []

    def room(count: int) -> bool:
        """Whether ``count`` times as much fits to the right."""
        first = right[0].count if right else count
        more = math.prod(factor.count for factor in right[1:]) * (count if right else 1)
        return width_of(more, first) <= width

    for axis in grid.several:
        count = counts[axis.name]
        if len(right) > len(down) and (count <= TALLEST or not room(2)):
            down.append(Factor(axis, 1, count))
        elif len(right) > len(down):  # tall: a part of it goes to the right
            most = max(filter(room, range(2, count)))
            least = math.ceil(count / most)
            inner = _fold(count, range(least, 2 * least + 1))
            down.append(Factor(axis, 1, inner, is_inner=True))
            right.append(Factor(axis, inner, math.ceil(count / inner)))
        elif room(count):
            right.append(Factor(axis, 1, count))
        elif not room(2):
            down.append(Factor(axis, 1, count))
        else:  # wide: a part of it goes down
            most = max(filter(room, range(2, count)))
            node = max(per_node // axis.stride, 1) if per_node else 1
            inner = _fold(count, range(most, max((most - 1) // 2, 1), -1), node)
            right.append(Factor(axis, 1, inner, is_inner=True))
            down.append(Factor(axis, inner, math.ceil(count / inner)))
    hidden = tuple((axis, counts[axis.name]) for axis in grid.several
                   if counts[axis.name] < axis.degree)  # fmt: skip
    return _picture(counts, right, down, hidden)


def _fold(count: int, lengths: Iterable[int], node: int = 1) -> int:
    """Return where to fold an axis: at the end of a node, in equal parts, else the first length."""
    return max(lengths, key=lambda length: (length % node == 0, count % length == 0))


def _picture(
    counts: dict[str, int],
    right: Sequence[Factor],
    down: Sequence[Factor],
    hidden: tuple[tuple[Axis, int], ...],
) -> Picture:
    def rank_at(*choice: tuple[Factor, int]) -> int | None:
        positions: dict[Axis, int] = {}
        for factor, index in choice:
            positions[factor.axis] = positions.get(factor.axis, 0) + factor.step * index
        if any(position >= counts[axis.name] for axis, position in positions.items()):
            return None  # past the end of a fold
        return sum(axis.stride * position for axis, position in positions.items())

    def choices(factors: Sequence[Factor]) -> list[tuple[tuple[Factor, int], ...]]:
        """Return every choice of a position on each factor, the last factor varying slowest."""
        slowest_first = [[(factor, i) for i in range(factor.count)] for factor in factors[::-1]]
        return list(itertools.product(*slowest_first))

    columns, rows = choices(right[:1]), choices(down[:1])
    outer_columns, outer_rows = choices(right[1:]), choices(down[1:])
    blocks = tuple(
        tuple(
            tuple(
                tuple(rank_at(*below, *beside, *row, *column) for column in columns) for row in rows
            )
            for beside in outer_columns
        )
        for below in outer_rows
    )
    block_columns = tuple(
        Labels(
            factor.axis.name,
            tuple(factor.label(dict(choice)[factor]) for choice in outer_columns),
        )
        for factor in right[:0:-1]
    )
    block_rows = tuple(
        ", ".join(f"{factor.axis.name} {factor.label(index)}" for factor, index in choice)
        for choice in outer_rows
    )
    return Picture(blocks, _labels(right[:1]), _labels(down[:1]), block_columns, block_rows, hidden)


def _labels(factors: Sequence[Factor]) -> Labels:
    if not factors:
        return Labels("", ("",))
    (factor,) = factors
    return Labels(factor.axis.name, tuple(map(factor.label, range(factor.count))))
