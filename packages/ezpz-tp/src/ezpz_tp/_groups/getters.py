"""The module-level getters: one line each over the state in use."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from .default import get_state, index_or_alone, ranks_or_alone, size_or_alone


def get_tensor_parallel_group() -> ProcessGroup:
    """Return this rank's tensor-parallel group."""
    return get_state().group("tensor")


def get_tensor_parallel_rank() -> int:
    """Return this rank's position in its tensor-parallel group, from 0."""
    return index_or_alone("tensor")


def get_tensor_parallel_world_size() -> int:
    """Return the number of ranks in this rank's tensor-parallel group."""
    return size_or_alone("tensor")


def get_tensor_parallel_ranks() -> list[int]:
    """Return the global ranks of this rank's tensor-parallel group, in order."""
    return list(ranks_or_alone("tensor"))


def get_tensor_parallel_src_rank() -> int:
    """Return the global rank of the first rank in this rank's tensor-parallel group."""
    return ranks_or_alone("tensor")[0]


def get_data_parallel_group() -> ProcessGroup:
    """Return this rank's data-parallel group."""
    return get_state().group("data")


def get_data_parallel_rank() -> int:
    """Return this rank's position in its data-parallel group, from 0."""
    return index_or_alone("data")


def get_data_parallel_world_size() -> int:
    """Return the number of ranks in this rank's data-parallel group."""
    return size_or_alone("data")


def get_data_parallel_ranks() -> list[int]:
    """Return the global ranks of this rank's data-parallel group, in order."""
    return list(ranks_or_alone("data"))


def get_data_parallel_src_rank() -> int:
    """Return the global rank of the first rank in this rank's data-parallel group."""
    return ranks_or_alone("data")[0]


def get_pipeline_parallel_group() -> ProcessGroup:
    """Return this rank's pipeline-parallel group."""
    return get_state().group("pipeline")


def get_pipeline_parallel_rank() -> int:
    """Return this rank's position in its pipeline-parallel group, from 0."""
    return index_or_alone("pipeline")


def get_pipeline_parallel_world_size() -> int:
    """Return the number of ranks in this rank's pipeline-parallel group."""
    return size_or_alone("pipeline")


def get_pipeline_parallel_ranks() -> list[int]:
    """Return the global ranks of this rank's pipeline-parallel group, in order."""
    return list(ranks_or_alone("pipeline"))


def get_pipeline_parallel_src_rank() -> int:
    """Return the global rank of the first rank in this rank's pipeline-parallel group."""
    return ranks_or_alone("pipeline")[0]


def get_context_parallel_group() -> ProcessGroup:
    """Return this rank's context-parallel group."""
    return get_state().group("context")


def get_context_parallel_rank() -> int:
    """Return this rank's position in its context-parallel group, from 0."""
    return index_or_alone("context")


def get_context_parallel_world_size() -> int:
    """Return the number of ranks in this rank's context-parallel group."""
    return size_or_alone("context")


def get_context_parallel_ranks() -> list[int]:
    """Return the global ranks of this rank's context-parallel group, in order."""
    return list(ranks_or_alone("context"))


def get_context_parallel_src_rank() -> int:
    """Return the global rank of the first rank in this rank's context-parallel group."""
    return ranks_or_alone("context")[0]


def get_expert_parallel_group() -> ProcessGroup:
    """Return this rank's expert-parallel group."""
    return get_state().group("expert")


def get_expert_parallel_rank() -> int:
    """Return this rank's position in its expert-parallel group, from 0."""
    return index_or_alone("expert")


def get_expert_parallel_world_size() -> int:
    """Return the number of ranks in this rank's expert-parallel group."""
    return size_or_alone("expert")


def get_expert_parallel_ranks() -> list[int]:
    """Return the global ranks of this rank's expert-parallel group, in order."""
    return list(ranks_or_alone("expert"))


def get_expert_parallel_src_rank() -> int:
    """Return the global rank of the first rank in this rank's expert-parallel group."""
    return ranks_or_alone("expert")[0]


def is_pipeline_first_stage() -> bool:
    """Return whether this rank is on the first pipeline stage."""
    return index_or_alone("pipeline") == 0


def is_pipeline_last_stage() -> bool:
    """Return whether this rank is on the last pipeline stage."""
    return index_or_alone("pipeline") == size_or_alone("pipeline") - 1


def get_pipeline_parallel_first_rank() -> int:
    """Return the global rank of the first stage of this rank's pipeline."""
    return ranks_or_alone("pipeline")[0]


def get_pipeline_parallel_last_rank() -> int:
    """Return the global rank of the last stage of this rank's pipeline."""
    return ranks_or_alone("pipeline")[-1]


def get_pipeline_parallel_next_rank() -> int:
    """Return the global rank of the next stage of this rank's pipeline; the last's is the first."""
    return _neighbor(1)


def get_pipeline_parallel_prev_rank() -> int:
    """Return the global rank of the stage before; the first's is the last."""
    return _neighbor(-1)


def _neighbor(step: int) -> int:
    ranks = ranks_or_alone("pipeline")
    return ranks[(index_or_alone("pipeline") + step) % len(ranks)]
