"""Megatron-LM's ``megatron.core.tensor_parallel``: its names, arguments and return values.

One implementation lies beneath, that of `ezpz_tp`. What it does not have (CUDA extensions,
Transformer Engine, weights sharded once more) is an error where it is asked for.

Source: NVIDIA/Megatron-LM megatron/core/tensor_parallel/__init__.py, 2026-08-22.
"""

from . import layers, mappings
from .cross_entropy import vocab_parallel_cross_entropy
from .data import broadcast_data
from .inference_layers import (
    InferenceColumnParallelLinear,
    InferenceLayerNormColumnParallelLinear,
    InferenceRowParallelLinear,
)
from .layers import *  # noqa: F403 - all of it, by intention
from .mappings import *  # noqa: F403
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
    "broadcast_data", "checkpoint", "convert_cuda_rng_state", "gather_split_1d_tensor",
    "get_cuda_rng_tracker", "get_data_parallel_rng_tracker_name",
    "get_expert_parallel_rng_tracker_name", "is_graph_safe_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed", "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks", "vocab_parallel_cross_entropy",
]  # fmt: skip
__all__ += layers.__all__
__all__ += mappings.__all__
