"""torch's mesh over the data-parallel ranks: a line, or copies x shards."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from ezpz_dist._collectives.gather import all_gather_object
from ezpz_dist._hangs.waiting import waiting

from .replicas import Replicas


def data_parallel_mesh(replicas: Replicas, shard_size: int | None = None) -> DeviceMesh:
    """Return the mesh that a model is sharded over.

    Collective: with a ``shard_size`` every rank of the world calls this, because groups are made.

    Args:
        replicas: The data-parallel ranks.
        shard_size: How many of them, neighbors, share one copy; None: all.

    Returns:
        The axis ``shard`` over the group that there is, or the axes ``replicate`` and ``shard``.
    """
    device_type = replicas.world.device.type
    if shard_size in (None, replicas.size):
        assert replicas.group is not None
        return DeviceMesh.from_group(replicas.group, device_type, mesh_dim_names=("shard",))
    # Communicators that are split from the world's want all of its ranks: one mesh for all, of
    # which a rank takes its part.
    lines = _all_lines(replicas)
    ranks = torch.tensor(lines).view(len(lines), -1, shard_size)
    with waiting("the groups of hybrid sharding", replicas.world):
        if len(lines) == 1:
            return DeviceMesh(device_type, ranks[0], mesh_dim_names=("replicate", "shard"))
        mesh = DeviceMesh(device_type, ranks, mesh_dim_names=("model", "replicate", "shard"))
        return mesh["replicate", "shard"]


def _all_lines(replicas: Replicas) -> list[tuple[int, ...]]:
    """Return all groups of data-parallel ranks, this rank's and those beside it."""
    if replicas.size == replicas.world.info.world_size:
        return [tuple(replicas.ranks)]
    return list(dict.fromkeys(all_gather_object(tuple(replicas.ranks))))
