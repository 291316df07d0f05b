"""fairscale's ``fairscale.nn.model_parallel``: its names, arguments and return values.

One implementation lies beneath, that of `ezpz_tp`. What fairscale calls model parallel is
tensor parallel.

Source: facebookresearch/fairscale fairscale/nn/model_parallel/__init__.py, 2025-04-26.
"""

from . import layers, mappings
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
from .layers import *  # noqa: F403 - those of its `__all__`
from .mappings import *  # noqa: F403 - those of its `__all__`
from .random import checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed

__all__ = [
    "checkpoint", "destroy_model_parallel", "get_cuda_rng_tracker", "get_data_parallel_group",
    "get_data_parallel_rank", "get_data_parallel_world_size", "get_model_parallel_group",
    "get_model_parallel_rank", "get_model_parallel_src_rank", "get_model_parallel_world_size",
    "get_pipeline_parallel_group", "get_pipeline_parallel_ranks", "initialize_model_parallel",
    "model_parallel_cuda_manual_seed", "vocab_parallel_cross_entropy",
]  # fmt: skip
__all__ += layers.__all__
__all__ += mappings.__all__
