"""fairscale's arithmetic of shards: `ezpz_tp`'s own, under the same names.

Source: facebookresearch/fairscale fairscale/nn/model_parallel/utils.py, 2025-04-26.
"""

from ezpz_tp._mappings import (
    VocabUtility,
    divide_and_check_no_remainder,
    ensure_divisibility,
    split_tensor_along_last_dim,
)

__all__ = [
    "VocabUtility", "divide_and_check_no_remainder", "ensure_divisibility",
    "split_tensor_along_last_dim",
]  # fmt: skip
