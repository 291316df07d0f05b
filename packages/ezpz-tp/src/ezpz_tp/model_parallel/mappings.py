"""fairscale's region functions: its names over `ezpz_tp`'s.

Source: facebookresearch/fairscale fairscale/nn/model_parallel/mappings.py, 2025-04-26.
All are collective over the tensor-parallel group, which fairscale calls model-parallel.
"""

from __future__ import annotations

from torch import Tensor

from ezpz_tp import _mappings


def copy_to_model_parallel_region(input_: Tensor) -> Tensor:
    """See `ezpz_tp.copy_to_tensor_parallel_region`."""
    return _mappings.copy_to_tensor_parallel_region(input_)


def reduce_from_model_parallel_region(input_: Tensor) -> Tensor:
    """See `ezpz_tp.reduce_from_tensor_parallel_region`."""
    return _mappings.reduce_from_tensor_parallel_region(input_)


def scatter_to_model_parallel_region(input_: Tensor) -> Tensor:
    """See `ezpz_tp.scatter_to_tensor_parallel_region`."""
    return _mappings.scatter_to_tensor_parallel_region(input_)


def gather_from_model_parallel_region(input_: Tensor) -> Tensor:
    """See `ezpz_tp.gather_from_tensor_parallel_region`."""
    return _mappings.gather_from_tensor_parallel_region(input_)
