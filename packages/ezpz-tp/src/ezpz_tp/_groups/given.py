"""Process groups that were given: is this rank in them, and do they fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ezpz_tp._errors import DegreeError, ParallelError

from .ranks import AXES, RankLayout


def member(group: ProcessGroup | None, what: str) -> ProcessGroup | None:
    """Return a group that was given, after checking that this rank is in it.

    Raises:
        ParallelError: It is what torch.distributed.new_group returns to ranks that are not
            in the group, or not a process group at all.
    """
    if group is not None and not hasattr(group, "size"):
        raise ParallelError(
            f"the {what} group is {group!r}; expected a process group that this rank is in. "
            "torch.distributed.new_group returns this to the ranks that are not in the group: "
            "give each rank the group of its own"
        )
    return group


def member_ranks(group: ProcessGroup, what: str) -> tuple[int, ...]:
    """Return the global ranks of a group that torch.distributed knows."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        raise ParallelError(
            f"torch.distributed does not know the {what} group, so its ranks are unknown; give "
            "ParallelState.from_groups(layout=...)"
        ) from None


def check_sizes(groups: Mapping[tuple[str, ...], ProcessGroup | None], layout: RankLayout) -> None:
    """Compare the sizes of groups with a layout's degrees; None is a group of one.

    Raises:
        DegreeError: Some differ.
    """
    for axes, group in groups.items():
        if group is None and axes[0] not in AXES:  # not given, rather than of one
            continue
        size, degree = (1 if group is None else group.size()), layout.degree(axes)
        if size != degree:
            raise DegreeError(
                f"the {' x '.join(axes)} group has {size} ranks; the layout's degree is {degree}"
            )


def position(groups: Mapping[tuple[str, ...], ProcessGroup | None]) -> int:
    """Return the rank that Megatron's order gives the member of these groups."""
    index, span = 0, 1
    for axis in AXES:
        group = groups[axis,]
        if group is not None:
            index += group.rank() * span
            span *= group.size()
    return index
