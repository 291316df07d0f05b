"""Pictures of which rank is where: in characters, and these as SVG."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from ._errors import DegreeError
from ._ranks import AXES, EXPERT_AXES, RankLayout

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
        return self.sizes[0] if len(set(self.sizes)) == 1 and self.in_blocks else None

    def __str__(self) -> str:
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
        of = tuple(numbers[host] for host in hosts)
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
    sizes = _sizes(world_size, ranks_per_node)
    if hosts is not None and (len(hosts) != len(sizes) or len(set(hosts)) < len(hosts)):
        raise DegreeError(
            f"{len(hosts)} hosts ({len(set(hosts))} different ones) for {len(sizes)} nodes of "
            f"ranks_per_node={ranks_per_node}; expected one for each node, or, without "
            "ranks_per_node, one for each rank"
        )
    of = tuple(node for node, size in enumerate(sizes) for _ in range(size))
    return Nodes(of, sizes, tuple(hosts or ()), source), ""


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


# Ranks on a grid of axes: pure arithmetic, quick also for a hundred thousand ranks.


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    degree: int
    stride: int

    def index(self, rank: int) -> int:
        return rank // self.stride % self.degree

    def group_of(self, rank: int) -> range:
        first = rank - self.index(rank) * self.stride
        return range(first, first + self.degree * self.stride, self.stride)


@dataclass(frozen=True, slots=True)
class Grid:
    title: str
    world_size: int
    axes: tuple[Axis, ...]

    @property
    def several(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.axes if axis.degree > 1)

    def groups(self, axis: Axis, ranks: int | None = None) -> list[range]:
        """Return every group of an axis, or those of the first ranks, ordered by its first rank."""
        span = axis.stride * axis.degree
        return [
            range(first, first + span, axis.stride)
            for start in range(0, ranks or self.world_size, span)
            for first in range(start, start + axis.stride)
        ]

    def nodes_spanned(self, axis: Axis, nodes: Nodes) -> list[int]:
        # Where all nodes are alike, groups lie on them in the same way again and again.
        size = self.world_size
        if nodes.per_node is not None:
            size = math.lcm(axis.stride * axis.degree, nodes.per_node)
        spans = [
            len(set(nodes.of[group.start : group.stop : group.step]))
            for group in self.groups(axis, size)
        ]
        return spans * (self.world_size // size)

    def __str__(self) -> str:
        return " x ".join(f"{axis.name} {axis.degree:,}" for axis in self.several)


def grid_of_mesh(title: str, axes: Iterable[tuple[str, int]]) -> Grid:
    """Return the grid of a mesh, by names and degrees of its axes, the slowest varying first."""
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


# Where each rank stands in a picture: a matrix of matrices.
#
# The fastest axis runs to the right, the next one down; the matrix that the two make is repeated
# to the right along the third axis, and the row of matrices downwards along the fourth. (The
# idea is Edward Yang's: blog.ezyang.com, "Draw high dimensional tensors as a matrix of
# matrices", 2025.) Of an axis that is too long the first positions are drawn.

DRAWN = 128  # ranks; of more, some stand for all
ELIDED = 48  # ranks that stand for all
TALLEST = 16  # rows of one matrix

Row = tuple[int, ...]
Shown: TypeAlias = Sequence[tuple[Axis, int]]
"""Axes, and how many positions of each are drawn."""


@dataclass(frozen=True, slots=True)
class Labels:
    axis: str
    positions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    blocks: tuple[tuple[tuple[Row, ...], ...], ...]
    columns: Labels
    rows: Labels
    block_columns: tuple[Labels, ...]
    block_rows: tuple[str, ...]
    hidden: tuple[tuple[Axis, int], ...]

    @property
    def ranks(self) -> set[int]:
        cells = itertools.chain.from_iterable(itertools.chain.from_iterable(self.blocks))
        return set(itertools.chain.from_iterable(cells))


def arrange(
    grid: Grid, nodes: Nodes | None, width_of: Callable[[int, int], int], width: int
) -> Picture:
    per_node = nodes.per_node if nodes else None
    right: list[tuple[Axis, int]] = []
    down: list[tuple[Axis, int]] = []
    most, drawn = DRAWN, 1

    def room(count: int) -> bool:
        columns = right[0][1] if right else count
        blocks = math.prod(each for _, each in right[1:]) * (count if right else 1)
        return width_of(blocks, columns) <= width

    for axis in grid.several:
        if axis.degree * drawn > most:
            most = ELIDED  # and whatever is slower is elided too
        count = max(1, min(axis.degree, most // drawn))
        to_right = len(right) <= len(down) and room(2)
        count = max(filter(room, range(1, count + 1))) if to_right else min(count, TALLEST)
        if count < axis.degree:
            most = ELIDED
            node = max(per_node // axis.stride, 1) if per_node else 1
            count -= count % node if count > node else 0  # what is drawn ends where a node does
        (right if to_right else down).append((axis, count))
        drawn *= count
    return _picture(right, down)


def _picture(right: Shown, down: Shown) -> Picture:
    def choices(shown: Shown) -> list[tuple[int, ...]]:
        """Return every choice of a position on each axis, that of the slowest first."""
        return list(itertools.product(*(range(count) for _, count in shown[::-1])))

    def offsets(shown: Shown) -> list[int]:
        strides = [axis.stride for axis, _ in shown[::-1]]
        return [sum(map(operator.mul, strides, choice)) for choice in choices(shown)]

    columns, rows = offsets(right[:1]), offsets(down[:1])
    blocks = tuple(
        tuple(
            tuple(tuple(below + beside + row + each for each in columns) for row in rows)
            for beside in offsets(right[1:])
        )
        for below in offsets(down[1:])
    )
    block_columns = tuple(
        Labels(axis.name, tuple(str(choice[place]) for choice in choices(right[1:])))
        for place, (axis, _) in enumerate(right[:0:-1])
    )
    block_rows = tuple(
        ", ".join(f"{axis.name} {at}" for (axis, _), at in zip(down[:0:-1], choice, strict=True))
        for choice in choices(down[1:])
    )
    hidden = tuple((axis, count) for axis, count in (*right, *down) if count < axis.degree)
    return Picture(blocks, _labels(right), _labels(down), block_columns, block_rows, hidden)


def _labels(shown: Shown) -> Labels:
    if not shown:
        return Labels("", ("",))
    axis, count = shown[0]
    return Labels(axis.name, tuple(map(str, range(count))))


CLOSE = ("tensor", "expert_tensor", "tp")
"""The axes whose groups should stay within a node: they communicate in every layer."""


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


# Where, in a matrix of ranks, one node ends and another begins.

OUTSIDE = -1


def node_map(block: Sequence[Row], nodes: Nodes | None) -> list[list[int]]:
    # Where nodes are not known all is outside, and there are no borders.
    inner = [[OUTSIDE if nodes is None else nodes.of[rank] for rank in row] for row in block]
    around = [OUTSIDE] * (len(block[0]) + 2)
    return [around, *([OUTSIDE, *row, OUTSIDE] for row in inner), around]


def beginnings(above: Sequence[int], below: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield which nodes begin in a row, and so want their name written above it."""
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


# Ranks and the borders of nodes, drawn in characters.

_SPACE = "  "
# By the lines that meet: 1 from above, 2 from below, 4 from the left, 8 from the right.
CORNERS = {0: " ", 3: "│", 12: "─", 10: "┌", 6: "┐", 9: "└", 5: "┘", 11: "├", 7: "┤", 14: "┬",
           13: "┴", 15: "┼"}  # fmt: skip


class Terminal:
    def __init__(self, grid: Grid, nodes: Nodes | None, width: int) -> None:
        labels = (f"{axis.name} {axis.degree - 1}" for axis in grid.several)
        self._nodes = nodes
        self._margin = max(map(len, labels), default=0)

        def arranged(pitch: int) -> Picture:
            def width_of(blocks: int, columns: int) -> int:
                return self._margin + 1 + blocks * (columns * pitch + 1 + len(_SPACE)) - len(_SPACE)

            return arrange(grid, nodes, width_of, width)

        def fits(pitch: int) -> bool:
            return len(str(max(arranged(pitch).ranks))) + 2 <= pitch

        # From rank to rank; a border stands in between.
        self._pitch = next(filter(fits, itertools.count(4)))
        self.picture = arranged(self._pitch)
        if arranged(self._pitch + 1) == self.picture:
            self._pitch += 1

    def lines(self) -> list[str]:
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
        return f"{label:>{self._margin}} {_SPACE.join(parts)}"

    def _blocks(self, blocks: Sequence[Sequence[Row]]) -> list[str]:
        maps, lines = [node_map(block, self._nodes) for block in blocks], []
        rows = self.picture.rows
        for i, position in enumerate(rows.positions):
            name = f"{rows.axis} {position}" if i == 0 else position
            lines += self._border(maps, i)
            parts = (self._ranks(*two, i) for two in zip(blocks, maps, strict=True))
            lines.append(self._line(name, parts))
        return lines + self._border(maps, len(rows.positions))

    def _border(self, maps: Sequence[list[list[int]]], i: int) -> list[str]:
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


# The picture's characters as SVG.
#
# It stands alone: no script, no font, no image. It is light or dark as the reader prefers.

_LINE, _CHARACTER = 15, 7.3
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})
# Of these elements only: in a notebook the rules of one picture reach all others.
_STYLE = (
    ".ranks{background:#fff}.ranks text{font:12px ui-monospace,monospace;fill:#1f2328}"
    "@media(prefers-color-scheme:dark){.ranks{background:#0d1117}.ranks text{fill:#e6edf3}}"
)


def as_svg(title: str, lines: Sequence[str]) -> str:
    width, height = round(16 + max(map(len, lines)) * _CHARACTER), 16 + len(lines) * _LINE
    title = title.translate(_ESCAPES)
    # The length of each is said, so that borders meet in any font. Spaces that do not break are
    # kept by every program.
    texts = (
        f'<text x="8" y="{number * _LINE + 4}" textLength="{len(line) * _CHARACTER:g}">'
        f"{line.translate(_ESCAPES).replace(' ', chr(0xA0))}</text>"
        for number, line in enumerate(lines, 1)
        if line
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ranks" role="img" '
        f'aria-label="{title}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">\n<title>{title}</title>\n<style>{_STYLE}</style>\n'
    )
    return head + "\n".join(texts) + "\n</svg>\n"
