"""Tensor, context, data and pipeline parallelism for plain PyTorch.

Every rank makes the groups it belongs to, builds layers that hold its part of each weight, and
runs the code that it ran alone:

    import torch.distributed as dist
    import ezpz_tp as tp

    dist.init_process_group()
    tp.initialize_tensor_parallel(tensor_parallel_size=2)
    up = tp.ColumnParallelLinear(1024, 4096, gather_output=False)
    down = tp.RowParallelLinear(4096, 1024, input_is_parallel=True)

The names here are ezpz's; `ezpz_tp.parallel_state`, `ezpz_tp.mpu` and `ezpz_tp.tensor_parallel`
hold Megatron-LM's, `ezpz_tp.model_parallel` fairscale's, and `ezpz_tp.testing` what tests a
user's own layers. One implementation lies beneath them all.
"""

import importlib
from typing import TYPE_CHECKING

from ._cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from ._current import (
    current_state,
    destroy_model_parallel,
    destroy_tensor_parallel,
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_ranks,
    get_context_parallel_src_rank,
    get_context_parallel_world_size,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_ranks,
    get_data_parallel_src_rank,
    get_data_parallel_world_size,
    get_expert_parallel_group,
    get_expert_parallel_rank,
    get_expert_parallel_ranks,
    get_expert_parallel_src_rank,
    get_expert_parallel_world_size,
    get_pipeline_parallel_first_rank,
    get_pipeline_parallel_group,
    get_pipeline_parallel_last_rank,
    get_pipeline_parallel_next_rank,
    get_pipeline_parallel_prev_rank,
    get_pipeline_parallel_rank,
    get_pipeline_parallel_ranks,
    get_pipeline_parallel_src_rank,
    get_pipeline_parallel_world_size,
    get_state,
    get_tensor_parallel_group,
    get_tensor_parallel_rank,
    get_tensor_parallel_ranks,
    get_tensor_parallel_src_rank,
    get_tensor_parallel_world_size,
    initialize_model_parallel,
    initialize_tensor_parallel,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
    tensor_parallel_is_initialized,
    use_state,
)
from ._data import broadcast_data, sequence_positions, shard_sequence, unshard_sequence
from ._embedding import ParallelEmbedding, VocabParallelEmbedding, vocabulary_lookup
from ._errors import (
    DegreeError,
    NotInitializedError,
    ParallelError,
    ReplicaError,
)
from ._fused import column_linear, row_linear
from ._grads import clip_grad_norm_, finalize_grads, get_grad_norm
from ._groups import make_group
from ._init import initialize_shard
from ._linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_attributes,
    copy_tensor_model_parallel_attributes,
    keep_attributes,
    mark_sequence_parallel,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from ._mappings import (
    VocabUtility,
    all_gather_last_dim_from_tensor_parallel_region,
    all_to_all,
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    copy_to_tensor_parallel_region,
    divide_and_check_no_remainder,
    ensure_divisibility,
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    gather_split_1d_tensor,
    head_to_sequence,
    reduce_from_tensor_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_parallel_region,
    sequence_to_head,
    split_tensor_along_last_dim,
    split_tensor_into_1d_equal_chunks,
)
from ._pipeline import Pipeline, split_layers
from ._random import (
    RngTracker,
    checkpoint,
    checkpoint_activations,
    get_rng_tracker,
    rng_contexts,
    seed_model_parallel,
)
from ._ranks import AXES, EXPERT_AXES, RankLayout
from ._ring import ring_attention
from ._shard import Piece, Shard, set_shard, shard_of
from ._state import ParallelState, make_mesh
from ._ulysses import split_context, ulysses_attention, unified_attention

if TYPE_CHECKING:
    from ._dtensor_state import dtensor_state_dict, load_dtensor_state_dict
    from ._replicated import verify_replicated
    from ._state_dict import gather_state_dict, shard_state_dict

__version__ = "0.1.0"

_LATER = {
    "dtensor_state_dict": "_dtensor_state",
    "load_dtensor_state_dict": "_dtensor_state",
    "gather_state_dict": "_state_dict",
    "shard_state_dict": "_state_dict",
    "verify_replicated": "_replicated",
}
"""Modules that few programs need, imported when one of their names is first used."""


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = [
    "AXES",
    "EXPERT_AXES",
    "ColumnParallelLinear",
    "DegreeError",
    "NotInitializedError",
    "ParallelEmbedding",
    "ParallelError",
    "ParallelState",
    "Piece",
    "Pipeline",
    "RankLayout",
    "ReplicaError",
    "RngTracker",
    "RowParallelLinear",
    "Shard",
    "VocabParallelEmbedding",
    "VocabUtility",
    "__version__",
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "broadcast_data",
    "checkpoint",
    "checkpoint_activations",
    "clip_grad_norm_",
    "column_linear",
    "copy_attributes",
    "copy_tensor_model_parallel_attributes",
    "copy_to_tensor_parallel_region",
    "current_state",
    "destroy_model_parallel",
    "destroy_tensor_parallel",
    "divide_and_check_no_remainder",
    "dtensor_state_dict",
    "ensure_divisibility",
    "finalize_grads",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_parallel_region",
    "gather_split_1d_tensor",
    "gather_state_dict",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_ranks",
    "get_context_parallel_src_rank",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_ranks",
    "get_data_parallel_src_rank",
    "get_data_parallel_world_size",
    "get_expert_parallel_group",
    "get_expert_parallel_rank",
    "get_expert_parallel_ranks",
    "get_expert_parallel_src_rank",
    "get_expert_parallel_world_size",
    "get_grad_norm",
    "get_pipeline_parallel_first_rank",
    "get_pipeline_parallel_group",
    "get_pipeline_parallel_last_rank",
    "get_pipeline_parallel_next_rank",
    "get_pipeline_parallel_prev_rank",
    "get_pipeline_parallel_rank",
    "get_pipeline_parallel_ranks",
    "get_pipeline_parallel_src_rank",
    "get_pipeline_parallel_world_size",
    "get_rng_tracker",
    "get_state",
    "get_tensor_parallel_group",
    "get_tensor_parallel_rank",
    "get_tensor_parallel_ranks",
    "get_tensor_parallel_src_rank",
    "get_tensor_parallel_world_size",
    "head_to_sequence",
    "initialize_model_parallel",
    "initialize_shard",
    "initialize_tensor_parallel",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "keep_attributes",
    "load_dtensor_state_dict",
    "make_group",
    "make_mesh",
    "mark_sequence_parallel",
    "param_is_not_tensor_parallel_duplicate",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "ring_attention",
    "rng_contexts",
    "row_linear",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_parallel_region",
    "seed_model_parallel",
    "sequence_positions",
    "sequence_to_head",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_shard",
    "set_tensor_model_parallel_attributes",
    "shard_of",
    "shard_sequence",
    "shard_state_dict",
    "split_context",
    "split_layers",
    "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks",
    "tensor_parallel_is_initialized",
    "ulysses_attention",
    "unified_attention",
    "unshard_sequence",
    "use_state",
    "verify_replicated",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
    "vocabulary_lookup",
]  # fmt: skip
