"""fairscale's region functions: its names over `ezpz_tp`'s.

Source: facebookresearch/fairscale fairscale/nn/model_parallel/mappings.py, 2025-04-26.
All are collective over the tensor-parallel group, which fairscale calls model-parallel.
"""

from ezpz_tp._mappings import copy_to_tensor_parallel_region as copy_to_model_parallel_region
from ezpz_tp._mappings import (
    gather_from_tensor_parallel_region as gather_from_model_parallel_region,
)
from ezpz_tp._mappings import (
    reduce_from_tensor_parallel_region as reduce_from_model_parallel_region,
)
from ezpz_tp._mappings import scatter_to_tensor_parallel_region as scatter_to_model_parallel_region

__all__ = [
    "copy_to_model_parallel_region", "gather_from_model_parallel_region",
    "reduce_from_model_parallel_region", "scatter_to_model_parallel_region",
]  # fmt: skip
