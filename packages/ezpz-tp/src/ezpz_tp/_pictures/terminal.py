"""Ranks and the borders of nodes, drawn in characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from .arrange import Picture, Row, arrange, visible_counts
from .borders import beginnings, node_map
from .grid import Grid
from .nodes import Nodes

DRAWN = 128  # ranks; of more, some stand for all
GAP = "  "
# By the lines that meet: 1 from above, 2 from below, 4 from the left, 8 from the right.
CORNERS = {0: " ", 3: "│", 12: "─", 10: "┌", 6: "┐", 9: "└", 5: "┘", 11: "├", 7: "┤", 14: "┬",
           13: "┴", 15: "┼"}  # fmt: skip
ASCII = str.maketrans("│─┌┐└┘├┤┬┴┼", "|-" + "+" * 9)


class Terminal:
    """One grid of ranks, drawn in a terminal.

    Args:
        grid: The ranks and their axes.
        nodes: The node of every rank, or None if that is not known.
        width: Columns of the terminal.

    Attributes:
        picture: What is drawn where.
    """

    def __init__(self, grid: Grid, nodes: Nodes | None, width: int) -> None:
        counts, per_node = visible_counts(grid, DRAWN), None if nodes is None else nodes.per_node
        last = sum((counts[axis.name] - 1) * axis.stride for axis in grid.several)
        labels = (f"{axis.name} {axis.degree - 1}" for axis in grid.several)
        self._nodes = nodes
        self._margin = max(map(len, labels), default=0)

        def arranged(pitch: int) -> Picture:
            def width_of(blocks: int, columns: int) -> int:
                return self._margin + 1 + blocks * (columns * pitch + 1 + len(GAP)) - len(GAP)

            return arrange(grid, counts, width_of, width, per_node)

        self._pitch = max(len(str(last)) + 2, 4)  # from rank to rank; a border stands in between
        self.picture = arranged(self._pitch)
        if arranged(self._pitch + 1) == self.picture:
            self._pitch += 1

    def lines(self) -> list[str]:
        """Return the picture."""
        columns, lines = self.picture.columns, []
        for labels in self.picture.block_columns:
            width = self._pitch * len(columns.positions) + 1
            lines.append(self._line(labels.axis, (word.center(width) for word in labels.positions)))
        if columns.axis:
            words = (word.center(self._pitch - 1) for word in columns.positions)
            above = " ".join(("", *words, ""))
            lines.append(self._line(columns.axis, [above] * len(self.picture.blocks[0])))
        for label, blocks in zip(self.picture.block_rows, self.picture.blocks, strict=True):
            lines += [label] if label else []
            lines += self._blocks(blocks)
        return [line.rstrip() for line in lines]

    def _line(self, label: str, parts: Iterable[str]) -> str:
        return f"{label:>{self._margin}} {GAP.join(parts)}"

    def _blocks(self, blocks: Sequence[Sequence[Row]]) -> list[str]:
        """Return the lines of matrices that stand side by side."""
        maps, lines = [node_map(block, self._nodes) for block in blocks], []
        rows = self.picture.rows
        for i, position in enumerate(rows.positions):
            name = f"{rows.axis} {position}" if i == 0 else position
            lines += self._border(maps, i)
            parts = (self._ranks(*two, i) for two in zip(blocks, maps, strict=True))
            lines.append(self._line(name, parts))
        return lines + self._border(maps, len(rows.positions))

    def _border(self, maps: Sequence[list[list[int]]], i: int) -> list[str]:
        """Return the line above row ``i``, if a node ends or begins there."""
        if all(numbers[i] == numbers[i + 1] for numbers in maps):
            return []
        return [self._line("", (self._border_of(numbers[i], numbers[i + 1]) for numbers in maps))]

    def _border_of(self, above: list[int], below: list[int]) -> str:
        line = ""
        for one, other in zip(pairwise(above), pairwise(below), strict=True):
            right = one[1] != other[1]
            meet = (one[0] != one[1]) + 2 * (other[0] != other[1]) + 4 * (one[0] != other[0])
            line += CORNERS[meet + 8 * right] + ("─" if right else " ") * (self._pitch - 1)
        line = line[: 1 - self._pitch]  # to the right of the last corner there is nothing
        for column, columns, node in beginnings(above, below):
            start, room = column * self._pitch + 1, columns * self._pitch - 1
            name = f" node {node} "
            name = name if len(name) < room else f"n{node}"[:room]
            line = line[:start] + name + line[start + len(name) :]
        return line

    def _ranks(self, block: Sequence[Row], numbers: list[list[int]], i: int) -> str:
        line = ""
        for (one, other), rank in zip(pairwise(numbers[i + 1]), (*block[i], None), strict=True):
            number = "" if rank is None else rank
            line += f"{CORNERS[3] if one != other else ' '}{number:>{self._pitch - 2}} "
        return line[: 1 - self._pitch]
