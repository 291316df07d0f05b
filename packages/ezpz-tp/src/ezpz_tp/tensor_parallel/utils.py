"""Megatron-LM's arithmetic of shards: `ezpz_tp`'s own, under the same names.

Source: NVIDIA/Megatron-LM megatron/core/tensor_parallel/utils.py and megatron/core/utils.py
(``divide``, ``ensure_divisibility``), 2026-08-22.
"""

from ezpz_tp._mappings import (
    VocabUtility,
    ensure_divisibility,
    gather_split_1d_tensor,
    split_tensor_along_last_dim,
    split_tensor_into_1d_equal_chunks,
)
from ezpz_tp._mappings import divide_and_check_no_remainder as divide

__all__ = [
    "VocabUtility", "divide", "ensure_divisibility", "gather_split_1d_tensor",
    "split_tensor_along_last_dim", "split_tensor_into_1d_equal_chunks",
]  # fmt: skip
