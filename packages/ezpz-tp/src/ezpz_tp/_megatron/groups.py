# ruff: noqa: ARG001 - arguments of Megatron's that choose from groups of which there is one
"""Megatron's getters of groups, ranks and sizes: names over the state in use.

The rules of `ezpz_tp`'s own getters hold: before there are groups, sizes are 1 and ranks 0 if
this rank is alone in the world, and all else is a NotInitializedError. Megatron's arguments
``with_gtp_remat`` and ``partial_*`` change nothing here: without weights that are gathered
anew and without several optimizer instances, what they choose from is the same group.

Source: NVIDIA/Megatron-LM megatron/core/parallel_state.py, 2026-08-22.
"""

from __future__ import annotations

from torch.distributed import ProcessGroup

from ezpz_tp._errors import NotInitializedError, ParallelError
from ezpz_tp._groups.default import (
    current_state,
    get_state,
    index_or_alone,
    ranks_or_alone,
    size_or_alone,
    tensor_parallel_is_initialized,
)

from .overrides import overridden

__all__ = [
    "get_all_ranks",
    "get_amax_reduction_group",
    "get_context_parallel_global_ranks",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_data_and_context_parallel_group",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_src_rank",
    "get_data_parallel_world_size",
    "get_embedding_group",
    "get_expert_gtp_weight_remat_global_ranks",
    "get_expert_gtp_weight_remat_group",
    "get_expert_gtp_weight_remat_rank",
    "get_expert_gtp_weight_remat_world_size",
    "get_gtp_weight_remat_global_ranks",
    "get_gtp_weight_remat_group",
    "get_gtp_weight_remat_rank",
    "get_gtp_weight_remat_world_size",
    "get_hierarchical_context_parallel_groups",
    "get_hybrid_data_context_parallel_groups",
    "get_inter_distributed_optimizer_instance_group",
    "get_intra_distributed_optimizer_instance_group",
    "get_model_parallel_group",
    "get_model_parallel_src_rank",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_position_embedding_group",
    "get_tensor_and_context_parallel_group",
    "get_tensor_and_context_parallel_rank",
    "get_tensor_and_context_parallel_world_size",
    "get_tensor_and_data_parallel_group",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "is_initialized",
    "model_parallel_is_initialized",
]


def is_initialized() -> bool:
    """Return whether there are groups to use."""
    return tensor_parallel_is_initialized()


def model_parallel_is_initialized() -> bool:
    """Return whether there are groups to use."""
    return tensor_parallel_is_initialized()


def found_group(check_initialized: bool, *axes: str) -> ProcessGroup | None:
    """Return a group; None where there is none and the caller said not to check."""
    state = current_state()
    if not check_initialized and (state is None or not state.has_group(*axes)):
        return None
    return get_state().group(*axes)


def size_of(axis: str) -> int:
    """Return the degree of an axis, or what was set by hand."""
    value = overridden(f"{axis} size")
    return size_or_alone(axis) if value is None else value


def rank_of(axis: str) -> int:
    """Return the position along an axis, or what was set by hand."""
    value = overridden(f"{axis} rank")
    return index_or_alone(axis) if value is None else value


def _data_axes(with_context_parallel: bool) -> tuple[str, ...]:
    return ("context", "data") if with_context_parallel else ("data",)


def get_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the group over tensor and pipeline."""
    return found_group(check_initialized, "tensor", "pipeline")


def get_tensor_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return this rank's tensor-parallel group."""
    return found_group(check_initialized, "tensor")


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return this rank's pipeline-parallel group."""
    return found_group(check_initialized, "pipeline")


def get_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return this rank's context-parallel group."""
    return found_group(check_initialized, "context")


def get_embedding_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the group of the stages that hold word embeddings."""
    return found_group(check_initialized, "embedding")


def get_position_embedding_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the group of the stages that hold position embeddings."""
    return found_group(check_initialized, "position_embedding")


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the group over tensor and context."""
    return found_group(check_initialized, "tensor", "context")


def get_intra_distributed_optimizer_instance_group(
    check_initialized: bool = True,
) -> ProcessGroup | None:
    """Return the group of the one optimizer instance: every rank."""
    return found_group(check_initialized, "tensor", "context", "data", "pipeline")


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> None:
    """Return None, where ``check_initialized`` is False: there is one optimizer instance."""
    _refuse_group(check_initialized, "across optimizer instances, of which there is one")


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> None:
    """Return None, where ``check_initialized`` is False: the context axis is one ring."""
    _refuse_group(check_initialized, "of a context axis in levels")


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> ProcessGroup | None:
    """Return the group over context and data if it has ``group_size`` ranks; there is no other."""
    if group_size == size_or_alone("context", "data"):
        return found_group(check_initialized, "context", "data")
    _refuse_group(check_initialized, f"of {group_size} ranks over context and data")
    return None


def _refuse_group(check_initialized: bool, what: str) -> None:
    if check_initialized:
        raise NotInitializedError(
            f"no group {what}; ezpz_tp makes none: pass check_initialized=False to have None"
        )


def get_gtp_weight_remat_group(check_initialized: bool = True) -> ProcessGroup | None:
    """Return the group that gathers sharded weights again: this rank alone, as none are."""
    if not check_initialized and not tensor_parallel_is_initialized():
        return None
    return get_state().alone()


def get_gtp_weight_remat_world_size() -> int:
    """Return 1: weights are not sharded once more."""
    return 1


def get_gtp_weight_remat_rank() -> int:
    """Return 0, this rank's position in `get_gtp_weight_remat_group`."""
    return 0


def get_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Return the global ranks of `get_gtp_weight_remat_group`."""
    if not check_initialized and not tensor_parallel_is_initialized():
        return None
    return [get_state().rank]


# Experts' weights are not sharded once more, either.
get_expert_gtp_weight_remat_group = get_gtp_weight_remat_group
get_expert_gtp_weight_remat_world_size = get_gtp_weight_remat_world_size
get_expert_gtp_weight_remat_rank = get_gtp_weight_remat_rank
get_expert_gtp_weight_remat_global_ranks = get_gtp_weight_remat_global_ranks


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of ranks in this rank's tensor-parallel group."""
    return size_of("tensor")


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's position in its tensor-parallel group."""
    return rank_of("tensor")


def get_pipeline_model_parallel_world_size() -> int:
    """Return the number of ranks in this rank's pipeline-parallel group."""
    return size_of("pipeline")


def get_pipeline_model_parallel_rank() -> int:
    """Return this rank's position in its pipeline-parallel group."""
    return rank_of("pipeline")


def get_context_parallel_world_size() -> int:
    """Return the number of ranks in this rank's context-parallel group."""
    return size_or_alone("context")


def get_context_parallel_rank() -> int:
    """Return this rank's position in its context-parallel group."""
    return index_or_alone("context")


def get_tensor_and_context_parallel_world_size() -> int:
    """Return the number of ranks in the group over tensor and context."""
    return size_or_alone("tensor", "context")


def get_tensor_and_context_parallel_rank() -> int:
    """Return this rank's position in the group over tensor and context."""
    return index_or_alone("tensor", "context")


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first rank of the tensor-parallel group."""
    return ranks_or_alone("tensor")[0]


def get_model_parallel_src_rank() -> int:
    """Return the global rank of the first rank over tensor and pipeline."""
    return ranks_or_alone("tensor", "pipeline")[0]


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Return the global ranks of this rank's context-parallel group."""
    if not check_initialized and current_state() is None:
        return None
    return list(get_state().ranks("context"))


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup | None:
    """Return the group over tensor and data, and context if asked for."""
    return found_group(check_initialized, "tensor", *_data_axes(with_context_parallel))


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup:
    """Return the group over which FP8 maxima are reduced."""
    axes = [] if tp_only_amax_red else ["data"]
    context = ["context"] if with_context_parallel else []
    return get_state().group("tensor", *context, *axes)


def get_data_parallel_group(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> ProcessGroup:
    """Return this rank's data-parallel group, or that over context and data."""
    _whole(with_context_parallel, partial_data_parallel)
    return get_state().group(*_data_axes(with_context_parallel))


def get_data_and_context_parallel_group(with_context_parallel: bool = True) -> ProcessGroup:
    """Return this rank's group over context and data, or that over data alone."""
    return get_data_parallel_group(with_context_parallel)


def get_data_parallel_world_size(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """Return the number of ranks in `get_data_parallel_group`."""
    _whole(with_context_parallel, partial_data_parallel)
    return size_or_alone(*_data_axes(with_context_parallel))


def get_data_parallel_rank(
    with_context_parallel: bool = False,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """Return this rank's position in `get_data_parallel_group`."""
    _whole(with_context_parallel, partial_data_parallel)
    value = overridden("data rank")
    return index_or_alone(*_data_axes(with_context_parallel)) if value is None else value


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the global rank of the first rank of the data-parallel group."""
    return ranks_or_alone(*_data_axes(with_context_parallel))[0]


def get_all_ranks() -> str:
    """Return this rank's positions, joined by ``_``: tensor, (none), data, context, ..."""
    ranks = (rank_of("tensor"), 0, get_data_parallel_rank(), get_context_parallel_rank())
    return "_".join(str(rank) for rank in (*ranks, rank_of("pipeline"), rank_of("expert")))


def _whole(with_context_parallel: bool, partial: bool) -> None:
    if partial and not with_context_parallel:
        raise ParallelError(
            "partial_data_parallel=True without with_context_parallel=True; an optimizer "
            "instance spans context and data"
        )
