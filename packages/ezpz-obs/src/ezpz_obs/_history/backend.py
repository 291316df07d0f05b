"""torch.distributed as `History` finds it: set up by somebody else, on whatever device."""

from __future__ import annotations

import sys
from typing import Any

from ezpz_obs._context import Place
from ezpz_obs._errors import HistoryError


def find_distributed(place: Place) -> Any:
    """Return the module torch.distributed.

    Raises:
        HistoryError: It is not set up.
    """
    torch = sys.modules.get("torch")
    dist = None if torch is None else torch.distributed
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise HistoryError(
            f"cross_rank=True on rank {place.rank} of {place.world_size}, and torch.distributed "
            "is not set up; expected ezpz_dist.setup_torch() (or init_process_group) before "
            "History(cross_rank=True)"
        )
    return dist


def is_ring(dist: Any, group: Any, device: Any) -> bool:
    """Return whether the group's all-reduce goes around all ranks, however little there is to add.

    gloo's does, twice, with a message of its own to each neighbour at each step: on 8 ranks it
    sends more for two of 1 kB than a gather of 256 bytes a rank (torch 2.13).
    """
    return device is None and "cpu:gloo" in dist.get_backend_config(group).split(",")


def device_of(torch: Any, dist: Any, group: Any) -> Any:
    """Return where tensors of this group must lie, None for the CPU."""
    # "cpu:gloo,cuda:nccl": the CPU where it may be, which spares the device's queue.
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return None
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
