"""The group of all ranks, and whether it is still the one that groups were made in."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from ezpz_tp._errors import NotInitializedError

c10d: Any = distributed_c10d

World = weakref.ReferenceType[ProcessGroup]


def live_world() -> ProcessGroup | None:
    """Return the group of all ranks, or None before torch.distributed has one."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD


def initialized_world(wanted: str) -> ProcessGroup:
    """Return the group of all ranks.

    Raises:
        NotInitializedError: There is none; says what was wanted of it.
    """
    world = live_world()
    if world is None:
        raise NotInitializedError(
            f"groups for {wanted} were asked for, but torch.distributed has no process group; "
            "call torch.distributed.init_process_group first"
        )
    return world


def world_of(groups: Iterable[ProcessGroup | None]) -> World | None:
    """Return the world that ends these groups with it: None if it knows none of them."""
    world = live_world()
    if world is None or not any(group in c10d._world.pg_map for group in groups):  # noqa: SLF001
        return None
    return weakref.ref(world)


def has_world(world: World | None) -> bool:
    """Return whether a world is still there. Cheap: getters ask it at every call."""
    if world is None:
        return True
    kept = world()
    return kept is not None and kept is c10d._world.default_pg  # noqa: SLF001
