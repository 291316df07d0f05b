"""Boxes of a weight: what a rank holds, and the tiles that a weight is drawn in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from ezpz_tp._errors import DegreeError

TILE = 1 << 18
"""Elements in a tile. Large enough that drawing one outweighs starting to (about 2 ms on a CPU),
small enough that what a shard draws of its neighbors' does not matter."""

_NARROWEST = 64
"""Columns in a tile of a weight split along a later dim: its copies then fill cache lines."""

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""The half-open range of each dim."""


def stretches(
    shard_shape: Shape,
    full_shape: Shape,
    dim: int | None,
    *,
    index: int,
    degree: int,
    stride: int | Sequence[int],
) -> list[tuple[Box, Box]]:
    """Return, for each stretch, where it lies in the shard and where in the full weight.

    There are as many as ``stride``, of equal length, or as it has sizes of what is divided.
    """
    whole: Box = tuple((0, size) for size in full_shape)
    if dim is None:
        if shard_shape != full_shape:
            raise DegreeError(
                f"a weight of shape {shard_shape} that is not split should have its full shape, "
                f"{full_shape}; pass partition_dim, or a tensor of that shape"
            )
        return [(whole, whole)]
    held, full = shard_shape[dim], full_shape[dim]
    blocks = (full // stride,) * stride if isinstance(stride, int) else tuple(stride)
    others_fit = (*full_shape[:dim], held, *full_shape[dim + 1 :]) == shard_shape
    even = held * degree == full == sum(blocks) and not any(block % degree for block in blocks)
    if not others_fit or held * degree < full or (len(blocks) > 1 and not even):
        raise DegreeError(
            f"a shard of shape {shard_shape}, split along dim {dim} over {degree} ranks in "
            f"{stride} stretches, does not fit a full weight of shape {full_shape}; expected "
            f"dim {dim} to hold {full} / {degree} rows, rounded up only where stride is 1"
        )
    if not 0 <= index < degree:
        raise DegreeError(f"rank {index} of {degree} in a group; expected 0 to {degree - 1}")
    found, first, begin = [], 0, 0
    for block in blocks:
        each = held if len(blocks) == 1 else block // degree
        start = min(begin + index * each, full)
        stop = min(start + each, full)
        at = _with(whole, dim, first, first + stop - start)
        found.append((at, _with(whole, dim, start, stop)))
        first, begin = first + each, begin + block
    return found


def within(stretch: tuple[Box, Box], begins: Shape, shape: Shape) -> tuple[Box, Box]:
    """Cut a stretch to the part of the shard that begins there and has that shape."""
    at: list[tuple[int, int]] = []
    full: list[tuple[int, int]] = []
    for (a, b), (start, _), begin, size in zip(*stretch, begins, shape, strict=True):
        low = min(max(a, begin), b)
        high = max(low, min(b, begin + size))
        at.append((low - begin, high - begin))
        full.append((start + low - a, start + high - a))
    return tuple(at), tuple(full)


def tiles(full_shape: Shape, dim: int, box: Box) -> Iterator[tuple[int, Box]]:
    """Yield the number and the place of each tile that shares an element with a box."""
    steps = list(full_shape)
    others = max(1, math.prod(full_shape) // max(1, full_shape[dim]))
    width = max(1, TILE // others)
    if dim > 0:  # also cut the rows, rather than make it a few columns of very many
        width = max(width, _NARROWEST)
        steps[0] = max(1, TILE * full_shape[0] // (others * width))
    steps[dim] = width
    counts = [-(-size // step) for size, step in zip(full_shape, steps, strict=True)]
    touched = (range(a // s, -(-b // s)) for (a, b), s in zip(box, steps, strict=True))
    for place in itertools.product(*touched):
        number = 0
        for here, count in zip(place, counts, strict=True):
            number = number * count + here
        yield (
            number,
            tuple(
                (here * step, min((here + 1) * step, size))
                for here, step, size in zip(place, steps, full_shape, strict=True)
            ),
        )


def elements(box: Box) -> int:
    """Return how many elements a box holds."""
    return math.prod([stop - start for start, stop in box])


def slices(box: Box) -> tuple[slice, ...]:
    """Return what to index a tensor with to have a box of it."""
    return tuple(slice(start, stop) for start, stop in box)


def common(box: Box, other: Box) -> Box:
    """Return what two boxes share; they do share something."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))


def shifted(box: Box, origin: Box) -> Box:
    """Return a box as counted from where another begins."""
    return tuple((a - o, b - o) for (a, b), (o, _) in zip(box, origin, strict=True))


def _with(box: Box, dim: int, start: int, stop: int) -> Box:
    return (*box[:dim], (start, stop), *box[dim + 1 :])
