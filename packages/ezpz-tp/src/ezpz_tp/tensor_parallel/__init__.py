"""Megatron-LM's ``megatron.core.tensor_parallel``: its names, arguments and return values.

One implementation lies beneath, that of `ezpz_tp`. What it does not have (CUDA extensions,
Transformer Engine, weights sharded once more) is an error where it is asked for.

Source: NVIDIA/Megatron-LM megatron/core/tensor_parallel/__init__.py, 2026-08-22.
"""

from . import layers
from .cross_entropy import vocab_parallel_cross_entropy
from .data import broadcast_data
from .inference_layers import (
    InferenceColumnParallelLinear,
    InferenceLayerNormColumnParallelLinear,
    InferenceRowParallelLinear,
)
from .layers import *  # noqa: F403 - all of it, by intention
from .mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    all_to_all,
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from .random import (
    CheckpointWithoutOutput,
    CudaRNGStatesTracker,
    checkpoint,
    convert_cuda_rng_state,
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
    is_graph_safe_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from .utils import (
    VocabUtility,
    gather_split_1d_tensor,
    split_tensor_along_last_dim,
    split_tensor_into_1d_equal_chunks,
)

__all__ = [
    "CheckpointWithoutOutput", "CudaRNGStatesTracker", "InferenceColumnParallelLinear",
    "InferenceLayerNormColumnParallelLinear", "InferenceRowParallelLinear", "VocabUtility",
    "all_gather_last_dim_from_tensor_parallel_region", "all_to_all", "all_to_all_hp2sp",
    "all_to_all_sp2hp", "broadcast_data", "checkpoint", "convert_cuda_rng_state",
    "copy_to_tensor_model_parallel_region", "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region", "gather_split_1d_tensor", "get_cuda_rng_tracker",
    "get_data_parallel_rng_tracker_name", "get_expert_parallel_rng_tracker_name",
    "is_graph_safe_cuda_rng_tracker", "model_parallel_cuda_manual_seed",
    "reduce_from_tensor_model_parallel_region", "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region", "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region", "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks", "vocab_parallel_cross_entropy",
]  # fmt: skip
__all__ += layers.__all__
