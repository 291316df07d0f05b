"""Pictures of which rank is where: in a terminal and as SVG."""

from __future__ import annotations

import itertools
import math
import textwrap
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

    def group_of(self, rank: int) -> range:
        first = rank - rank // self.stride % self.degree * self.stride
        return range(first, first + self.degree * self.stride, self.stride)

    def number_of(self, rank: int) -> int:
        """Return the number of the group of a rank: groups are ordered by their first rank."""
        return rank // (self.stride * self.degree) * self.stride + rank % self.stride

    def groups(self, world_size: int) -> list[range]:
        """Return every group, ordered by its first rank."""
        span = self.stride * self.degree
        return [
            range(first, first + span, self.stride)
            for start in range(0, world_size, span)
            for first in range(start, start + self.stride)
        ]

    def nodes_spanned(self, nodes: Nodes) -> list[int]:
        groups = self.groups(len(nodes.of))
        return [len(set(nodes.of[each.start : each.stop : each.step])) for each in groups]


@dataclass(frozen=True, slots=True)
class Grid:
    title: str
    world_size: int
    axes: tuple[Axis, ...]

    @property
    def several(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.axes if axis.degree > 1)

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
# matrices", 2025.) An axis too long for its direction is folded into both.

TALLEST = 16  # rows of one matrix, beyond which a second one is put beside it
ELIDED = 48  # ranks that stand for all, where there are too many to draw

Row = tuple[int | None, ...]


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
    grid: Grid, nodes: Nodes | None, most: int, width_of: Callable[[int, int], float], width: float
) -> Picture:
    counts, per_node = visible_counts(grid, most), nodes.per_node if nodes else None
    right: list[Factor] = []
    down: list[Factor] = []

    def room(count: int) -> bool:
        first = right[0].count if right else count
        more = math.prod(factor.count for factor in right[1:]) * (count if right else 1)
        return width_of(more, first) <= width

    for axis in grid.several:
        count = counts[axis.name]
        if len(right) > len(down) and (count <= TALLEST or not room(2)):
            down.append(Factor(axis, 1, count))
        elif len(right) > len(down):  # tall: a part of it goes to the right
            least = math.ceil(count / max(filter(room, range(2, count))))
            inner = _fold(count, range(least, 2 * least + 1))
            down.append(Factor(axis, 1, inner, is_inner=True))
            right.append(Factor(axis, inner, math.ceil(count / inner)))
        elif room(count):
            right.append(Factor(axis, 1, count))
        elif not room(2):
            down.append(Factor(axis, 1, count))
        else:  # wide: a part of it goes down
            longest = max(filter(room, range(2, count)))
            node = max(per_node // axis.stride, 1) if per_node else 1
            inner = _fold(count, range(longest, max((longest - 1) // 2, 1), -1), node)
            right.append(Factor(axis, 1, inner, is_inner=True))
            down.append(Factor(axis, inner, math.ceil(count / inner)))
    drawn = ((axis, counts[axis.name]) for axis in grid.several)
    hidden = tuple((axis, count) for axis, count in drawn if count < axis.degree)
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
            tuple(tuple(rank_at(*below, *beside, *row, *each) for each in columns) for row in rows)
            for beside in outer_columns
        )
        for below in outer_rows
    )
    block_columns = tuple(
        Labels(each.axis.name, tuple(each.label(dict(at)[each]) for at in outer_columns))
        for each in right[:0:-1]
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
    inner = [
        [OUTSIDE if rank is None or nodes is None else nodes.of[rank] for rank in row]
        for row in block
    ]
    around = [OUTSIDE] * (len(block[0]) + 2)
    return [around, *([OUTSIDE, *row, OUTSIDE] for row in inner), around]


def beginnings(above: Sequence[int], below: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield which nodes begin in a row, and so want their name written above it."""
    start = 1
    for node, run in itertools.groupby(below[1:-1]):
        end = start + len(list(run))
        if node != OUTSIDE and node not in above[start:end]:
            _, clear = next(itertools.groupby(above[start:end]))
            yield start - 1, len(list(clear)), node
        start = end


# Ranks and the borders of nodes, drawn in characters.

_IN_TERMINAL = 128  # ranks; of more, some stand for all
_SPACE = "  "
# By the lines that meet: 1 from above, 2 from below, 4 from the left, 8 from the right.
CORNERS = {0: " ", 3: "│", 12: "─", 10: "┌", 6: "┐", 9: "└", 5: "┘", 11: "├", 7: "┤", 14: "┬",
           13: "┴", 15: "┼"}  # fmt: skip
ASCII = str.maketrans("│─┌┐└┘├┤┬┴┼", "|-" + "+" * 9)


class Terminal:
    def __init__(self, grid: Grid, nodes: Nodes | None, width: int) -> None:
        counts = visible_counts(grid, _IN_TERMINAL)
        last = sum((counts[axis.name] - 1) * axis.stride for axis in grid.several)
        labels = (f"{axis.name} {axis.degree - 1}" for axis in grid.several)
        self._nodes = nodes
        self._margin = max(map(len, labels), default=0)

        def arranged(pitch: int) -> Picture:
            def width_of(blocks: int, columns: int) -> int:
                return self._margin + 1 + blocks * (columns * pitch + 1 + len(_SPACE)) - len(_SPACE)

            return arrange(grid, nodes, _IN_TERMINAL, width_of, width)

        self._pitch = max(len(str(last)) + 2, 4)  # from rank to rank; a border stands in between
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


# Ranks and the borders of nodes, drawn as SVG.
#
# It stands alone: no script, no font, no image. It is light or dark as the reader prefers. Ranks of
# one tensor group have one color, and the group's number is written too.

_IN_SVG = 256  # ranks; of more, some stand for all
WIDTH = 960
WIDE, HIGH, GAP, LINE, CHARACTER = 40, 34, 16, 18, 7.3
# Pastels that dark text can be read on; neighbors differ to the color-blind too.
COLORS = ("#9ecae9", "#ffbf79", "#b5cf6b", "#e7a6c8", "#d9d3a5", "#88d2c4", "#ff9d98", "#c5b0e0")
ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})
# Of these elements only: in a notebook the rules of one picture reach all others.
STYLE = (
    ".ranks{background:#fff}"
    ".ranks text{font:12px ui-monospace,monospace;fill:#1f2328}"
    ".ranks path{stroke:#1f2328;stroke-width:2;stroke-linecap:square;fill:none}"
    "@media(prefers-color-scheme:dark){"
    ".ranks{background:#0d1117}.ranks text{fill:#e6edf3}.ranks path{stroke:#e6edf3}}"
    ".ranks .m,.ranks .r,.ranks .s{text-anchor:middle}.ranks .b{font-weight:bold}"
    ".ranks .r,.ranks .s{fill:#111}.ranks .s{font-size:9px}"
)


class Page:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.width, self.height = 0.0, 8.0

    def paragraph(self, text: str) -> None:
        for line in textwrap.wrap(text, int(WIDTH / CHARACTER), break_on_hyphens=False):
            self.text(8, line)
            self.height += LINE

    def text(self, x: float, text: str, kind: str = "", y: float = 13) -> None:
        """Write text from ``x``, or around it, with its foot ``y`` below what is there."""
        kind = f' class="{kind}"' if kind else ""
        self.parts.append(
            f'<text x="{x:g}" y="{self.height + y:g}"{kind}>{text.translate(ESCAPES)}</text>'
        )
        self.width = max(self.width, x + len(text) * CHARACTER)

    def svg(self, title: str, table: Iterable[str]) -> str:
        width, height = round(self.width + 8), round(self.height + 8)
        title, description = title.translate(ESCAPES), "\n".join(table).translate(ESCAPES)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="ranks" role="img" '
            f'aria-label="{title}" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">\n<title>{title}</title>\n'
            f"<desc>{description}</desc>\n<style>{STYLE}</style>\n"
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


class Drawing:
    def __init__(self, page: Page, grid: Grid, nodes: Nodes | None) -> None:
        self._page, self._nodes = page, nodes
        labels = [f"{axis.name} {axis.degree - 1}" for axis in grid.several]
        self._left = 16 + max(map(len, labels), default=0) * CHARACTER

        def width_of(blocks: int, columns: int) -> float:
            return self._left + blocks * (columns * WIDE + GAP)

        self._picture = arrange(grid, nodes, _IN_SVG, width_of, WIDTH)
        self._step = len(self._picture.columns.positions) * WIDE + GAP
        self._close = next((axis for axis in grid.several if axis.name in CLOSE), None)

    def draw(self) -> Picture:
        page, picture = self._page, self._picture
        page.height += GAP / 2
        starts = [self._left + i * self._step for i in range(len(picture.blocks[0]))]
        for labels in picture.block_columns:
            self._heading(labels, [start + (self._step - GAP) / 2 for start in starts])
        inner = range(len(picture.columns.positions))
        self._heading(
            Labels(picture.columns.axis, picture.columns.positions * len(starts)),
            [start + j * WIDE + WIDE / 2 for start in starts for j in inner],
        )
        for label, blocks in zip(picture.block_rows, picture.blocks, strict=True):
            if label:
                page.text(8, label, "b")
                page.height += LINE
            self._blocks(blocks, starts)
            page.height += GAP / 2
        if close := self._close:
            page.paragraph(f"Colors and the small numbers tell the {close.name} groups apart.")
        return picture

    def _heading(self, labels: Labels, places: Iterable[float]) -> None:
        if labels.axis:
            self._page.text(8, labels.axis, "b")
            for x, position in zip(places, labels.positions, strict=True):
                self._page.text(x, position, "m")
            self._page.height += LINE

    def _blocks(self, blocks: Sequence[Sequence[Row]], starts: Sequence[float]) -> None:
        page, picture = self._page, self._picture
        maps = [node_map(block, self._nodes) for block in blocks]
        path = ""
        for i, label in enumerate((*picture.rows.positions, None)):
            names = [
                (start + column * WIDE + 3, columns * WIDE, node)
                for start, numbers in zip(starts, maps, strict=True)
                for column, columns, node in beginnings(numbers[i], numbers[i + 1])
            ]
            for x, room, node in names:
                name = f"node {node}"
                page.text(x, name if len(name) * CHARACTER < room else f"n{node}")
            top = page.height
            page.height += LINE if names else 0
            for start, numbers in zip(starts, maps, strict=True):
                path += _borders(numbers, i, start, top, page.height + HIGH)
            if label is None:
                break
            page.text(8, f"{picture.rows.axis} {label}", "b", HIGH / 2 + 4)
            for start, block in zip(starts, blocks, strict=True):
                for j, rank in enumerate(block[i]):
                    if rank is not None:
                        self._rank(start + j * WIDE, rank)
            page.height += HIGH
        if path:
            page.parts.append(f'<path d="{path}"/>')

    def _rank(self, x: float, rank: int) -> None:
        page, group = self._page, None if self._close is None else self._close.number_of(rank)
        color = COLORS[(group or 0) % len(COLORS)]
        page.parts.append(
            f'<rect x="{x + 2:g}" y="{page.height + 2:g}" width="{WIDE - 4}" height="{HIGH - 4}" '
            f'rx="4" fill="{color}"/>'
        )
        page.text(x + WIDE / 2, str(rank), "r", HIGH / 2 + (4 if group is None else 1))
        if group is not None:
            page.text(x + WIDE / 2, str(group), "s", HIGH - 6)


def _borders(numbers: Sequence[Sequence[int]], i: int, x: float, top: float, foot: float) -> str:
    above, below = numbers[i], numbers[i + 1]
    path = ""
    for differ, run in itertools.groupby(range(len(below)), lambda j: above[j] != below[j]):
        if differ:
            columns = list(run)
            path += f"M{x + (columns[0] - 1) * WIDE:g} {top:g}H{x + columns[-1] * WIDE:g}"
    for j, (one, other) in enumerate(pairwise(below)):
        if one != other:
            path += f"M{x + j * WIDE:g} {top:g}V{foot:g}"
    return path
