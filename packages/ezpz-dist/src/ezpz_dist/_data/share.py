"""Which part of the data is this rank's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ezpz_dist._errors import DataError
from ezpz_dist._world import current_world

T = TypeVar("T")


def data_share() -> tuple[int, int]:
    """Return (which, of how many): this rank's part of the data, from 0, and how many there are.

    Tensor-, context- and pipeline-parallel ranks work on the same samples, so theirs is the
    same: the position in the data-parallel group of ``ezpz_tp``. Without its groups every
    rank has its own.

    Raises:
        NotSetUpError: There are several ranks and `setup_torch` was not called.
    """
    world = current_world("data_share()")
    if world is None or world.info.world_size == 1:
        return 0, 1
    import ezpz_tp  # noqa: PLC0415  # only who asks pays for it

    if ezpz_tp.tensor_parallel_is_initialized():
        return ezpz_tp.get_data_parallel_rank(), ezpz_tp.get_data_parallel_world_size()
    return world.info.rank, world.info.world_size


def share_of(
    items: Sequence[T],
    *,
    sizes: Sequence[float] | None = None,
    share: tuple[int, int] | None = None,
) -> list[T]:
    """Return this rank's part of a list, for example of files; nothing is sent.

    Every item is in one part. Without sizes they are dealt out one by one; with sizes the
    largest go first, each to the part that has least (at most 4/3 of the best possible,
    Graham 1969).

    Args:
        items: The same on every rank, in the same order.
        sizes: One for each item, for example of bytes.
        share: (which, of how many); default: `data_share`.

    Raises:
        DataError: There are fewer items than parts, which would leave a rank without any.
        NotSetUpError: There are several ranks and `setup_torch` was not called.
        ValueError: There are not as many sizes as items, or ``share`` is none.
    """
    which, count = checked(share)
    if len(items) < count:
        raise DataError(
            f"{len(items)} items for {count} data-parallel ranks; expected at least one each; "
            "split the items, or read them with fewer ranks"
        )
    if sizes is None:
        return list(items[which::count])
    if len(sizes) != len(items):
        raise ValueError(f"{len(sizes)} sizes; expected one for each of {len(items)} items")
    loads = [(0.0, 0)] * count
    mine: list[int] = []
    for place in sorted(range(len(items)), key=lambda place: -sizes[place]):
        # Items without a size are dealt out evenly, too.
        least = min(range(count), key=loads.__getitem__)
        loads[least] = loads[least][0] + sizes[place], loads[least][1] + 1
        if least == which:
            mine.append(place)
    return [items[place] for place in sorted(mine)]


def checked(share: tuple[int, int] | None) -> tuple[int, int]:
    """Return the share that is given, or this rank's.

    Raises:
        ValueError: It is no (which, of how many).
    """
    if share is None:
        return data_share()
    which, count = share
    if not 0 <= which < count:
        raise ValueError(f"share {share}; expected (which, of how many), from (0, 1)")
    return which, count
