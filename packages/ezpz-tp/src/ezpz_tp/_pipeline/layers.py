"""Which layers each part of a pipeline has: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from ezpz_tp._errors import DegreeError


def split_layers(count: int, stages: int) -> tuple[range, ...]:
    """Split the numbers of layers into contiguous ranges, as equal as can be.

    The first ``count % stages`` ranges have one layer more. For an interleaved schedule give
    ranks times chunks a rank as ``stages``: range c is on rank ``c % ranks``.

    Args:
        count: Number of layers.
        stages: Number of ranges, each of at least one layer.

    Raises:
        DegreeError: There are fewer layers than stages, or no stage.

    >>> split_layers(10, 4)
    (range(0, 3), range(3, 6), range(6, 8), range(8, 10))
    """
    if stages < 1:
        raise DegreeError(f"split_layers: {stages} stages; expected at least 1")
    if count < stages:
        raise DegreeError(
            f"split_layers: {count} layers for {stages} stages; expected a layer for each: lower "
            "the pipeline's degree, or the number of chunks a rank (virtual=)"
        )
    each, more = divmod(count, stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return tuple(map(range, starts, starts[1:]))


def ranges_of(layers: int | Sequence[range], chunks: int) -> tuple[range, ...]:
    """Return the layers of each chunk: an even split of a number, or ranges that were given.

    Raises:
        DegreeError: There is not one range for each chunk, or they are not the layers in order.
    """
    if isinstance(layers, int):
        return split_layers(layers, chunks)
    ranges = tuple(layers)
    if len(ranges) != chunks:
        raise DegreeError(
            f"layers has {len(ranges)} ranges; expected {chunks}, one for each chunk of the "
            "pipeline (ranks times virtual)"
        )
    start = 0
    for each in ranges:
        if each != range(start, each.stop):
            raise DegreeError(
                f"layers holds {each} where layer {start} is next; expected contiguous ranges "
                "from 0, in the order of the model"
            )
        start = each.stop
    return ranges
