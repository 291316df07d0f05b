"""Sizes and ranks that Megatron-style code sets by hand, over what the groups say.

Checkpoint converters do this: they build the model of rank (t, p) in one process. Only the
getters of `ezpz_tp.parallel_state` and `ezpz_tp.mpu` read these; layers and mappings
communicate in the groups that there are. They end with the state that was in use when they
were set; those set without one, when groups are made or destroyed.
"""

from __future__ import annotations

import warnings

from ezpz_tp._groups.default import notes

__all__ = [
    "get_virtual_pipeline_model_parallel_rank",
    "get_virtual_pipeline_model_parallel_world_size",
    "set_data_parallel_rank",
    "set_expert_model_parallel_rank",
    "set_expert_model_parallel_world_size",
    "set_expert_tensor_parallel_rank",
    "set_expert_tensor_parallel_world_size",
    "set_pipeline_model_parallel_rank",
    "set_pipeline_model_parallel_world_size",
    "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_world_size",
    "set_virtual_pipeline_model_parallel_rank",
    "set_virtual_pipeline_model_parallel_world_size",
]


def overridden(name: str) -> int | None:
    """Return what was set by hand under this name, or None."""
    value: int | None = notes().get(name)
    return value


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Let `get_tensor_model_parallel_world_size` return this; None undoes it."""
    notes()["tensor size"] = world_size


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Let `get_tensor_model_parallel_rank` return this; None undoes it."""
    notes()["tensor rank"] = rank


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Let `get_pipeline_model_parallel_world_size` return this; None undoes it."""
    notes()["pipeline size"] = world_size


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Let `get_pipeline_model_parallel_rank` return this; None undoes it."""
    notes()["pipeline rank"] = rank


def set_data_parallel_rank(rank: int | None) -> None:
    """Let `get_data_parallel_rank` return this; None undoes it."""
    notes()["data rank"] = rank


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """Let `get_expert_model_parallel_world_size` return this; None undoes it."""
    notes()["expert size"] = world_size


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """Let `get_expert_model_parallel_rank` return this; None undoes it."""
    notes()["expert rank"] = rank


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """Let `get_expert_tensor_parallel_world_size` return this; None undoes it."""
    notes()["expert_tensor size"] = world_size


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """Let `get_expert_tensor_parallel_rank` return this; None undoes it."""
    notes()["expert_tensor rank"] = rank


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of model chunks a pipeline rank holds; None is no interleaving."""
    notes()["virtual size"] = world_size


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of model chunks a pipeline rank holds, or None."""
    return overridden("virtual size")


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the model chunk that is meant. Deprecated in Megatron, and here: pass ``vp_stage``."""
    warnings.warn(
        "set_virtual_pipeline_model_parallel_rank is deprecated; pass vp_stage to "
        "is_pipeline_first_stage, is_pipeline_last_stage and is_rank_in_embedding_group",
        DeprecationWarning,
        stacklevel=2,
    )
    notes()["virtual rank"] = rank


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the model chunk that is meant, or None."""
    return overridden("virtual rank")
