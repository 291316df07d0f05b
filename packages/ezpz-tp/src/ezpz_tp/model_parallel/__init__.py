"""fairscale's ``fairscale.nn.model_parallel``: its names, arguments and return values.

One implementation lies beneath, that of `ezpz_tp`. What fairscale calls model parallel is
tensor parallel.

Source: facebookresearch/fairscale fairscale/nn/model_parallel/__init__.py, 2025-04-26.
"""

from .cross_entropy import vocab_parallel_cross_entropy
from .initialize import (
    destroy_model_parallel,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_src_rank,
    get_model_parallel_world_size,
    get_pipeline_parallel_group,
    get_pipeline_parallel_ranks,
    initialize_model_parallel,
)
from .layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from .mappings import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)
from .random import checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed

__all__ = [
    "ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding",
    "checkpoint", "copy_to_model_parallel_region", "destroy_model_parallel",
    "gather_from_model_parallel_region", "get_cuda_rng_tracker", "get_data_parallel_group",
    "get_data_parallel_rank", "get_data_parallel_world_size", "get_model_parallel_group",
    "get_model_parallel_rank", "get_model_parallel_src_rank", "get_model_parallel_world_size",
    "get_pipeline_parallel_group", "get_pipeline_parallel_ranks", "initialize_model_parallel",
    "model_parallel_cuda_manual_seed", "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region", "vocab_parallel_cross_entropy",
]  # fmt: skip
