"""Ranks and the borders of nodes, drawn as SVG.

It stands alone: no script, no font, no image. It is light or dark as the reader prefers. Ranks of
one tensor group have one color, and the group's number is written too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import pairwise

from .arrange import Labels, Picture, Row, arrange, visible_counts
from .borders import beginnings, node_map
from .grid import Grid
from .nodes import Nodes
from .words import CLOSE, elided

DRAWN = 256  # ranks; of more, some stand for all
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


def draw(
    headline: str,
    table: Sequence[str],
    notes: Sequence[str],
    grids: Sequence[Grid],
    nodes: Nodes | None,
) -> str:
    """Return one ``svg`` element.

    Args:
        headline: Its title.
        table: Its description, for those who cannot see it.
        notes: Paragraphs to write below.
        grids: What to draw, one below the other.
        nodes: The node of every rank, or None if that is not known.
    """
    page = Page()
    page.paragraph(headline)
    for grid in grids:
        if grid.title:
            page.paragraph(f"{grid.title}: {grid}")
        picture = Drawing(page, grid, nodes).draw()
        for note in elided(grid, picture, nodes):
            page.paragraph(note)
    for note in notes:
        page.paragraph(note)
    return page.svg(headline, table)


class Page:
    """What is written so far, and how far to the right and down it goes."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.width, self.height = 0.0, 8.0

    def paragraph(self, text: str) -> None:
        """Write a paragraph below what is there."""
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
        """Return it all."""
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
    """One grid of ranks on a page."""

    def __init__(self, page: Page, grid: Grid, nodes: Nodes | None) -> None:
        self._page, self._nodes = page, nodes
        labels = [f"{axis.name} {axis.degree - 1}" for axis in grid.several]
        self._left = 16 + max(map(len, labels), default=0) * CHARACTER

        def width_of(blocks: int, columns: int) -> float:
            return self._left + blocks * (columns * WIDE + GAP)

        counts, per_node = visible_counts(grid, DRAWN), nodes.per_node if nodes else None
        self._picture = arrange(grid, counts, width_of, WIDTH, per_node)
        self._step = len(self._picture.columns.positions) * WIDE + GAP
        self._close = next((axis for axis in grid.several if axis.name in CLOSE), None)

    def draw(self) -> Picture:
        """Draw it below what is on the page, and return what was drawn."""
        page, picture = self._page, self._picture
        page.height += GAP / 2
        for labels in picture.block_columns:
            self._heading(labels, [self._left + i * self._step + self._step / 2 - GAP / 2
                                   for i in range(len(labels.positions))])  # fmt: skip
        starts = [self._left + i * self._step for i in range(len(picture.blocks[0]))]
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
        if self._close is not None:
            page.paragraph(
                f"Colors and the small numbers tell the {self._close.name} groups apart."
            )
        return picture

    def _heading(self, labels: Labels, places: Iterable[float]) -> None:
        if labels.axis:
            self._page.text(8, labels.axis, "b")
            for x, position in zip(places, labels.positions, strict=True):
                self._page.text(x, position, "m")
            self._page.height += LINE

    def _blocks(self, blocks: Sequence[Sequence[Row]], starts: Sequence[float]) -> None:
        """Draw matrices side by side."""
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
    """Return the lines above row ``i`` and, unless it is the last, those beside its ranks."""
    above, below = numbers[i], numbers[i + 1]
    path, start = "", None
    for j, (one, other) in enumerate(zip(above, below, strict=True)):
        if one != other and start is None:
            start = j
        elif one == other and start is not None:
            path += f"M{x + (start - 1) * WIDE:g} {top:g}H{x + (j - 1) * WIDE:g}"
            start = None
    for j, (one, other) in enumerate(pairwise(below)):
        if one != other:
            path += f"M{x + j * WIDE:g} {top:g}V{foot:g}"
    return path
