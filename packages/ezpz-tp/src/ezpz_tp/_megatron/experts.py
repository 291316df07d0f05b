# ruff: noqa: ARG001 - arguments of Megatron's that choose from groups of which there is one
"""Megatron's getters for experts, which lie on a grid of their own: names over the state in use.

Source: NVIDIA/Megatron-LM megatron/core/parallel_state.py, 2026-08-22.
"""

from __future__ import annotations

from torch.distributed import ProcessGroup

from ezpz_tp._groups.default import index_or_alone, ranks_or_alone, size_or_alone

from .groups import found_group, rank_of, size_of

__all__ = [
    "get_expert_data_parallel_group",
    "get_expert_data_parallel_rank",
    "get_expert_data_parallel_world_size",
    "get_expert_model_parallel_group",
    "get_expert_model_parallel_rank",
    "get_expert_model_parallel_src_rank",
    "get_expert_model_parallel_world_size",
    "get_expert_tensor_and_model_parallel_group",
    "get_expert_tensor_and_model_parallel_rank",
    "get_expert_tensor_and_model_parallel_world_size",
    "get_expert_tensor_model_pipeline_parallel_group",
    "get_expert_tensor_parallel_group",
    "get_expert_tensor_parallel_rank",
    "get_expert_tensor_parallel_world_size",
]


def get_expert_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return this rank's expert-parallel group."""
    return found_group(check_initialized, "expert")


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the tensor-parallel group inside this rank's experts."""
    return found_group(check_initialized, "expert_tensor")


def get_expert_tensor_and_model_parallel_group(
    check_initialized: bool = True,
) -> ProcessGroup | None:
    """Return the group over expert tensor and expert."""
    return found_group(check_initialized, "expert_tensor", "expert")


def get_expert_model_parallel_world_size() -> int:
    """Return the number of ranks in this rank's expert-parallel group."""
    return size_of("expert")


def get_expert_model_parallel_rank() -> int:
    """Return this rank's position in its expert-parallel group."""
    return rank_of("expert")


def get_expert_tensor_parallel_world_size() -> int:
    """Return the number of ranks in this rank's expert-tensor-parallel group."""
    return size_of("expert_tensor")


def get_expert_tensor_parallel_rank() -> int:
    """Return this rank's position in its expert-tensor-parallel group."""
    return rank_of("expert_tensor")


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Return the number of ranks in the group over expert tensor and expert."""
    return size_or_alone("expert_tensor", "expert")


def get_expert_tensor_and_model_parallel_rank() -> int:
    """Return this rank's position in the group over expert tensor and expert."""
    return index_or_alone("expert_tensor", "expert")


def get_expert_model_parallel_src_rank() -> int:
    """Return the global rank of the first rank of the expert-parallel group."""
    return ranks_or_alone("expert")[0]


def get_expert_data_parallel_group(
    check_initialized: bool = True,
    with_gtp_remat: bool = True,
    partial_expert_data_parallel: bool = False,
) -> ProcessGroup | None:
    """Return the group of the ranks that hold copies of this rank's experts."""
    return found_group(check_initialized, "expert_data")


def get_expert_data_parallel_rank(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return this rank's position in `get_expert_data_parallel_group`."""
    return index_or_alone("expert_data")


def get_expert_data_parallel_world_size(
    with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return the number of ranks in `get_expert_data_parallel_group`."""
    return size_or_alone("expert_data")


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup | None:
    """Return the group over expert tensor, expert and pipeline."""
    return found_group(check_initialized, "expert_tensor", "expert", "pipeline")
