"""Megatron's questions about the stages of a pipeline: names over the state in use.

Source: NVIDIA/Megatron-LM megatron/core/parallel_state.py, 2026-08-22.
"""

from __future__ import annotations

from ezpz_tp._errors import ParallelError
from ezpz_tp._groups.default import current_state, ranks_or_alone

from .groups import rank_of, size_of
from .overrides import get_virtual_pipeline_model_parallel_world_size

__all__ = [
    "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_last_rank",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_rank_in_embedding_group",
    "is_rank_in_position_embedding_group",
]


def get_pipeline_model_parallel_first_rank() -> int:
    """Return the global rank of the first stage of this rank's pipeline."""
    return ranks_or_alone("pipeline")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the global rank of the last stage of this rank's pipeline."""
    return _stage(size_of("pipeline") - 1)


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the next stage; after the last comes the first."""
    return _stage(rank_of("pipeline") + 1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the stage before; before the first comes the last."""
    return _stage(rank_of("pipeline") - 1)


def _stage(index: int) -> int:
    ranks, size = ranks_or_alone("pipeline"), size_of("pipeline")
    if index % size >= len(ranks):
        raise ParallelError(
            f"no rank has stage {index % size}: the pipeline size was set to {size} by hand, and "
            f"the pipeline has the ranks {list(ranks)}; undo it with "
            "set_pipeline_model_parallel_world_size(None)"
        )
    return ranks[index % size]


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank (and, if asked, model chunk ``vp_stage``) is first in the model."""
    if not ignore_virtual and _chunks(vp_stage) is not None and vp_stage != 0:
        return False
    return rank_of("pipeline") == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank (and, if asked, model chunk ``vp_stage``) is last in the model."""
    chunks = None if ignore_virtual else _chunks(vp_stage)
    if chunks is not None and vp_stage != chunks - 1:
        return False
    return rank_of("pipeline") == size_of("pipeline") - 1


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank (and, if asked, model chunk) holds word embeddings."""
    state = current_state()
    if state is None or not state.has("embedding"):
        return False
    ranks = state.ranks("embedding")
    if not ignore_virtual and state.rank == ranks[0]:
        return is_pipeline_first_stage(False, vp_stage)
    if not ignore_virtual and state.rank == ranks[-1]:
        return is_pipeline_last_stage(False, vp_stage)
    return True


def is_rank_in_position_embedding_group() -> bool:
    """Return whether this rank holds position embeddings."""
    state = current_state()
    return state is not None and state.has("position_embedding")


def _chunks(vp_stage: int | None) -> int | None:
    chunks = get_virtual_pipeline_model_parallel_world_size()
    if chunks is not None and vp_stage is None:
        raise ParallelError(
            f"a pipeline rank holds {chunks} model chunks; pass vp_stage to say which is meant"
        )
    return chunks
