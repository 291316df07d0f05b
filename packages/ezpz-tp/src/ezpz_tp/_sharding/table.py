"""The calculator's answer as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .placement import REPLICATED, complete, read

if TYPE_CHECKING:
    from .result import EinsumSharding
    from .steps import Step


def table(answer: EinsumSharding) -> str:
    """Return a row for each tensor and a column for each axis, then the steps."""
    lines = [(answer.equation, "", *answer.axes, *(["local"] if answer.shapes else []))]
    for name, letters, layout in answer.rows():
        told = complete(read(layout, letters, name, answer.axes)[0], answer.axes)
        places = ("-" if where == REPLICATED else where for where in told.values())
        shape = [_shape(answer.shapes.get(name))] if answer.shapes else []
        lines.append((name, letters, *places, *shape))
    # The equation stands above the first two columns.
    head, *rows = lines
    width = max(len(row[0]) for row in rows)
    aligned = _aligned([(head[0], *head[2:])] + [(f"{n:{width}}  {t}", *c) for n, t, *c in rows])
    steps = [*_steps("forward", answer.forward), *_steps("backward", answer.backward)]
    return "\n".join([*aligned, *_aligned(steps)])


def _steps(title: str, steps: Sequence[Step]) -> Iterable[tuple[str, ...]]:
    if not steps:
        yield title, "-"
    for position, step in enumerate(steps):
        yield (
            "" if position else title,
            str(step),
            *([] if step.bytes is None else [_bytes(step.bytes)]),
            step.region or "",
        )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    count = max(len(row) for row in rows)
    full = [[*row, *[""] * (count - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    return [
        "  ".join(f"{word:{width}}" for word, width in zip(row, widths, strict=True)).rstrip()
        for row in full
    ]


def _shape(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else " x ".join(map(str, shape)) or "scalar"


def _bytes(count: int) -> str:
    """Return a number of bytes in the units of a network, 1 kB = 1000 B."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"
